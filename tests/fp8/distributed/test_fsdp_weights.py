"""FSDP2: a gathered weight has the current values of its shards, however they were written."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fp8serve import autocast
from fp8serve.fp8.fsdp import gather_in_fp8, whole_state
from fp8serve.fp8.recipe import Recipe

from .ranks import counted, on_ranks
from .runs import RECIPES, batch, loss_of, network

pytestmark = pytest.mark.distributed

Step = Callable[[nn.Module, Callable[[], None]], None]


def sharded(in_fp8: bool) -> nn.Module:
    """Reshards every weight after the forward pass; a weight that FSDP2 keeps gathered is not tested here."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = gather_in_fp8(network()) if in_fp8 else network()
    for block in (*list(model.children())[:2], model):
        fully_shard(cast(Any, block), mesh=mesh, reshard_after_forward=True)
    return model


def by_optimizer(make: Callable[..., torch.optim.Optimizer], before: bool, set_to_none: bool) -> Step:
    created: list[torch.optim.Optimizer] = []

    def step(model: nn.Module, backward: Callable[[], None]) -> None:
        if not created:
            created.append(make(model.parameters()))
        if before:
            created[0].zero_grad(set_to_none=set_to_none)
        backward()
        created[0].step()
        if not before:
            created[0].zero_grad(set_to_none=set_to_none)

    return step


def by_writing(write: Callable[[Tensor], None]) -> Step:
    """Evaluates after the backward pass, then writes the weights; gradients are kept."""

    def step(model: nn.Module, backward: Callable[[], None]) -> None:
        backward()
        with torch.no_grad():
            model(batch(9, 0))
        for parameter in model.parameters():
            write(parameter)

    return step


def local(parameter: Tensor) -> Tensor:
    shard = cast(DTensor, parameter)._local_tensor
    return cast(Tensor, getattr(shard, "hp", shard))


def by_data(parameter: Tensor) -> None:
    local(parameter).data.mul_(2)


def by_numpy(parameter: Tensor) -> None:
    local(parameter).detach().numpy()[:] *= 2


@torch.no_grad()
def in_place(parameter: Tensor) -> None:
    parameter.mul_(2)


def steps() -> Iterator[tuple[str, Step]]:
    for before, set_to_none in product((True, False), (True, False)):
        step = by_optimizer(lambda p: torch.optim.AdamW(p, lr=0.05, fused=True), before, set_to_none)
        yield f"AdamW fused, zero_grad {'before' if before else 'after'}, {set_to_none}", step
    # SGD has no fused form for shards
    yield "Adagrad plain", by_optimizer(lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=False), True, False)
    yield "SGD foreach", by_optimizer(lambda p: torch.optim.SGD(p, lr=0.05, foreach=True), True, False)
    for write in (by_data, by_numpy, in_place):
        yield write.__name__, by_writing(write)


def differing_steps(rank: int, recipe: Recipe, in_fp8: bool, one_context: bool) -> Any:
    """Returns the names of the steps after which the sharded model differs from an unsharded one with its state."""
    differing = []
    for name, step in steps():
        model = sharded(in_fp8)
        context = autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD)
        outer, inner = (context, nullcontext()) if one_context else (nullcontext(), context)
        with outer:
            for _ in range(2):
                with inner:
                    loss = loss_of(model, batch(1, rank))
                with inner:  # for the evaluations
                    step(model, loss.backward)  # type: ignore[arg-type]
                if not equal_to_whole(model, recipe):
                    differing.append(name)
    return differing


def equal_to_whole(model: nn.Module, recipe: Recipe) -> bool:
    fresh = network()
    fresh.load_state_dict({n: v.clone() for n, v in whole_state(model).items()})
    with torch.no_grad():
        with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            output = model(batch(2, 0))
        with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            return torch.equal(output, fresh(batch(2, 0)))


@pytest.mark.parametrize(("name", "one_context"), [("delayed", False), ("current", False), ("current", True)])
def test_weights_gathered_in_fp8_are_current(name: str, one_context: bool) -> None:
    """Current scaling also works in one context around a whole loop; delayed scaling warns there."""
    assert on_ranks(2, differing_steps, RECIPES[name], True, one_context) == [[], []]


@pytest.mark.parametrize("name", RECIPES)
def test_weights_gathered_in_high_precision_are_current(name: str) -> None:
    assert on_ranks(2, differing_steps, RECIPES[name], False, False) == [[], []]


def accumulating(rank: int, recipe: Recipe) -> Any:
    """Returns the collectives of every microbatch, and whether the weights are current after an optimizer step."""
    model = sharded(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    calls = []
    for first in (True, False, None, False):
        with counted() as wire:
            with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD, is_first_microbatch=first):
                loss = loss_of(model, batch(1, rank))
            loss.backward()  # type: ignore[no-untyped-call]
        calls.append(wire.calls["allreduce"])
    optimizer.step()
    with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD, is_first_microbatch=False):
        loss_of(model, batch(1, rank))
    return calls, equal_to_whole(model, recipe)


@pytest.mark.smoke
def test_later_microbatches_compute_no_amax() -> None:
    """With current scaling, quantizing the weights takes one collective for their amaxes."""
    for calls, is_current in on_ranks(2, accumulating, RECIPES["current"]):
        assert calls == [1, 0, 1, 0]
        assert is_current
