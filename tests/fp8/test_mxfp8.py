"""MXFP8: the cast against independent models of three projects' rules, the product at the ends of the range, layers."""

import math
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from torch import Tensor, nn

from fp8serve import Linear, MXFP8BlockScaling, autocast, convert, dequantize, quantize, scaled_mm
from fp8serve.errors import RecipeError
from fp8serve.fp8 import ops
from fp8serve.fp8.frozen import FrozenLinear, input_gradient
from fp8serve.fp8.grouped_linear import grouped_linear
from fp8serve.fp8.ops import LEVELS, reference
from fp8serve.fp8.recipe import Format, from_json, from_name, name_of, to_json
from fp8serve.fp8.spec import UNQUANTIZED

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
MAXIMUM = {E4M3: 448, E5M2: 57344}


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction-set level of the kernels; skipped where the processor does not have it."""
    if ops.cpu_isa() is None:
        pytest.skip("the kernels are not compiled")
    if torch.ops.fp8serve.cpu_isa(request.param) != request.param:
        torch.ops.fp8serve.cpu_isa("best")
        pytest.skip("the processor does not have this level")
    yield request.param
    torch.ops.fp8serve.cpu_isa("best")


def mantissa_and_exponent(value: float) -> tuple[int, int]:
    """Returns the exponent and mantissa bits of an FP32 number."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits >> 23) & 255, bits & 0x7FFFFF


def transformer_engine_code(amax: float, maximum: int) -> int:
    """float_to_e8m0(amax / maximum): the exponent of the FP32 quotient, plus one if its mantissa is not 0."""
    quotient = float(torch.tensor(amax) / torch.tensor(float(maximum)))
    exponent, mantissa = mantissa_and_exponent(quotient)
    rounds_up = mantissa > 0 if exponent > 0 else mantissa > 0x400000  # 0x400000 is 2^-127, which has the code 0
    return exponent + rounds_up


def smallest_power_code(amax: float, maximum: int) -> int:
    """Returns the meaning of the rule in exact numbers: the smallest 2^(code - 127) >= amax / maximum."""
    ratio = Fraction(amax) / maximum
    return next(code for code in range(255) if Fraction(2) ** (code - 127) >= ratio)


def compressed_tensors_code(amax: float) -> int:
    """round_to_power_2 adds a quarter to the mantissa and drops it; 8 is the exponent of 448."""
    exponent, mantissa = mantissa_and_exponent(amax)
    return exponent + (mantissa + 0x200000 > 0x7FFFFF) - 8


def modelopt_code(amax: float) -> int:
    """ceil(log2(amax / 448)) in FP32, clamped to [-127, 127]."""
    exponent = torch.tensor(amax).div(448.0).log2().ceil()
    return int(exponent.clamp(-127, 127)) + 127


def codes_of(amaxes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the codes that the op gives blocks with these amaxes, each beside 31 smaller elements."""
    x = torch.zeros(len(amaxes), 32)
    x[:, 7], x[:, 20] = -amaxes, amaxes / 2
    return torch.ops.fp8serve.quantize_mx(x, dtype)[1].view(torch.uint8)[:, 0]


def bf16_amaxes() -> Tensor:
    """Returns every finite BF16 magnitude."""
    return torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()


def borders(maximum: int) -> list[float]:
    """FP32 amaxes beside every power of two times the maximum, with mantissa 1.75, and beside every power of two."""
    values = []
    for exponent in range(-126, 128):
        for mantissa in (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF):
            (value,) = struct.unpack("<f", struct.pack("<I", (exponent + 127) << 23 | mantissa))
            values.append(value)
    return [*values, 2.0**-149, 2.0**-127, 2.0**-126 - 2.0**-149, 0.0]


@pytest.mark.parametrize("dtype", MAXIMUM)
def test_the_scale_is_transformer_engines_for_every_bf16_amax(dtype: torch.dtype, level: str) -> None:
    amaxes = bf16_amaxes()
    sample = amaxes if level == "portable" else amaxes[::7]
    expected = [transformer_engine_code(float(amax), MAXIMUM[dtype]) for amax in sample]
    assert codes_of(sample, dtype).tolist() == expected


@pytest.mark.parametrize("dtype", MAXIMUM)
def test_the_scale_is_the_smallest_power_that_saturates_nothing(dtype: torch.dtype, level: str) -> None:
    """Rows M1 and M3. Also where the FP32 quotient is subnormal and would be rounded."""
    amaxes = borders(MAXIMUM[dtype])
    expected = [smallest_power_code(amax, MAXIMUM[dtype]) for amax in amaxes]
    assert codes_of(torch.tensor(amaxes), dtype).tolist() == expected


def test_compressed_tensors_differs_at_1_75_and_nowhere_else() -> None:
    amaxes = [float(a) for a in bf16_amaxes() if 2.0**-110 < float(a) < 2.0**120]
    ours = codes_of(torch.tensor(amaxes), E4M3).tolist()
    for amax, code in zip(amaxes, ours, strict=True):
        at_1_75 = mantissa_and_exponent(amax)[1] == 0x600000
        assert compressed_tensors_code(amax) == code + at_1_75
    theirs = generate_mx_scales(torch.tensor(amaxes), num_bits=8)
    assert [compressed_tensors_code(amax) for amax in amaxes] == theirs.int().flatten().tolist()


def test_modelopt_differs_only_where_its_logarithm_is_rounded() -> None:
    amaxes = bf16_amaxes()
    assert [modelopt_code(float(a)) for a in amaxes] == codes_of(amaxes, E4M3).tolist()
    above = 2.0**60 * (1.75 + 2**-22)
    assert smallest_power_code(above, 448) == modelopt_code(above) + 1 == int(codes_of(torch.tensor([above]), E4M3))


@pytest.mark.parametrize(("dtype", "x_dtype"), [*product(MAXIMUM, (torch.float32, torch.bfloat16, torch.float16))])
def test_elements_are_rounded_like_a_scaled_cast(dtype: torch.dtype, x_dtype: torch.dtype, level: str) -> None:
    """Each block alone is `quantize` by the reciprocal of its scale, whose bits have tests of their own."""
    noise = torch.Generator().manual_seed(1)
    x = (torch.randn(3, 224, generator=noise) * torch.randn(3, 224, generator=noise).mul(4).exp()).to(x_dtype)
    q, scale_inv = torch.ops.fp8serve.quantize_mx(x, dtype)
    for row, block in product(range(3), range(7)):
        part = x[row : row + 1, 32 * block : 32 * block + 32]
        expected = reference.quantize(part, 1 / scale_inv[row, block].float(), dtype)[0]
        assert torch.equal(q[row : row + 1, 32 * block : 32 * block + 32].float(), expected.float())
    assert q.float().abs().max() <= MAXIMUM[dtype]


def test_zeros_infinities_and_nan() -> None:
    """Rows M2 to M4: the scales of such blocks."""
    x = torch.ones(5, 64)
    x[0, :32], x[1, 3], x[2, 3], x[3, :32], x[4, :32] = 0.0, torch.inf, torch.nan, torch.nan, 2.0**-149
    q, scale_inv = quantize(x, granularity="block1x32")
    codes = scale_inv.view(torch.uint8)
    assert codes[:, 0].tolist() == [0, 127, 127 - 8, 0, 0]
    assert (codes[:, 1] == 127 - 8).all()  # other blocks are not affected
    assert q[1, 3].float() == 448
    assert q[2, 3].isnan()
    assert q[2].isnan().sum() == 1
    assert (q[4, :32].float() == 0).all()  # 2^-149 / 2^-127 is below half of the smallest code
    gradient = torch.ops.fp8serve.quantize_mx(x, E5M2, True)[1].view(torch.uint8)
    assert gradient[1].tolist() == [255, 127 - 15]


def test_a_cast_of_cast_data_gives_the_same_values() -> None:
    """Therefore a run that starts from an MXFP8 directory computes with the values of the directory."""
    noise = torch.Generator().manual_seed(2)
    x = torch.randn(64, 256, generator=noise) * torch.randn(64, 256, generator=noise).exp()
    values = dequantize(*quantize(x, granularity="block1x32"))
    assert torch.equal(dequantize(*quantize(values, granularity="block1x32")), values)


def operands(rows: int, k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(rows, k, generator=noise), "e5m2" if dtype is E5M2 else "e4m3", "block1x32")


@pytest.mark.parametrize(("a", "b"), [*product(MAXIMUM, MAXIMUM)])
def test_the_product_is_that_of_the_dequantized_operands(a: torch.dtype, b: torch.dtype, level: str) -> None:
    for m, n, k in ((1, 48, 64), (5, 33, 1100), (70, 48, 1120)):
        (x, x_scale), (w, w_scale) = operands(m, k, a, 1), operands(n, k, b, 2)
        actual = scaled_mm(x, w, x_scale, w_scale, out_dtype=torch.float32)
        exact = dequantize(x, x_scale).double() @ dequantize(w, w_scale).double().t()
        assert (actual - exact).norm() <= 1e-6 * exact.norm()


def shifted(scale_inv: Tensor, by: int) -> Tensor:
    return (scale_inv.view(torch.uint8).int() + by).to(torch.uint8).view(E8M0)


@pytest.mark.parametrize("by", [-60, -40, -17, 17, 40])
def test_a_power_of_two_scales_the_product_exactly(by: int, level: str) -> None:
    """Far below the range in which BF16 and FP32 sums are normal: no value is lost, whatever the processor flushes."""
    (x, x_scale), (w, w_scale) = operands(3, 96, E4M3, 1), operands(48, 96, E4M3, 2)
    expected = scaled_mm(x, w, x_scale, w_scale, out_dtype=torch.float32)
    for a, b in ((by, 0), (0, by), (by, -by)):
        actual = scaled_mm(x, w, shifted(x_scale, a), shifted(w_scale, b), out_dtype=torch.float32)
        assert torch.equal(actual, expected * 2.0 ** (a + b))


def test_a_block_far_below_its_row_is_zero(level: str) -> None:
    """Row M5. 2^54 times below for E4M3: the factor at which a code may leave the multiples of 2^-63."""
    x, scale = torch.ones(1, 64).to(E4M3), torch.tensor([[127, 127]], dtype=torch.uint8).view(E8M0)
    w = torch.cat([torch.zeros(16, 32), torch.ones(16, 32)], 1).to(E4M3)  # reads the second block only
    for below, factor in ((0, 1.0), (54, 2.0**-54), (55, 0.0), (127, 0.0)):
        x_scale = torch.tensor([[127, 127 - below]], dtype=torch.uint8).view(E8M0)
        actual = scaled_mm(x, w, x_scale, scale.expand(16, 2).contiguous(), out_dtype=torch.float32)
        assert (actual == 32 * factor).all()


def test_nan_and_infinite_codes_reach_their_row_only(level: str) -> None:
    """Row M7."""
    (x, x_scale), (w, w_scale) = operands(4, 64, E5M2, 1), operands(32, 64, E4M3, 2)
    x[1, 40] = torch.nan
    x[2, 3] = torch.inf
    codes = x_scale.view(torch.uint8)
    codes[3, 1] = 255
    actual = scaled_mm(x, w, x_scale, w_scale, out_dtype=torch.float32)
    assert actual[0].isfinite().all()
    assert actual[1].isnan().all()
    assert not actual[2].isfinite().any()
    assert actual[3].isnan().all()


def test_packed_weights_give_the_same_bits(level: str) -> None:
    for k, m in product((32, 96, 1056, 2080), (1, 2, 4, 5, 8, 9, 70)):
        (x, x_scale), (w, w_scale) = operands(m, k, E4M3, 1), operands(48, k, E4M3, 2)
        codes = w_scale.view(torch.uint8)
        codes[:, 0] = torch.arange(48, dtype=torch.uint8) * 2  # small and zero blocks
        w.view(torch.uint8)[5, 3] = 0x7F  # NaN
        w.view(torch.uint8)[6, 3] = 0x80  # -0
        packed = torch.empty(3, k // 8, 128, dtype=E4M3)
        torch.ops.fp8serve.pack_weight(w, packed)
        residual = torch.randn(m, 48).bfloat16()
        for a, a_scale in ((x, x_scale), (x.to(torch.bfloat16), torch.tensor(0.5))):
            arguments = (a_scale, w_scale, None, residual, torch.bfloat16)
            actual, expected = (torch.ops.fp8serve.mx_mm(a, b, *arguments) for b in (packed, w))
            assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


def test_a_row_does_not_depend_on_the_others(level: str) -> None:
    (x, x_scale), (w, w_scale) = operands(40, 96, E4M3, 1), operands(32, 96, E4M3, 2)
    whole = scaled_mm(x, w, x_scale, w_scale)
    for row in (0, 17, 39):
        part = slice(row, row + 1)
        assert torch.equal(scaled_mm(x[part], w, x_scale[part], w_scale), whole[part])


# --- recipe and layers

RECIPES = (MXFP8BlockScaling(), MXFP8BlockScaling(fp8_format=Format.HYBRID))


def test_the_recipe_has_transformer_engines_parameters() -> None:
    recipe = MXFP8BlockScaling()
    assert (recipe.margin, recipe.fp8_format) == (0, Format.E4M3)
    assert from_name("mxfp8") == recipe
    assert name_of(recipe) == "mxfp8"
    for one in RECIPES:
        assert from_json(to_json(one)) == one
    assert MXFP8BlockScaling(backward_override="high_precision").override_linear_precision == (False, True, True)
    recipe = from_name("mxfp8", backward_override="high_precision")
    assert recipe == MXFP8BlockScaling(override_linear_precision=(False, True, True))
    with pytest.raises(RecipeError, match=r"margin must be 0 in MXFP8BlockScaling, found 1\."):
        MXFP8BlockScaling(margin=1)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    q, scale_inv = reference.quantize_mx(x, dtype)
    return q.double() * scale_inv.double().repeat_interleave(32, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("override", list(product((False, True), repeat=3)))
@pytest.mark.parametrize("recipe", RECIPES, ids=["e4m3", "hybrid"])
def test_every_gemm_reads_operands_cast_from_high_precision(
    recipe: MXFP8BlockScaling, override: tuple[bool, bool, bool]
) -> None:
    """Row M6. 37 tokens and 50 outputs: the contracted dimensions of the backward pass end with a partial block."""
    noise = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(*s, generator=noise) for s in ((37, 96), (50, 96), (37, 50)))
    dy *= torch.randn(37, 1, generator=noise).mul(20).exp() * 1e-30
    layer = Linear(96, 50, bias=False)
    layer.weight.data.copy_(w)
    x.requires_grad_()
    with autocast(recipe=MXFP8BlockScaling(fp8_format=recipe.fp8_format, override_linear_precision=override)):
        y = layer(x)
    y.backward(dy)
    backward = E5M2 if recipe.fp8_format is Format.HYBRID else E4M3

    def operand(t: Tensor, dtype: torch.dtype, in_high_precision: bool) -> Tensor:
        return t.double() if in_high_precision else rounded(t, dtype)

    fprop, dgrad, wgrad = override
    values = x.detach()
    exact = (
        operand(values, E4M3, fprop) @ operand(w, E4M3, fprop).t(),
        operand(dy, backward, dgrad) @ operand(w.t(), E4M3, dgrad).t(),
        operand(dy.t(), backward, wgrad) @ operand(values.t(), E4M3, wgrad).t(),
    )
    assert x.grad is not None
    assert layer.weight.grad is not None
    for actual, expected in zip((y, x.grad, layer.weight.grad), exact, strict=True):
        assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_serving_equals_the_training_forward_bit_for_bit(dtype: torch.dtype) -> None:
    layer, x = Linear(160, 48), (torch.randn(2, 5, 160) * 3).to(dtype)
    frozen = FrozenLinear.from_linear(layer, RECIPES[0])
    with torch.no_grad(), autocast(recipe=RECIPES[0]):
        expected = layer(x)
    assert torch.equal(frozen(x), expected)
    frozen.pack(torch.empty(160 * 48, dtype=E4M3))
    assert torch.equal(frozen(x), expected)


def test_a_weight_only_layer_and_the_gradient_of_a_frozen_layer_are_close_to_exact() -> None:
    """The gradient is that of an adapter's base layer: dY in BF16, and W as it is stored."""
    frozen = FrozenLinear.from_linear(nn.Linear(64, 32, bias=False), RECIPES[0])
    weight = dequantize(frozen.weight_q, frozen.weight_scale_inv)
    alone = FrozenLinear(frozen.weight_q, frozen.weight_scale_inv, input_spec=UNQUANTIZED)
    x, dy = torch.randn(5, 64).bfloat16(), torch.randn(5, 32).bfloat16()
    exact = x.double() @ weight.double().t()
    assert (alone(x).double() - exact).norm() < 2**-8 * exact.norm()
    exact = dy.double() @ weight.double()
    assert (input_gradient(frozen, dy).double() - exact).norm() < 2**-8 * exact.norm()


@pytest.mark.parametrize("recipe", RECIPES, ids=["e4m3", "hybrid"])
def test_grouped_experts_equal_their_layers(recipe: MXFP8BlockScaling) -> None:
    torch.manual_seed(0)
    layers = convert(nn.ModuleList(nn.Linear(96, 40, bias=True) for _ in range(4)))
    x = torch.randn(45, 96).bfloat16().requires_grad_()
    spans = list(pairwise((0, 5, 5, 44, 45)))
    results = []
    for one_by_one in (True, False):
        with autocast(recipe=recipe):
            if one_by_one:
                y = torch.cat([layer(x[a:b]) for layer, (a, b) in zip(layers, spans, strict=True) if a < b])
            else:
                y = grouped_linear(list(layers), x, spans)  # type: ignore[arg-type]
        (y * y).sum().backward()
        results.append([y, x.grad, *(p.grad for p in layers.parameters())])
        x.grad = None
        layers.zero_grad()
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


def test_a_layer_without_whole_blocks_is_refused() -> None:
    message = r"in MXFP8 needs a multiple of 32 input features, found 48; leave it in high precision"
    with pytest.raises(RecipeError, match=message), autocast(recipe=RECIPES[0]):
        Linear(48, 32)(torch.randn(2, 48))
    with pytest.raises(RecipeError, match=message):
        FrozenLinear.from_linear(nn.Linear(48, 32), RECIPES[0])
    with pytest.raises(ValueError, match=r"must be \[32, 2\], found \[32, 1\]"):
        FrozenLinear(torch.zeros(32, 64).to(E4M3), torch.zeros(32, 1, dtype=torch.uint8).view(E8M0))


@pytest.mark.parametrize(
    "context",
    [
        lambda: autocast(enabled=False, recipe=RECIPES[0]),
        lambda: autocast(recipe=MXFP8BlockScaling(override_linear_precision=(True, True, True))),
    ],
    ids=["disabled", "high precision"],
)
def test_a_layer_that_quantizes_no_weight_needs_no_whole_blocks(context: Callable[[], Any]) -> None:
    layer, x = Linear(48, 32), torch.randn(2, 48)
    with context():
        y = layer(x)
    torch.testing.assert_close(y, x @ layer.weight.t() + layer.bias)


def test_a_matrix_without_columns_is_quantized() -> None:
    for granularity, shape in (("row", (3, 2, 1)), ("block1x128", (3, 2, 0)), ("block1x32", (3, 2, 0))):
        q, scale = quantize(torch.zeros(3, 2, 0), granularity=granularity)  # type: ignore[arg-type]
        assert q.shape == (3, 2, 0)
        assert scale.shape == shape
        assert dequantize(q, scale).shape == (3, 2, 0)


def test_scales_of_another_shape_are_refused() -> None:
    (x, x_scale), (w, w_scale) = operands(3, 64, E4M3, 1), operands(32, 64, E4M3, 2)
    for scale in (w_scale[:, :1], w_scale[:31], w_scale.float()):
        with pytest.raises(ValueError, match="b_scale_inv of a"):
            scaled_mm(x, w, x_scale, scale)


def test_the_cast_loses_less_than_one_scale_for_the_tensor() -> None:
    noise = torch.Generator().manual_seed(4)
    x = torch.randn(64, 256, generator=noise) * torch.randn(64, 8, generator=noise).mul(3).exp().repeat_interleave(
        32, 1
    )
    errors = [(dequantize(*quantize(x, granularity=g)) - x).div(x).abs().median() for g in ("block1x32", "tensor")]
    assert errors[0] < errors[1] / 1.5
    assert math.isfinite(float(errors[0]))
