"""A call of a layer evaluates the parametrizations of its weight and bias once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, NormLinear, autocast, convert
from fp8serve.fp8.grouped_linear import grouped_linear
from fp8serve.fp8.lora import LoraLinear
from fp8serve.fp8.recipe import Recipe

SHORT = DelayedScaling(amax_history_len=4)
IN_HIGH_PRECISION = DelayedScaling(amax_history_len=4, override_linear_precision=(False, True, True))
RECIPES: list[Recipe] = [SHORT, IN_HIGH_PRECISION, Float8CurrentScaling(), Float8BlockScaling()]


class DropConnect(nn.Module):
    """Sets a random half of the elements to zero, another half at every evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, weight: Tensor) -> Tensor:
        self.masks.append((torch.rand_like(weight) < 0.5).to(weight.dtype))
        return weight * self.masks[-1]


def layer(bias: bool = True) -> tuple[Linear, list[Tensor], list[Tensor]]:
    """Returns a layer with DropConnect on its weight and bias, and the lists of the masks drawn for each."""
    torch.manual_seed(0)
    linear = convert(nn.Linear(32, 16, bias=bias))
    assert isinstance(linear, Linear)
    drop, drop_bias = DropConnect(), DropConnect()
    register_parametrization(linear, "weight", drop)
    if bias:
        register_parametrization(linear, "bias", drop_bias)
    drop.masks.clear()
    drop_bias.masks.clear()
    return linear, drop.masks, drop_bias.masks


def original(linear: nn.Module, name: str = "weight") -> Tensor:
    """Returns the parameter under a parametrization."""
    parameter: Tensor = linear.get_parameter(f"parametrizations.{name}.original")
    return parameter


def plainly(linear: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = linear(x)
    return out


def recomputed(linear: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(linear, x, use_reentrant=False)
    return out


def normed(linear: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = NormLinear(nn.RMSNorm(32), linear)(x)
    return out


@pytest.mark.parametrize("call", [plainly, recomputed, normed])
@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=repr)
def test_forward_and_gradient_use_one_draw(recipe: Recipe | None, call: Callable[..., Tensor]) -> None:
    """Exactly the weights that the forward pass has set to zero have a zero gradient."""
    linear, masks, bias_masks = layer()
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = call(linear, torch.randn(8, 32).requires_grad_())
    mask, bias_mask = masks[0], bias_masks[0]
    y.square().sum().backward()
    evaluations = 2 if call is recomputed else 1  # torch recomputes with the same random numbers
    assert len(masks) == len(bias_masks) == evaluations
    assert torch.equal(masks[-1], mask)
    gradient, bias_gradient = original(linear).grad, original(linear, "bias").grad
    assert gradient is not None
    assert bias_gradient is not None
    assert not gradient[mask == 0].any()
    assert (gradient[mask == 1] != 0).float().mean() > 0.98  # a few products are exactly zero
    assert torch.equal(bias_gradient != 0, bias_mask == 1)


def test_each_step_evaluates_a_parametrization_once_and_a_move_does_not() -> None:
    """States are created and moved without evaluating the parametrization."""
    linear, masks, _ = layer()
    for step in (1, 2):
        with autocast(recipe=SHORT):
            linear(torch.randn(4, 32)).sum().backward()
        assert len(masks) == step
    linear.to(torch.bfloat16).load_state_dict(linear.state_dict())
    assert len(masks) == 2


def test_spectral_norm_iterates_once_a_step() -> None:
    """The vectors of its power iteration are those of nn.Linear after the same number of steps."""
    converted, original_linear = (
        parametrizations.spectral_norm(m) for m in (convert(nn.Linear(32, 16)), nn.Linear(32, 16))
    )
    original_linear.load_state_dict(converted.state_dict())
    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        with autocast(recipe=SHORT):
            converted(x)
        original_linear(x)
    vectors, expected = (dict(m.named_buffers()) for m in (converted, original_linear))
    assert vectors.keys() == expected.keys() != set()
    assert all(torch.equal(value, expected[name]) for name, value in vectors.items())


def test_experts_are_called_one_by_one_and_evaluated_once() -> None:
    experts = [layer()[0] for _ in range(2)]
    drops: list[Any] = [expert.parametrizations["weight"][0] for expert in experts]
    for drop in drops:
        drop.masks.clear()
    with autocast(recipe=SHORT):
        grouped_linear(experts, torch.randn(8, 32), [(0, 4), (4, 8)]).sum().backward()
    assert [len(drop.masks) for drop in drops] == [1, 1]


def test_a_microbatch_does_not_reuse_the_weight_of_another_draw() -> None:
    """The weight of the second microbatch is another tensor, so it is quantized again."""
    linear, masks, _ = layer(bias=False)
    x = torch.eye(32)
    for is_first in (True, False):
        with torch.no_grad(), autocast(recipe=Float8CurrentScaling(), is_first_microbatch=is_first):
            y = linear(x)
        assert torch.equal(y.t() != 0, masks[-1] != 0)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_reads_its_matrices_once(dora: bool) -> None:
    adapted = LoraLinear(nn.Linear(32, 16).bfloat16(), 4, 1.0, dora=dora)
    register_parametrization(adapted, "lora_A", drop := DropConnect())
    drop.masks.clear()
    adapted(torch.randn(4, 32).bfloat16()).float().sum().backward()
    assert len(drop.masks) == 1


def test_a_copy_has_its_own_states() -> None:
    """An EMA copy that runs updates its own scales, and not those of its original."""
    linear, _, _ = layer()
    with autocast(recipe=SHORT):
        linear(torch.randn(4, 32)).sum().backward()
    before = {name: state.amax_history.clone() for name, state in linear.scaling.items()}
    twin = copy.deepcopy(linear)
    with autocast(recipe=SHORT):
        twin(100 * torch.randn(4, 32)).sum().backward()
    assert all(torch.equal(state.amax_history, before[name]) for name, state in linear.scaling.items())
    assert twin.scaling["input"].amax_history[-1] > 100


class Masked(nn.Module):
    """DropConnect without recorded masks, which torch.compile can trace."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (torch.rand_like(weight) < 0.5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_evaluates_a_parametrization_once() -> None:
    """Compiled and eager draw the same random numbers, so their gradients agree."""
    torch.manual_seed(0)
    linear = convert(nn.Linear(32, 16))
    register_parametrization(linear, "weight", Masked())
    twin, x = copy.deepcopy(linear), torch.randn(8, 32)
    results = []
    for module, called in ((linear, linear), (twin, torch.compile(twin, backend="aot_eager", fullgraph=True))):
        torch.manual_seed(1)
        with autocast(recipe=SHORT):
            called(x).square().sum().backward()
        results.append(original(module).grad)
    assert results[0] is not None
    assert torch.equal(results[0], results[1])  # type: ignore[arg-type]
