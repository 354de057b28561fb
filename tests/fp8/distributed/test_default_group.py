"""Without an explicit group, `autocast` reduces over the default process group, as Transformer Engine does.

`reduce_amax=False` gives each rank its own scales. Calibration and training on one rank never reduce.
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
from .runs import DELAYED, STEPS, assert_same, network, train_on_one_process, train_on_rank

pytestmark = pytest.mark.distributed

SHORT = DelayedScaling(amax_history_len=4)


def newest(layer: Linear) -> float:
    return scaling_state(layer)["input"].amax_history[-1].item()


def ported(rank: int, recipe: Recipe) -> Any:
    """Runs a data-parallel script that passes no group."""
    with counted() as wire:
        result = train_on_rank(DistributedDataParallel(network()), rank, recipe, None)
    return {**result, "calls": wire.calls["allreduce"]}


@pytest.mark.smoke
def test_a_script_without_a_group_has_the_scales_of_one_process() -> None:
    results = on_ranks(2, ported, DELAYED)
    for rank, expected in enumerate(train_on_one_process(DELAYED, 2)):
        assert_same(results[rank], expected)


def test_reduce_amax_false_needs_no_collective() -> None:
    separate, reduced = (on_ranks(2, ported, recipe) for recipe in (replace(DELAYED, reduce_amax=False), DELAYED))
    assert [r["calls"] for r in reduced] == [r["calls"] + 2 * STEPS for r in separate]
    name = "0.up.input.scale"
    assert not torch.equal(separate[0]["state"][name], separate[1]["state"][name])


@autocast(recipe=SHORT)  # created before there is a process group
def decorated(layer: Linear, x: torch.Tensor) -> None:
    layer(x)


def early(rank: int) -> float:
    layer = Linear(8, 8)
    decorated(layer, torch.full((2, 8), float(rank + 1)))
    return newest(layer)


def test_the_group_is_looked_up_when_the_context_is_entered() -> None:
    assert on_ranks(2, early) == [2.0, 2.0]
    layer = Linear(8, 8)
    decorated(layer, torch.ones(2, 8))  # without a process group
    assert newest(layer) == 1.0


def on_one_rank(rank: int) -> float:
    """Rank 0 evaluates, and trains in high precision, without the other rank."""
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


def with_new_group(rank: int) -> float:
    """Each rank destroys the default group and creates one of its own."""
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


def test_a_new_default_group_is_used_and_a_group_of_one_needs_no_collective() -> None:
    assert on_ranks(2, with_new_group) == [3.0, 6.0]


def left_behind(rank: int) -> bool:
    """Returns whether a destroyed group, which amaxes were reduced over, is still referenced."""
    layer, group = Linear(8, 8), dist.new_group([0, 1])
    with autocast(recipe=SHORT, amax_reduction_group=group):
        y = layer(torch.ones(2, 8))
    y.sum().backward()
    dist.barrier()
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    return reference() is not None


def test_the_common_session_keeps_no_reference_to_a_destroyed_group() -> None:
    """A reference would keep the threads of the group alive."""
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
    return "no error"


def test_a_backward_pass_without_its_group_is_refused() -> None:
    message = "The process group was destroyed before the amaxes of this step were reduced over it."
    assert on_ranks(2, destroyed_too_early) == [message, message]


def whole_job(rank: int, folder: str) -> int:
    """Rank 0 calibrates a model and fine-tunes the result while the other rank waits."""
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
