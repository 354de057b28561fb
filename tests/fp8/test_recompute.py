"""Activation recomputation does not change a bit, with every recipe, order and nesting."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast, convert, scaling_state
from fp8serve.fp8.recipe import Recipe

SHORT = DelayedScaling(amax_history_len=4)
RECIPES: list[Recipe] = [SHORT, Float8CurrentScaling(), Float8CurrentScaling(granularity="row"), Float8BlockScaling()]
Wrap = Callable[[nn.Module, Tensor], Tensor]


def block(size: int = 24) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size))


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = nn.ModuleList([block(), block(), block()])
    convert(blocks)
    return blocks


def plain(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(x)
    return out


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=False)
    return out


def nested(module: nn.Module, x: Tensor) -> Tensor:
    """Recomputes the whole block in a region, with a nested region around each of its linear layers."""
    assert isinstance(module, nn.Sequential)

    def outer(x: Tensor) -> Tensor:
        return checkpointed(module[2], module[1](checkpointed(module[0], x)))

    out: Tensor = checkpoint(outer, x, use_reentrant=False)
    return out


def mixed_precision(module: nn.Module, x: Tensor, repeat: bool = True) -> Tensor:
    """Recomputes a region that changes the precision inside."""
    assert isinstance(module, nn.Sequential)

    def mixed(x: Tensor) -> Tensor:
        x = module[0](x)
        with autocast(enabled=False):
            x = module[2](x)
        with autocast(recipe=Float8CurrentScaling()):
            return plain(module[2], x)

    out: Tensor = checkpoint(mixed, x, use_reentrant=False) if repeat else mixed(x)
    return out


def batch(step: int) -> Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(step)) * (1 + step)


def loss_of(blocks: nn.ModuleList, wrap: Wrap, recipe: Recipe, step: int) -> Tensor:
    with autocast(recipe=recipe):
        x = batch(step).requires_grad_()
        for each in blocks:
            x = wrap(each, x)
    return x.square().mean()


def train(blocks: nn.ModuleList, wrap: Wrap, recipe: Recipe, accumulate: int = 1) -> list[Tensor]:
    for step in range(3):
        blocks.zero_grad()
        for micro in range(accumulate):
            loss_of(blocks, wrap, recipe, 10 * step + micro).backward()
    return [p.grad for p in blocks.parameters() if p.grad is not None] + list(blocks.state_dict().values())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("wrap", [checkpointed, nested])
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_recomputation_changes_no_bit(recipe: Recipe, wrap: Wrap, accumulate: int) -> None:
    """Compares gradients, scales, histories and counters. The scales are updated between the two runs of a region."""
    blocks = model()
    twin = copy.deepcopy(blocks)
    assert same(train(blocks, plain, recipe, accumulate), train(twin, wrap, recipe, accumulate))


def test_changes_of_precision_inside_a_region_are_recomputed() -> None:
    blocks = model()
    twin = copy.deepcopy(blocks)
    assert same(train(blocks, partial(mixed_precision, repeat=False), SHORT), train(twin, mixed_precision, SHORT))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_their_backwards_in_any_order(order: tuple[int, int]) -> None:
    """Each region is recomputed with the scales of its own first run."""
    results = []
    for wrap in (plain, checkpointed):
        blocks = model()
        losses = [loss_of(blocks, wrap, SHORT, step) for step in range(2)]
        for i in order:
            losses[i].backward()
        results.append([p.grad for p in blocks.parameters() if p.grad is not None] + list(blocks.state_dict().values()))
    assert same(*results)


def test_a_backward_pass_inside_the_context_gives_the_same_states() -> None:
    results = []
    for wrap in (plain, checkpointed):
        blocks = model()
        for step in range(3):
            with autocast(recipe=SHORT):
                loss_of(blocks, wrap, SHORT, step).backward()
        results.append(list(blocks.state_dict().values()))
    assert same(*results)


def test_the_second_run_stages_no_amax() -> None:
    blocks = model()
    loss_of(blocks, checkpointed, SHORT, 0).backward()
    for name, history in blocks.state_dict().items():
        assert not name.endswith("amax_history") or history[0] == 0.0  # row 0 is the staged amax


def test_regions_in_high_precision_are_recomputed_as_by_torch() -> None:
    blocks = model()
    x = batch(0).requires_grad_()
    checkpointed(blocks[0], x).sum().backward()
    expected = batch(0).requires_grad_()
    plain(blocks[0], expected).sum().backward()
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)
    assert scaling_state(blocks[0][0]) == {}  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_the_reentrant_variant_is_refused_under_an_fp8_recipe() -> None:
    blocks = model()
    reentrant = partial(checkpoint, use_reentrant=True)
    loss = loss_of(blocks, reentrant, SHORT, 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="with use_reentrant=False"):
        loss.backward()
    x = batch(0).requires_grad_()  # in high precision it is accepted
    reentrant(blocks[1], x).sum().backward()
    assert x.grad is not None


def test_a_region_that_runs_other_layers_the_second_time_is_refused() -> None:
    blocks = model()
    turn = iter((0, 1))

    def choose_another_block(x: Tensor) -> Tensor:
        return plain(blocks[next(turn)], x)

    with autocast(recipe=SHORT):
        y = checkpoint(choose_another_block, batch(0).requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="ran its layers in another order the second time"):
        y.sum().backward()
