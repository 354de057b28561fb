"""FrozenLinear has the bits of the training forward pass, refuses bad scales, and counts saturated inputs."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fp8serve import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8WeightOnly,
    Linear,
    autocast,
    scaling_state,
)
from fp8serve.errors import ScalesError
from fp8serve.fp8 import frozen as frozen_module
from fp8serve.fp8.frozen import FrozenLinear, _multiply_unquantized, multiply
from fp8serve.fp8.ops import dequantize, reference
from fp8serve.fp8.recipe import Recipe, from_name
from fp8serve.fp8.spec import QuantSpec

RECIPES: list[Recipe] = [
    DelayedScaling(amax_history_len=4, margin=1),
    DelayedScaling(amax_history_len=4, weight_granularity="row"),
    DelayedScaling(amax_history_len=4, power_2_scale=True),
    Float8CurrentScaling(),
    Float8CurrentScaling(power_2_scale=True),
    Float8CurrentScaling(granularity="row"),
    Float8BlockScaling(),
    Float8BlockScaling(power_2_scale=True),
]


def trained(recipe: Recipe) -> Linear:
    torch.manual_seed(0)
    layer = Linear(200, 150)
    for _ in range(3):
        with autocast(recipe=recipe):
            layer(torch.randn(8, 200))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_serving_equals_the_training_forward_bit_for_bit(recipe: Recipe, dtype: torch.dtype) -> None:
    layer, x = trained(recipe), (torch.randn(2, 5, 200) * 3).to(dtype)
    frozen = FrozenLinear.from_linear(layer, recipe)
    with torch.no_grad(), autocast(recipe=recipe):
        expected = layer(x)
    actual = frozen(x)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_weight_only_quantization_multiplies_a_bf16_input(granularity: Literal["tensor", "row"]) -> None:
    """The input is rounded to BF16 and not quantized."""
    layer, x = nn.Linear(64, 32), torch.randn(2, 5, 64)
    frozen = FrozenLinear.from_linear(layer, Float8WeightOnly(weight_granularity=granularity))
    exact = F.linear(x.bfloat16().double(), dequantize(frozen.weight_q, frozen.weight_scale_inv).double())
    actual = frozen(x) - layer.bias
    assert (actual - exact).norm() < 1e-6 * exact.norm()
    assert frozen(x.bfloat16()).dtype == torch.bfloat16
    assert "input=unquantized" in repr(frozen)
    frozen.make_rows_independent()
    assert torch.equal(frozen(x) - layer.bias, actual)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_the_weight_only_path_of_a_gpu_gives_the_same_values(kind: str) -> None:
    """A GPU needs operands of one dtype: the weight is converted to BF16, and scaled before or after the product."""
    weight = torch.randn(300, 200)
    if kind == "block":
        q, scale = reference.quantize_block(weight, torch.float8_e4m3fn, 128, False)
    else:
        cast = reference.quantize_rowwise if kind == "row" else reference.quantize_current
        q, scale = cast(weight, torch.float8_e4m3fn, False)
    x, bias = torch.randn(5, 200).bfloat16(), torch.randn(300)
    actual = _multiply_unquantized(x, q, scale, bias, torch.float32)
    expected = multiply(x, torch.ones(()), q, scale, bias, torch.float32)
    assert (actual - expected).norm() < (2**-8 if kind == "block" else 1e-6) * expected.norm()


@pytest.mark.parametrize(("recipe", "has_scale"), [("nvfp4-w4a16", False), ("mxfp4-w4a16", False), ("nvfp4", True)])
def test_only_a_quantized_input_scales_the_product_of_a_4bit_weight(
    recipe: str, has_scale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales, product = [], frozen_module._mm_4bit
    monkeypatch.setattr(frozen_module, "_mm_4bit", lambda *args: scales.append(args[-1]) or product(*args))
    layer = FrozenLinear.from_linear(nn.Linear(64, 32), from_name(recipe))  # type: ignore[arg-type]
    layer(torch.randn(3, 64).bfloat16())
    assert [scale is not None for scale in scales] == [has_scale]


def test_quantized_tensors_make_the_same_layer() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    frozen, x = FrozenLinear.from_linear(trained(recipe), recipe), torch.randn(3, 200)
    parts = frozen.weight_q, frozen.weight_scale_inv, frozen.bias, frozen.input_scale
    assert torch.equal(FrozenLinear(*parts)(x), frozen(x))
    half = FrozenLinear(*parts, out_dtype=torch.bfloat16)
    assert half(x).dtype == torch.bfloat16


def test_state_dict_round_trip() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    frozen = FrozenLinear.from_linear(trained(recipe), recipe)
    assert set(frozen.state_dict()) == {"weight_q", "weight_scale_inv", "bias", "input_scale"}


def test_scale_arguments_override_the_layers_own_scales() -> None:
    layer = nn.Linear(4, 4)
    input_scale = torch.tensor(2.0)
    frozen = FrozenLinear.from_linear(
        layer, DelayedScaling(), input_scale=input_scale, weight_scale=torch.tensor([8.0])
    )
    assert frozen.input_scale == 2.0
    assert frozen.weight_scale_inv == 0.125


def test_missing_and_bad_scales_are_refused() -> None:
    layer, one = nn.Linear(4, 4), torch.tensor(1.0)
    with pytest.raises(ScalesError, match="stored input scale and this layer has none; calibrate"):
        FrozenLinear.from_linear(layer, DelayedScaling())
    with pytest.raises(ScalesError, match="stored weight scale and this layer has none"):
        FrozenLinear.from_linear(layer, DelayedScaling(), input_scale=one)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ScalesError, match="must be one positive finite number, found"):
            FrozenLinear.from_linear(layer, DelayedScaling(), input_scale=torch.tensor(bad), weight_scale=one)
    with pytest.raises(ScalesError, match="Float8CurrentScaling computes its scales from the data"):
        FrozenLinear.from_linear(layer, Float8CurrentScaling(), input_scale=one)


def test_wrong_tensors_are_refused() -> None:
    weight = torch.zeros(3, 200).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"must be \[\], \[3, 1\] or \[1, 2\], found \[3, 2\]"):
        FrozenLinear(weight, torch.ones(3, 2), None, None)
    with pytest.raises(ValueError, match=r"must be float8_e4m3fn \[N, K\], found torch.float32"):
        FrozenLinear(weight.float(), torch.tensor(1.0), None, None)
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match="quantizes its input to e4m3"):
        FrozenLinear(weight, one, None, None, QuantSpec("e5m2"))
    for spec, scale in ((QuantSpec(), one), (QuantSpec(source="stored"), None)):
        with pytest.raises(ValueError, match='Give an input_scale if the source of input_spec is "stored"'):
            FrozenLinear(weight, one, None, scale, spec)


def test_amax_and_saturation_are_counted() -> None:
    weight = torch.eye(4).to(torch.float8_e4m3fn)
    frozen = FrozenLinear(weight, torch.tensor(1.0), None, torch.tensor(100.0))
    frozen(torch.tensor([[1.0, -2.0, 4.0, 0.0]]))
    assert (frozen.amax.item(), frozen.saturated.item()) == (4.0, 0)
    frozen(torch.tensor([[5.0, -9.0, 1.0, 0.0], [6.0, 0.0, 0.0, 0.0]]))
    assert (frozen.amax.item(), frozen.saturated.item()) == (9.0, 3)
    # All four round to the largest code, but only -4.49 is above the range and counts as saturated.
    frozen(torch.tensor([[4.40, 4.48, -4.49, 4.32]]))
    assert frozen.saturated.item() == 4
    frozen.reset_counters()
    assert (frozen.amax.item(), frozen.saturated.item()) == (0.0, 0)


def test_only_the_input_has_a_gradient_and_repr_shows_its_scaling() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    layer = trained(recipe)
    frozen = FrozenLinear.from_linear(layer, recipe)
    x, dy = torch.randn(2, 200, requires_grad=True), torch.randn(2, 150)
    assert not frozen(x.detach()).requires_grad
    frozen(x).backward(dy)
    assert not list(frozen.parameters())
    torch.testing.assert_close(x.grad, dy @ dequantize(frozen.weight_q, frozen.weight_scale_inv), atol=0.02, rtol=0.02)
    assert "in_features=200, out_features=150, input=static tensor" in repr(frozen)
    assert scaling_state(layer)["input"].scale == frozen.input_scale
