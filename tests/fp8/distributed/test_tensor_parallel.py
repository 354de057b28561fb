"""Column and row layers, with and without sequence parallelism, have the results of the whole layer in one process.

Scales have the same bits if they are computed from the same bits, which is always so for a single layer. Results are
sums of the same FP32 products in another order (over the ranks, and in a BLAS whose order depends on the size). This
changes a sum of K terms by at most K * 2^-24 of the largest term, so `CLOSE` = 1e-5 bounds one layer. In a run of
several steps, such a difference can round a value to another FP8 value, up to 1/16 away; in the mean over a loss this
is about 1e-3, and `RUN` = 5e-3 bounds losses and scales of a run. Recipes with a scale for each row or block compute it
on each rank from its own part. So two different quantizations are compared, each with the error of E5M2 gradients
(about 7 %); `QUANTIZED` bounds their difference.
"""

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8serve import DelayedScaling, Linear, autocast, convert
from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import NVFP4BlockScaling, Recipe
from fp8serve.fp8.tensor_parallel import ParallelLinear, parallelize, sum_gradients

from .ranks import counted, on_ranks
from .runs import DELAYED, RECIPES, states

pytestmark = pytest.mark.distributed

CLOSE, RUN, QUANTIZED = 1e-5, 5e-3, 0.15
PER_TENSOR = ["delayed", "current", "power of two"]
Kind = Literal["column", "row"]


def layer(kind: str = "whole") -> nn.Module:
    """Returns a layer 32 -> 16 whose weight has rows and columns of very different magnitudes."""
    torch.manual_seed(0)
    linear = Linear(32, 16)
    with torch.no_grad():
        linear.weight *= torch.linspace(0.2, 3.0, 16).unsqueeze(1) * torch.linspace(1.0, 4.0, 32)
    return nn.ModuleDict({kind: linear})


def data(step: int) -> tuple[Tensor, Tensor]:
    """Returns x [8, 32] and the gradient of y [8, 16], with tokens of different magnitudes."""
    generator = torch.Generator().manual_seed(step)
    size = torch.linspace(0.5, 5.0, 8).unsqueeze(1)
    return torch.randn(8, 32, generator=generator) * size, torch.randn(8, 16, generator=generator) / size


def three_steps(linear: Linear, recipe: Recipe, group: Any, mine: Any, whole: Any) -> list[Any]:
    """Returns the unsharded y, dX, dW and db of every step. `mine` selects this rank's part of a tensor; `whole`
    gathers the parts of all ranks."""
    tensors = []
    for i in range(3):
        x, dy = data(i)
        leaf = mine("x", x).clone().requires_grad_()
        with autocast(recipe=recipe, amax_reduction_group=group):
            y = linear(leaf)
        y.backward(mine("y", dy))
        grads = [leaf.grad, linear.weight.grad, linear.bias.grad]
        tensors.append([whole(n, t.detach()) for n, t in zip("yxwb", [y, *grads], strict=True)])
        linear.zero_grad()
    return tensors


def alone(recipe: Recipe) -> Any:
    linear = layer()["whole"]
    return three_steps(linear, recipe, None, lambda n, t: t, lambda n, t: t), states(linear)


def sharded_dims(kind: Kind, sequence_parallel: bool) -> dict[str, int | None]:
    """Returns the dimension along which each tensor is sharded, or None if every rank has all of it."""
    tokens = 0 if sequence_parallel else None
    if kind == "column":
        return {"x": tokens, "y": 1, "w": 0, "b": 0}
    return {"x": 1, "y": tokens, "w": 1, "b": None}


def parallel(rank: int, kind: Kind, sequence_parallel: bool, name: str) -> Any:
    group, world = dist.group.WORLD, dist.get_world_size()
    linear = parallelize(layer(kind), {kind: kind}, group, sequence_parallel)[kind]
    cut = sharded_dims(kind, sequence_parallel)

    def mine(n: str, t: Tensor) -> Tensor:
        return t if cut[n] is None else t.chunk(world, cut[n])[rank].contiguous()

    def whole(n: str, t: Tensor) -> Tensor:
        if cut[n] is None:
            return t
        parts = [torch.empty_like(t.contiguous()) for _ in range(world)]
        dist.all_gather(parts, t.contiguous())
        return torch.cat(parts, cut[n])

    tensors = three_steps(linear, RECIPES[name], group, mine, whole)
    assert torch.equal(linear.whole_weight(), layer()["whole"].weight)
    return tensors, states(linear)


@pytest.mark.parametrize("name", PER_TENSOR)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole tokens", "sequence parallel"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_sharded_layer_has_the_results_of_the_whole_layer(kind: Kind, sequence_parallel: bool, name: str) -> None:
    expected, scales = alone(RECIPES[name])
    for actual_tensors, actual_scales in on_ranks(2, parallel, kind, sequence_parallel, name):
        assert actual_scales == scales
        for actual, reference in zip(actual_tensors, expected, strict=True):
            for a, b in zip(actual, reference, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=CLOSE * float(b.abs().max()))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["column", "row"])
def test_four_ranks_have_the_results_of_the_whole_layer(kind: Kind) -> None:
    expected, scales = alone(DELAYED)
    for actual_tensors, actual_scales in on_ranks(4, parallel, kind, True, "delayed"):
        assert actual_scales == scales
        for actual, reference in zip(actual_tensors, expected, strict=True):
            for a, b in zip(actual, reference, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=CLOSE * float(b.abs().max()))


@pytest.mark.parametrize("name", ["rowwise", "block"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_recipes_that_gather_in_high_precision_are_close_to_the_whole_layer(kind: Kind, name: str) -> None:
    """Each rank scales its own part of a row or block, so the result is not equal to that of the whole layer."""
    expected, _ = alone(RECIPES[name])
    for actual_tensors, _ in on_ranks(2, parallel, kind, True, name):
        for actual, reference in zip(actual_tensors, expected, strict=True):
            for a, b in zip(actual, reference, strict=True):
                assert float((a - b).norm() / b.norm()) < QUANTIZED


def wire_bytes(rank: int, kind: Kind) -> Any:
    """Returns the bytes that one step gathers in FP8 and in BF16; x has 8 x 32 and y 8 x 16 elements."""
    bytes_of_recipe = {}
    for name, recipe in {"fp8": DELAYED, "bf16": RECIPES["rowwise"]}.items():
        linear = parallelize(layer(kind), {kind: kind}, dist.group.WORLD, sequence_parallel=True)[kind]
        x, dy = (t.bfloat16() for t in data(0))
        x, dy = (
            x.chunk(2, sharded_dims(kind, True)["x"] or 0)[rank],
            dy.chunk(2, sharded_dims(kind, True)["y"] or 0)[rank],
        )
        with counted() as wire:
            with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
                y = linear(x.clone().requires_grad_())
            y.backward(dy)
        bytes_of_recipe[name] = wire.bytes["allgather_base"]
    return bytes_of_recipe


@pytest.mark.parametrize(("kind", "gathered"), [("column", {"fp8": 2 * 4 * 32, "bf16": 2 * 4 * 32}),
                                                ("row", {"fp8": 4 * 16, "bf16": 2 * 4 * 16})])  # fmt: skip
def test_gathered_bytes(kind: Kind, gathered: dict[str, int]) -> None:
    """A column layer gathers FP8 twice and saves only its own tokens; it gathers BF16 once and saves all tokens."""
    assert on_ranks(2, wire_bytes, kind) == [gathered, gathered]


class Block(nn.Module):
    """Norm, column layer, SiLU, row layer and residual. Activations between blocks are sharded along the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(Block(), Block()))


def train(model: nn.Module, recipe: Recipe, group: Any, rank: int, world: int, recompute: bool = False) -> Any:
    """Runs five steps; rank r has the r-th part of the tokens. Returns the losses over all tokens, and all scales."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shared = [p for n, p in model.named_parameters() if "norm" in n]
    losses = []
    for step in range(5):
        x, _ = data(step)
        x = x.chunk(world)[rank]
        with autocast(recipe=recipe, amax_reduction_group=group):
            y: Any = x.clone().requires_grad_()
            for block in model:  # type: ignore[attr-defined]
                y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
            loss = (y - x.sin()).square().sum() / (32 * 8)
        loss.backward()
        if group is not None:
            sum_gradients(shared, group)
            dist.all_reduce(loss.detach())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [states(m) for m in model.modules() if isinstance(m, Linear)]


def train_parallel(rank: int, name: str, recompute: bool = False) -> Any:
    group = dist.group.WORLD
    model = parallelize(blocks(), {"*.up": "column", "*.down": "row"}, group, sequence_parallel=True)
    return train(model, RECIPES[name], group, rank, dist.get_world_size(), recompute)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PER_TENSOR)
def test_a_run_has_the_losses_and_scales_of_one_process(world: int, name: str) -> None:
    losses, scales = train(blocks(), RECIPES[name], None, 0, 1)
    for actual_losses, actual_scales in on_ranks(world, train_parallel, name):
        assert actual_losses == pytest.approx(losses, rel=RUN)
        for actual, reference in zip(actual_scales, scales, strict=True):
            for tensor in reference:
                assert actual[tensor][0] == pytest.approx(reference[tensor][0], rel=RUN)
                assert actual[tensor][2:] == reference[tensor][2:]


def test_recomputed_activations_change_nothing() -> None:
    assert on_ranks(2, train_parallel, "delayed", True) == on_ranks(2, train_parallel, "delayed", False)


def outside(rank: int) -> Any:
    """Returns the largest difference from the unsharded model, without autocast, so in high precision."""
    group = dist.group.WORLD
    model = parallelize(blocks(), {"*.up": "column", "*.down": "row"}, group, sequence_parallel=True)
    whole = blocks()
    x, _ = data(0)
    return (model(x.chunk(2)[rank]) - whole(x).chunk(2)[rank]).abs().max().item()


def test_high_precision_outside_of_autocast() -> None:
    assert max(on_ranks(2, outside)) < 1e-5


def refusals(rank: int) -> Any:
    model = parallelize(blocks(), {"*.up": "column"}, dist.group.WORLD, sequence_parallel=True)
    with pytest.raises(RecipeError) as error, autocast(recipe=DelayedScaling(reduce_amax=False)):
        model(data(0)[0])
    with pytest.raises(RecipeError, match="does not support NVFP4"), autocast(recipe=NVFP4BlockScaling()):
        model(data(0)[0])
    with pytest.raises(ValueError, match="cannot be cut evenly"):
        parallelize(convert(nn.Sequential(nn.Linear(8, 7))), {"0": "column"}, dist.group.WORLD)
    with pytest.raises(ValueError, match="has a name like"):
        parallelize(blocks(), {"*.gate": "column"}, dist.group.WORLD)
    plain = parallelize(blocks(), {"*.down": "row"}, dist.group.WORLD, sequence_parallel=True)
    down = next(m for m in plain.modules() if isinstance(m, ParallelLinear))
    with pytest.raises(ValueError, match="multiple of 2 tokens"):
        down(torch.ones(3, 32))
    return str(error.value)


def test_unsupported_settings_are_refused_with_a_reason() -> None:
    assert all("amax_reduction_group" in message for message in on_ranks(2, refusals))


def overflow(rank: int, kind: Kind, sequence_parallel: bool) -> Any:
    """Returns which of dX, dW and db are finite on this rank if dY has one infinity, in high precision and in FP8."""
    group, cut = dist.group.WORLD, sharded_dims(kind, sequence_parallel)
    x, dy = data(0)
    dy[0, 0] = torch.inf

    def mine(name: str, t: Tensor) -> Tensor:
        dim = cut[name]
        return t if dim is None else t.chunk(dist.get_world_size(), dim)[rank].contiguous()

    def finite(context: autocast) -> list[bool]:
        linear = parallelize(layer(kind), {kind: kind}, group, sequence_parallel)[kind]
        leaf = mine("x", x).clone().requires_grad_()
        with context:
            y = linear(leaf)
        y.backward(mine("y", dy))
        return [bool(t.grad.isfinite().all()) for t in (leaf, linear.weight, linear.bias)]

    plain = finite(autocast(enabled=False))
    return plain, {name: finite(autocast(recipe=r, amax_reduction_group=group)) for name, r in RECIPES.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole tokens", "sequence parallel"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_an_infinite_gradient_reaches_the_ranks_that_it_reaches_in_high_precision(
    kind: Kind, sequence_parallel: bool
) -> None:
    ranks = on_ranks(2, overflow, kind, sequence_parallel)
    assert not all(flag for plain, _ in ranks for flag in plain)
    for plain, by_recipe in ranks:
        for name, nonfinite in by_recipe.items():
            assert not any(actual and not reference for actual, reference in zip(nonfinite, plain, strict=True)), name
