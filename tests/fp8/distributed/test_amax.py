"""Amax reduction: one collective an update, equal scales, and no hang where a module, or nothing at all, runs."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from fp8serve import DelayedScaling, Linear, autocast, scaling_state
from fp8serve.errors import RecipeError
from fp8serve.fp8.autocast import join_backward

from .ranks import counted, on_ranks
from .runs import states

RECIPE = DelayedScaling(amax_history_len=4)


def train(rank: int) -> Any:
    """Rank r multiplies its data by r + 1; odd ranks skip the second layer at first; rank 0 sees an infinity."""
    torch.manual_seed(0)
    first, second, never = Linear(8, 8), Linear(8, 8), Linear(8, 8)
    group = dist.group.WORLD
    with counted() as wire:
        for step in range(3):
            x = torch.full((2, 8), float(rank + 1))
            if step == 2 and rank == 0:
                x[0, 0] = torch.inf
            with autocast(recipe=RECIPE, amax_reduction_group=group):
                y = first(x)
                if not (step == 0 and rank % 2 == 1):
                    y = second(y)
            (y.sum() * (rank + 1)).backward()
        with autocast(recipe=RECIPE, amax_reduction_group=group):
            if rank == 1:
                first(torch.full((2, 8), 7.0))  # the others run nothing at all
    return states(first), states(second), states(never), dict(wire.calls)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_hold_equal_scales_whatever_ran_where(world: int) -> None:
    ranks = on_ranks(world, train)
    assert all(r == ranks[0] for r in ranks)
    first, second, never, calls = ranks[0]
    largest = float(world)
    assert first["input"][1] == [0.0, largest, largest, 7.0]  # maxima over ranks; the infinite step was dropped
    assert first["input"][2] == 1
    assert {name: entry[3] for name, entry in second.items()} == {"input": 3, "weight": 2, "grad_output": 3}
    assert never == {}
    assert calls == {"allreduce": 3 * 2 + 1}  # one a forward pass, one a backward pass, for all layers together


def idle(rank: int) -> Any:
    """Only rank 0 has data: rank 1 runs nothing in FP8, forward or backward."""
    torch.manual_seed(0)
    layer, group = Linear(8, 8), dist.group.WORLD
    for _ in range(2):
        with autocast(recipe=RECIPE, amax_reduction_group=group):
            y = layer(torch.ones(2, 8)) if rank == 0 else None
        if y is None:
            join_backward(RECIPE, group)
        else:
            y.sum().backward()
            layer.zero_grad()
    return states(layer)


def test_a_rank_that_runs_nothing_joins() -> None:
    one, other = on_ranks(2, idle)
    assert one == other
    assert {name: entry[3] for name, entry in other.items()} == {"input": 2, "weight": 2, "grad_output": 2}


def discarding(rank: int) -> Any:
    """Rank 0 still holds modules that the others have dropped, and makes a copy that they do not."""
    dropped = [Linear(8, 8) for _ in range(40)]
    layer = Linear(8, 8)
    if rank != 0:
        dropped.clear()
    extra = copy.deepcopy(layer) if rank == 0 else None
    with autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
        layer(torch.full((2, 8), float(rank + 1)))
        if extra is not None:
            extra(torch.ones(2, 8))
    return scaling_state(layer)["input"].amax_history[-1].item()


def test_modules_that_one_rank_alone_has_do_no_harm() -> None:
    assert on_ranks(2, discarding) == [2.0, 2.0]


def halves(rank: int) -> Any:
    """Ranks 0, 1 and ranks 2, 3 reduce apart from each other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = Linear(8, 8)
    with autocast(recipe=RECIPE, amax_reduction_group=groups[rank // 2]):
        layer(torch.full((2, 8), float(rank + 1)))
    return scaling_state(layer)["input"].amax_history[-1].item()


def test_only_the_given_group_is_asked() -> None:
    assert on_ranks(4, halves) == [2.0, 2.0, 4.0, 4.0]


def apart(rank: int) -> Any:
    layer = Linear(8, 8)
    with autocast(recipe=DelayedScaling(amax_history_len=4, reduce_amax=False), amax_reduction_group=dist.group.WORLD):
        layer(torch.full((2, 8), float(rank + 1)))
    return scaling_state(layer)["input"].amax_history[-1].item()


def test_reduce_amax_false_leaves_ranks_alone() -> None:
    assert on_ranks(2, apart) == [1.0, 2.0]


def failing(rank: int) -> Any:
    if rank == 1:
        raise RecipeError("as planned")
    dist.barrier()


def test_a_failing_rank_fails_the_test_at_once() -> None:
    with pytest.raises(ProcessRaisedException, match=r"as planned|closed by peer"):
        on_ranks(2, failing)
