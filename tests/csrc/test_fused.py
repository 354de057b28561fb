"""Fused ops have the bits of their separate parts, except for the last bit of a sum or an exponential."""

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import LEVELS, cases, reference
from fp8serve.fp8.ops.fused_casts import cast_rows
from tests.csrc.helpers import FORMATS, HIGH, all_bf16, assert_bits_equal, assert_fp8_equal, hostile, tame

OPS = torch.ops.fp8serve
E4M3, E5M2 = FORMATS


def assert_fp8_close(actual: Tensor, expected: Tensor) -> None:
    """Checks that codes differ by at most one, that fewer than 2 % differ, and that the same elements are NaN."""
    assert actual.dtype == expected.dtype
    a, b = actual.float(), expected.float()
    assert torch.equal(a.isnan(), b.isnan())
    codes = [
        (t.view(torch.uint8).int() & 0x7F) * (1 - 2 * (t.view(torch.uint8).int() >> 7)) for t in (actual, expected)
    ]
    difference = (codes[0] - codes[1]).abs()[~a.isnan()]
    assert not difference.numel() or (difference.max() <= 1 and (difference > 0).float().mean() < 0.02)


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (40, 513), (5, 7), (0, 16)])
def test_rms_norm_quantize(level, shape, dtype, high):
    x, weight = tame(*shape, high), tame(1, shape[1], high, 1)[0]
    q, amax = OPS.rms_norm_quantize(x, weight, 1e-5, torch.tensor(3.0), dtype)
    expected, expected_amax = reference.rms_norm_quantize(x, weight, 1e-5, torch.tensor(3.0), dtype)
    assert_fp8_close(q, expected)
    torch.testing.assert_close(amax, expected_amax, rtol=2 * torch.finfo(high).eps, atol=0)


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (40, 513), (0, 16)])
def test_silu_mul_quantize(level, shape, high):
    projection = torch.cat([tame(*shape, high), tame(*shape, high, 1)], 1)
    gate, up = projection.chunk(2, 1)  # views of a fused projection
    q, amax = OPS.silu_mul_quantize(gate, up, torch.tensor(0.7), E4M3)
    expected, expected_amax = reference.silu_mul_quantize(gate, up, torch.tensor(0.7), E4M3)
    assert_fp8_close(q, expected)
    torch.testing.assert_close(amax, expected_amax, rtol=4 * torch.finfo(high).eps, atol=0)


@pytest.mark.pairwise
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("shape", [(1, 7), (33, 64), (3, 300), (5, 1536)])
def test_a_fused_op_has_the_bits_of_the_plain_op_and_a_cast(level, shape, high):
    """The fused and the plain kernel must use the same order of additions and the same exponential."""
    x, y, weight = tame(*shape, high), tame(*shape, high, 1), tame(1, shape[1], high, 2)[0]
    scale = torch.tensor(37.0)
    for dtype in FORMATS:
        pairs = [
            (OPS.rms_norm_quantize(x, weight, 1e-6, scale, dtype), OPS.rms_norm(x, weight, 1e-6)),
            (OPS.silu_mul_quantize(x, y, scale, dtype), OPS.silu_mul(x, y)),
        ]
        for (q, amax), plain in pairs:
            expected, expected_amax = reference.quantize(plain, scale, dtype)
            assert_fp8_equal(q, expected)
            assert_bits_equal(amax, expected_amax)


@pytest.mark.parametrize("name", ["rms_norm_quantize_rows", "silu_mul_quantize_rows"])
def test_rowwise_fused_ops_have_the_bits_of_the_plain_op_and_a_cast(level, name):
    plain = OPS.rms_norm if name.startswith("rms") else OPS.silu_mul
    for case in cases(name):
        *arguments, width, power_2 = case.make()
        q, scale_inv = getattr(OPS, name)(*arguments, width, power_2)
        expected, expected_scale_inv = cast_rows(OPS, plain(*arguments), width, power_2)
        assert_fp8_equal(q, expected)
        assert_bits_equal(scale_inv, expected_scale_inv)


def test_silu_of_extremes(level):
    gate = torch.tensor([[-torch.inf, torch.inf, torch.nan, 0.0, -0.0, -89.0, -88.0, -100.0, 88.0, 1e30, -1e30]])
    up = torch.ones_like(gate)
    q, _ = OPS.silu_mul_quantize(gate, up, torch.tensor(1.0), E5M2)
    assert_fp8_equal(q, reference.silu_mul_quantize(gate, up, torch.tensor(1.0), E5M2)[0])


def assert_same_at_every_level(op, *arguments) -> None:
    """Checks that an op has the same bits on every instruction set. Only for BF16 results, whose NaN has one bit
    pattern."""
    OPS.cpu_isa(LEVELS[0])
    expected = op(*arguments)
    for cap in LEVELS[1:]:
        OPS.cpu_isa(cap)
        assert_fp8_equal(op(*arguments), expected)
    OPS.cpu_isa("best")


def test_silu_of_every_bf16_is_the_same_at_every_level(library):
    """Instruction sets may compute the exponential differently, but the rounded results are equal."""
    gate = all_bf16().reshape(64, 1024)
    ordinary = gate.nan_to_num(1.0).clamp(-80.0, 80.0)  # values that take the fast path
    for x in (gate, ordinary):
        assert_same_at_every_level(OPS.silu_mul, x, torch.ones_like(x))


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 100, 2048])
def test_bf16_is_the_same_at_every_level(library, width):
    for make in (hostile, tame):
        x, y = make(5, 2 * width, torch.bfloat16), make(5, width, torch.bfloat16, 1)
        assert_same_at_every_level(OPS.silu_mul, x[:, :width], x[:, width:])
        assert_same_at_every_level(OPS.silu_mul, y, x[:, 1 : width + 1])
        assert_same_at_every_level(OPS.rms_norm, x[:, width:], y[0], 1e-5)
        heads = torch.stack([x, x.flip(1)], 1)  # dim 2 * width
        assert_same_at_every_level(
            OPS.rotary, heads, make(5, 2 * width, torch.bfloat16, 2)[:, None], x.flip(0)[:, None]
        )


def rotary_arguments(tokens, heads, kv_heads, dim, high, cache_dtype):
    generator = torch.Generator().manual_seed(0)
    width = (heads + 2 * kv_heads) * dim
    fused_row = torch.randn(tokens, width, generator=generator).to(high)  # q, k and v of one fused projection
    q, k, v = fused_row.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    angle = torch.randn(tokens, 1, dim // 2, generator=generator).repeat(1, 1, 2)
    caches = [torch.zeros(4, 8, kv_heads, dim).to(cache_dtype) for _ in range(2)]
    slots = torch.randperm(32, generator=generator)[:tokens]
    if tokens > 2:
        slots[1] = -1
    heads_of = [x.unflatten(1, (-1, dim)) for x in (q, k, v)]
    return (*heads_of, angle.cos().to(high), angle.sin().to(high), *caches, slots)


@pytest.mark.pairwise
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32, E4M3])
@pytest.mark.parametrize("shape", [(1, 4, 2, 64), (9, 3, 1, 6), (30, 2, 2, 128)])
def test_rotary_write_kv(level, shape, cache_dtype, high):
    actual, expected = rotary_arguments(*shape, high, cache_dtype), rotary_arguments(*shape, high, cache_dtype)
    scale = torch.tensor(2.5) if cache_dtype == E4M3 else None
    q = OPS.rotary_write_kv(*actual, scale, scale)
    assert_bits_equal(q, reference.rotary_write_kv(*expected, scale, scale))
    for ours, theirs in zip(actual[5:7], expected[5:7], strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_delayed"), ids=lambda case: case.name)
def test_quantize_delayed(level, case):
    """Compares the data, the scale and the history."""
    arguments, expected = case.make(), case.make()
    results = OPS.quantize_delayed(*arguments), reference.quantize_delayed(*expected)
    for actual, reference_result in zip(*results, strict=True):
        torch.testing.assert_close(actual.float(), reference_result.float(), rtol=0, atol=0, equal_nan=True)
    if expected[2] is not None:
        assert torch.equal(arguments[2], expected[2])


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (128, 128), (131, 300), (7, 200), (200, 7), (0, 5), (5, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_transpose_half(level, dtype, shape):
    x = hostile(*shape, dtype)
    for matrix in (x, hostile(shape[0], 2 * shape[1], dtype)[:, ::2], hostile(*reversed(shape), dtype).t()):
        actual = OPS.transpose_half(matrix)
        assert actual.is_contiguous()
        assert_bits_equal(actual, matrix.t().contiguous())


@pytest.mark.pairwise
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (65, 130), (7, 200), (200, 7), (0, 5), (5, 0)])
def test_quantize_transpose(level, shape, dtype, high):
    x = hostile(*shape, high)
    actual = OPS.quantize_transpose(x, torch.tensor(1.7), dtype)
    expected = reference.quantize_transpose(x, torch.tensor(1.7), dtype)
    assert_fp8_equal(actual[0], expected[0])
    assert_fp8_equal(actual[1], expected[1])
    assert_bits_equal(actual[2], expected[2])


@pytest.mark.parametrize("high", HIGH)
def test_scaled_mm_add_rounds_twice(level, high):
    a, a_scale = reference.quantize_rowwise(tame(7, 200), E4M3, False)
    b, b_scale = reference.quantize_rowwise(tame(37, 200, seed=1), E4M3, False)
    residual, bias = tame(7, 37, high, 2), tame(1, 37, high, 3)[0]
    actual = OPS.scaled_mm_add(a, b, a_scale, b_scale, bias, residual)
    assert_bits_equal(actual, residual + OPS.scaled_mm(a, b, a_scale, b_scale, bias, high))
    with pytest.raises(RuntimeError, match="residual: dim 0 is 6, must be M = 7"):
        OPS.scaled_mm_add(a, b, a_scale, b_scale, bias, residual[1:])


@pytest.mark.parametrize("shape", [(1, 16, 64), (2, 33, 100), (3, 5, 7), (37, 70, 1100), (1, 40, 2049)])
def test_mm_of_bf16(level, shape):
    m, n, k = shape
    a, b, bias = tame(m, k, torch.bfloat16, 1), tame(n, k, torch.bfloat16, 2), tame(1, n, seed=3)[0]
    actual = OPS.mm(a, b, bias, torch.float32)
    truth = a.double() @ b.double().t() + bias
    naive = a.float() @ b.float().t() + bias
    assert (actual - truth).abs().max() <= 2 * (naive - truth).abs().max() + 1e-6 * truth.abs().max()


def test_mm_is_the_same_at_every_level_and_in_every_batch(library):
    a, b = tame(40, 1500, torch.bfloat16, 1), tame(50, 1500, torch.bfloat16, 2)
    results = []
    for cap in LEVELS:
        OPS.cpu_isa(cap)
        results.append(OPS.mm(a, b, None, torch.float32))
        for first, last in [(0, 1), (3, 5), (2, 5), (7, 11), (1, 18)]:
            assert_bits_equal(OPS.mm(a[first:last], b, None, torch.float32), results[-1][first:last])
    OPS.cpu_isa("best")
    for result in results[1:]:
        assert_bits_equal(result, results[0])
