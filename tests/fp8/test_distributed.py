"""Amax reduction over gloo processes: one collective, equal scales, and no hang where a module does not run."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fp8serve import DelayedScaling, Linear, autocast, scaling_state

RECIPE = DelayedScaling(amax_history_len=4)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def entry(rank: int, world: int, port: int, body: Callable[[int], Any], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    results[rank] = body(rank)
    dist.destroy_process_group()


def on_ranks(world: int, body: Callable[[int], Any]) -> list[Any]:
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(entry, args=(world, free_port(), body, results), nprocs=world, start_method="fork")
        return [results[rank] for rank in range(world)]


def state(layer: Linear) -> Any:
    return [
        (name, s.scale.item(), s.amax_history.tolist(), s.nonfinite.item(), s.steps.item())
        for name, s in scaling_state(layer).items()
    ]


def train(rank: int) -> Any:
    """Rank r multiplies its data by r + 1; rank 1 skips the second layer in the first step; rank 0 sees an infinity."""
    torch.manual_seed(0)
    first, second, never = Linear(8, 8), Linear(8, 8), Linear(8, 8)
    collectives, reduce = [0], dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        collectives[0] += 1
        return reduce(*args, **kwargs)

    dist.all_reduce = counting
    group = dist.group.WORLD
    for step in range(3):
        x = torch.full((2, 8), float(rank + 1))
        if step == 2 and rank == 0:
            x[0, 0] = torch.inf
        with autocast(recipe=RECIPE, amax_reduction_group=group):
            y = first(x)
            if not (step == 0 and rank == 1):
                y = second(y)
        (y.sum() * (rank + 1)).backward()
    with autocast(recipe=RECIPE, amax_reduction_group=group):
        if rank == 1:
            first(torch.full((2, 8), 7.0))  # the other rank runs nothing at all
    return state(first), state(second), state(never), collectives[0]


@pytest.mark.parametrize("world", [2])
def test_ranks_hold_equal_scales_whatever_ran_where(world: int) -> None:
    ranks = on_ranks(world, train)
    assert all(r == ranks[0] for r in ranks)
    first, second, never, collectives = ranks[0]
    by_name = {name: rest for name, *rest in first}
    assert by_name["input"][1] == [0.0, 2.0, 2.0, 7.0]  # maxima over the ranks; the infinite step was dropped
    assert by_name["input"][2] == 1
    assert {name: steps for name, *_, steps in second} == {"input": 3, "weight": 2, "grad_output": 3}
    assert never == []
    assert collectives == 3 * 2 + 1


def alone(rank: int) -> Any:
    layer = Linear(8, 8)
    with autocast(recipe=DelayedScaling(amax_history_len=4, reduce_amax=False), amax_reduction_group=dist.group.WORLD):
        layer(torch.full((2, 8), float(rank + 1)))
    return scaling_state(layer)["input"].amax_history[-1].item()


def test_reduce_amax_false_leaves_ranks_alone() -> None:
    assert on_ranks(2, alone) == [1.0, 2.0]
