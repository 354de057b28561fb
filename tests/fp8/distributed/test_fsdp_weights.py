"""FSDP2: a gathered weight is the weight as it is, whoever wrote to the shards and how."""

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
    """Nothing stays gathered after a forward pass: what FSDP2 itself does not gather again is no matter of ours."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = gather_in_fp8(network()) if in_fp8 else network()
    for block in (*list(model.children())[:2], model):
        fully_shard(cast(Any, block), mesh=mesh, reshard_after_forward=True)
    return model


def by_optimizer(make: Callable[..., torch.optim.Optimizer], before: bool, none: bool) -> Step:
    made: list[torch.optim.Optimizer] = []

    def step(model: nn.Module, backward: Callable[[], None]) -> None:
        if not made:
            made.append(make(model.parameters()))
        if before:
            made[0].zero_grad(set_to_none=none)
        backward()
        made[0].step()
        if not before:
            made[0].zero_grad(set_to_none=none)

    return step


def by_writing(write: Callable[[Tensor], None]) -> Step:
    """Gradients stay, an evaluation comes before the write."""

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
    for before, none in product((True, False), (True, False)):
        made = by_optimizer(lambda p: torch.optim.AdamW(p, lr=0.05, fused=True), before, none)
        yield f"AdamW fused, zero_grad {'before' if before else 'after'}, {none}", made
    # SGD has no fused form for shards
    yield "Adagrad plain", by_optimizer(lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=False), True, False)
    yield "SGD foreach", by_optimizer(lambda p: torch.optim.SGD(p, lr=0.05, foreach=True), True, False)
    for write in (by_data, by_numpy, in_place):
        yield write.__name__, by_writing(write)


def frozen(rank: int, recipe: Recipe, in_fp8: bool, one_context: bool) -> Any:
    """The steps after which the sharded model differs from a whole one with its weights and scales."""
    wrong = []
    for name, step in steps():
        model = sharded(in_fp8)
        around = autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD)
        outer, inner = (around, nullcontext()) if one_context else (nullcontext(), around)
        with outer:
            for _ in range(2):
                with inner:
                    loss = loss_of(model, batch(1, rank))
                with inner:  # for the evaluations
                    step(model, loss.backward)  # type: ignore[arg-type]
                if not equal_to_whole(model, recipe):
                    wrong.append(name)
    return wrong


def equal_to_whole(model: nn.Module, recipe: Recipe) -> bool:
    fresh = network()
    fresh.load_state_dict({n: v.clone() for n, v in whole_state(model).items()})
    with torch.no_grad():
        with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            found = model(batch(2, 0))
        with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            return torch.equal(found, fresh(batch(2, 0)))


@pytest.mark.parametrize(("name", "one_context"), [("delayed", False), ("current", False), ("current", True)])
def test_what_is_gathered_in_fp8_is_the_weight_as_it_is(name: str, one_context: bool) -> None:
    """Current scaling works in one context around a whole loop, too; delayed scaling warns of that."""
    assert on_ranks(2, frozen, RECIPES[name], True, one_context) == [[], []]


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_gathered_in_high_precision_is_the_weight_as_it_is(name: str) -> None:
    assert on_ranks(2, frozen, RECIPES[name], False, False) == [[], []]


def accumulating(rank: int, recipe: Recipe) -> Any:
    """How many bytes are cast in each microbatch, announced, and after a step that only the weights show."""
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


def test_announced_microbatches_find_no_amax_anew() -> None:
    """Under a current recipe a cast takes one collective for the amaxes of all weights."""
    for calls, right in on_ranks(2, accumulating, RECIPES["current"]):
        assert calls == [1, 0, 1, 0]
        assert right
