"""Without an explicit group, `autocast` reduces over the default process group, as Transformer Engine does.

Whoever wants scales of each rank's own says so with `reduce_amax=False`; what runs on one rank alone says it by itself.
"""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp8serve import DelayedScaling, Linear, autocast, scaling_state
from fp8serve.calibration.pipeline import calibrate
from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import Recipe
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer
from tests.tiny import CHATS, write_tiny_model

from .ranks import counted, on_ranks
from .runs import DELAYED, STEPS, alone, network, on_rank, same

pytestmark = pytest.mark.distributed

SHORT = DelayedScaling(amax_history_len=4)


def newest(layer: Linear) -> float:
    return scaling_state(layer)["input"].amax_history[-1].item()


def ported(rank: int, recipe: Recipe) -> Any:
    """A data-parallel script that says nothing about a group."""
    with counted() as wire:
        found = on_rank(DistributedDataParallel(network()), rank, recipe, None)
    return {**found, "calls": wire.calls["allreduce"]}


@pytest.mark.smoke
def test_a_script_without_a_group_has_the_scales_of_one_process() -> None:
    found = on_ranks(2, ported, DELAYED)
    for rank, wanted in enumerate(alone(DELAYED, 2)):
        same(found[rank], wanted)


def test_reduce_amax_false_sends_nothing() -> None:
    apart, together = (on_ranks(2, ported, recipe) for recipe in (replace(DELAYED, reduce_amax=False), DELAYED))
    assert [r["calls"] for r in together] == [r["calls"] + 2 * STEPS for r in apart]
    name = "0.up.input.scale"
    assert not torch.equal(apart[0]["state"][name], apart[1]["state"][name])


@autocast(recipe=SHORT)  # made while there is no process group yet
def decorated(layer: Linear, x: torch.Tensor) -> None:
    layer(x)


def early(rank: int) -> float:
    layer = Linear(8, 8)
    decorated(layer, torch.full((2, 8), float(rank + 1)))
    return newest(layer)


def test_the_group_is_looked_up_when_the_context_is_entered() -> None:
    assert on_ranks(2, early) == [2.0, 2.0]
    layer = Linear(8, 8)
    decorated(layer, torch.ones(2, 8))  # and here is none
    assert newest(layer) == 1.0


def on_one_rank(rank: int) -> float:
    """What one rank must be able to do alone: evaluate, and compute in high precision."""
    layer, x = Linear(8, 8), torch.full((2, 8), float(rank + 1))
    with autocast(recipe=SHORT):
        layer(x)
    if rank == 0:
        with torch.no_grad(), autocast(recipe=SHORT):
            layer(9 * x)
        with autocast(enabled=False, recipe=SHORT):
            layer(9 * x).sum().backward()
    dist.barrier()
    with autocast(recipe=SHORT):
        layer(x)
    return newest(layer)


def test_one_rank_may_evaluate_alone() -> None:
    assert on_ranks(2, on_one_rank) == [2.0, 2.0]


def anew(rank: int) -> float:
    """The default group is destroyed and made again, by one rank for itself alone."""
    layer, x = Linear(8, 8), torch.full((2, 8), float(rank + 1))
    with autocast(recipe=SHORT):
        layer(x)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    with counted() as wire, autocast(recipe=SHORT):
        layer(3 * x)
    assert not wire.calls
    return newest(layer)


def test_another_default_group_is_noticed_and_a_group_of_one_sends_nothing() -> None:
    assert on_ranks(2, anew) == [3.0, 6.0]


def left_behind(rank: int) -> bool:
    """Whether anything still refers to a group that was reduced over and destroyed."""
    layer, group = Linear(8, 8), dist.new_group([0, 1])
    with autocast(recipe=SHORT, amax_reduction_group=group):
        y = layer(torch.ones(2, 8))
    y.sum().backward()
    dist.barrier()
    found = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    return found() is not None


def test_the_common_session_lets_a_destroyed_group_go() -> None:
    """Otherwise its threads would live as long as the process."""
    assert on_ranks(2, left_behind) == [False, False]


def destroyed_too_early(rank: int) -> str:
    layer, group = Linear(8, 8), dist.new_group([0, 1])
    with autocast(recipe=SHORT, amax_reduction_group=group):
        y = layer(torch.ones(2, 8))
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    try:
        y.sum().backward()
    except RecipeError as error:
        return str(error)
    return "gradients of one rank alone"


def test_a_backward_pass_without_its_group_is_refused() -> None:
    told = "The process group was destroyed before the amaxes of this step were reduced over it."
    assert on_ranks(2, destroyed_too_early) == [told, told]


def whole_job(rank: int, folder: str) -> int:
    """Rank 0 alone calibrates a model and fine-tunes the result while the others wait."""
    if rank == 0:
        out, data = Path(folder) / "fp8", Path(folder) / "chats.jsonl"
        calibrate(Path(folder) / "model", out=out, recipe=SHORT, samples=2, seq_len=32, batch_size=1)
        run = {"out": str(Path(folder) / "run"), "amax_history_len": 4, "batch_size": 2, "seq_len": 32, "max_steps": 2}
        Trainer(TrainConfig.from_dict({"model": str(out), "data": [str(data)], **run})).run()
    dist.barrier()
    return rank


def test_calibrating_and_training_on_one_rank_wait_for_no_other(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(CHATS)
    write_tiny_model(tmp_path / "model")
    assert on_ranks(2, whole_job, str(tmp_path)) == [0, 1]
