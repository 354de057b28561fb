"""scaled_mm: exact for small integers, accurate otherwise, with the same bits in every batch and on every level."""

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import LEVELS, arithmetic, packing, reference
from tests.csrc.conftest import SLOW_DOT
from tests.csrc.helpers import FORMATS, HIGH, assert_bits_equal, tame

OPS = torch.ops.fp8serve
E4M3, E5M2 = FORMATS
SHAPES = [(1, 1, 1), (1, 16, 64), (2, 17, 63), (3, 5, 200), (4, 33, 1024), (5, 40, 1025), (7, 20, 2100), (37, 70, 384)]
SHAPES += [(8, 150, 300)]
GRANULARITIES = ["tensor", "row", "block1x128", "block128x128"]
PAIRS = [("tensor", "row"), ("row", "row"), ("block1x128", "block128x128"), ("block128x128", "block1x128")]


def quantized(x: Tensor, granularity: str, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    if granularity == "tensor":
        return reference.quantize_current(x, dtype, False)
    if granularity == "row":
        return reference.quantize_rowwise(x, dtype, False)
    return reference.quantize_block(x, dtype, 1 if granularity == "block1x128" else 128, False)


def exact(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    a_hp = a.double() * arithmetic.expand(a_scale, *a.shape).double()
    return a_hp @ (b.double() * arithmetic.expand(b_scale, *b.shape).double()).t()


def assert_as_good_as_naive(actual: Tensor, naive: Tensor, truth: Tensor) -> None:
    """Checks that the error is at most twice that of the naive computation, plus a rounding of the output."""
    spacing = torch.finfo(actual.dtype).eps * truth.abs().max()
    assert (actual.double() - truth).abs().max() <= 2 * (naive.double() - truth).abs().max() + spacing


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("a_by", GRANULARITIES)
@pytest.mark.parametrize("b_by", GRANULARITIES)
def test_error_is_at_most_twice_the_naive_one(level, shape, a_by, b_by):
    m, n, k = shape
    a, a_scale = quantized(tame(m, k, seed=1), a_by)
    b, b_scale = quantized(tame(n, k, seed=2), b_by)
    actual = OPS.scaled_mm(a, b, a_scale, b_scale, None, torch.float32)
    naive = arithmetic.dequantize(a, a_scale) @ arithmetic.dequantize(b, b_scale).t()
    assert_as_good_as_naive(actual, naive, exact(a, b, a_scale, b_scale))


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("a_dtype", FORMATS)
@pytest.mark.parametrize("b_dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_multiply_exactly(level, shape, a_dtype, b_dtype):
    """Sums of small integers are exact in FP32 in every order."""
    m, n, k = shape
    make = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (m, k), generator=make).float()
    b = torch.randint(-4, 5, (n, k), generator=make).float()
    bias = torch.arange(n).float()
    one = torch.tensor(1.0)
    actual = OPS.scaled_mm(a.to(a_dtype), b.to(b_dtype), one, one, bias, torch.float32)
    assert torch.equal(actual, a @ b.t() + bias)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_code_is_decoded(level, dtype):
    """Multiplies all 256 FP8 values by 1, at several positions of a chunk of 64."""
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    one = torch.tensor(1.0)
    for place in (0, 1, 7, 8, 31, 32, 63):
        a = torch.zeros(256, 64, dtype=torch.uint8)
        a[:, place] = bits
        unit = torch.zeros(1, 64)
        unit[0, place] = 1.0
        actual = OPS.scaled_mm(a.view(dtype), unit.to(dtype), one, one, None, torch.float32).flatten()
        expected = bits.view(dtype).float()
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_code_of_a_weight_is_decoded(level, dtype, rows):
    """All 256 FP8 values as weights. One and two rows read the weights directly, five rows use an unpacked panel."""
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    one = torch.tensor(1.0)
    for place in (0, 1, 6, 9, 31, 64, 65, 67):
        b = torch.zeros(256, 68, dtype=torch.uint8)
        b[:, place] = bits
        unit = torch.zeros(rows, 68)
        unit[:, place] = 1.0
        actual = OPS.scaled_mm(unit.to(E4M3), b.view(dtype), one, one, None, torch.float32)
        assert_bits_equal(actual, bits.view(dtype).float().expand(rows, -1) + 0.0)


@pytest.mark.pairwise
@pytest.mark.parametrize("b_by", GRANULARITIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_inputs_with_fp8_weights(level, shape, b_by):
    """The input is not quantized; the result is a BF16 product that is multiplied by the weight's scale."""
    m, n, k = shape
    a, one = tame(m, k, seed=1).bfloat16(), torch.tensor(1.0)
    b, b_scale = quantized(tame(n, k, seed=2), b_by)
    actual = OPS.scaled_mm(a, b, one, b_scale, None, torch.float32)
    if b_by in ("tensor", "row"):
        assert_bits_equal(actual, OPS.mm(a, b.bfloat16(), None, torch.float32) * b_scale.t())
    assert_as_good_as_naive(actual, a.float() @ arithmetic.dequantize(b, b_scale).t(), exact(a, b, one, b_scale))


@pytest.mark.parametrize("b_by", GRANULARITIES)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40])
def test_inputs_in_bf16_give_the_same_bits_everywhere(library, b_by, rows):
    """Compares every level, packed and unpacked weights, and every batch."""
    a, one = tame(rows, 2304, seed=1).bfloat16(), torch.tensor(1.0)
    b, b_scale = quantized(tame(160, 2304, seed=2), b_by)
    packed = torch.empty_like(b).view(packing.packed_shape(*b.shape))
    OPS.pack_weight(b, packed)
    results = []
    for cap in (*LEVELS, *SLOW_DOT):
        OPS.cpu_isa(cap)
        results.append(OPS.scaled_mm(a, b, one, b_scale, None, torch.bfloat16))
        results.append(OPS.packed_mm(a, packed, one, b_scale, None, None, torch.bfloat16))
        results.append(torch.cat([OPS.scaled_mm(row, b, one, b_scale, None, torch.bfloat16) for row in a.split(1)]))
    OPS.cpu_isa("best")
    for result in results[1:]:
        assert_bits_equal(result, results[0])


@pytest.mark.parametrize(("a_by", "b_by"), PAIRS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9])
def test_every_level_gives_the_same_bits(library, a_by, b_by, rows):
    """Few rows (two at most levels, eight at the best) read the weights directly; nine rows use an unpacked panel."""
    a, a_scale = quantized(tame(rows, 2300, seed=1), a_by, E5M2)
    b, b_scale = quantized(tame(150, 2300, seed=2), b_by)
    results = []
    for cap in (*LEVELS, *SLOW_DOT):
        OPS.cpu_isa(cap)
        results.append(OPS.scaled_mm(a, b, a_scale, b_scale, None, torch.float32))
    OPS.cpu_isa("best")
    for result in results[1:]:
        assert_bits_equal(result, results[0])


@pytest.mark.skipif(not SLOW_DOT, reason="this machine has no avx512bf16")
@pytest.mark.parametrize("rows", [11, 12, 40])
def test_fmas_give_the_bits_of_the_dot_product(library, rows):
    """BF16 values and sums around the smallest normal number, which the dot product takes as zero below it."""
    make = torch.Generator().manual_seed(rows)
    a, b = (
        torch.randn(n, 2304, generator=make) * 2.0 ** torch.randint(-70, -55, (n, 2304), generator=make)
        for n in (rows, 160)
    )
    a[:, ::5], b[:, ::7] = 2.0**-130, 2.0**-129  # subnormal in BF16
    b[3, :], b[4, 9], b[5, 9] = 1.0, float("inf"), float("nan")
    a, b = a.bfloat16(), b.bfloat16()
    packed = torch.empty(packing.packed_shape(*b.shape), dtype=torch.bfloat16)
    OPS.pack_weight(b, packed)
    results = []
    for cap in ("avx512bf16", *SLOW_DOT, "avx512"):
        OPS.cpu_isa(cap)
        plain = OPS.mm(a, b, None, torch.float32)
        results.append((plain, OPS.packed_mm(a, packed, None, None, None, None, torch.float32)))
    OPS.cpu_isa("best")
    for dot, fma, unflushed in zip(*results, strict=True):
        assert_bits_equal(fma, dot)
        assert (unflushed != dot).any()


@pytest.mark.skipif(not SLOW_DOT, reason="this machine has no avx512bf16")
def test_few_rows_among_many_have_the_bits_of_the_dot_product(library):
    """Experts of one and two rows in a product that takes FMAs because it has many rows in all; subnormal inputs."""
    make = torch.Generator().manual_seed(0)
    offsets = torch.tensor([1, 3, 103], dtype=torch.int32)  # the ends of experts with 1, 2 and 100 rows
    a = (torch.randn(103, 256, generator=make) * 2.0**-128).bfloat16()
    b = torch.randn(3, 48, 256, generator=make).to(E4M3)
    results = []
    for cap in ("avx512bf16", *SLOW_DOT):
        OPS.cpu_isa(cap)
        results.append(OPS.grouped_mm(a, b, torch.tensor(1.0), torch.ones(3), offsets, None, torch.float32))
    OPS.cpu_isa("best")
    assert_bits_equal(results[1], results[0])


@pytest.mark.pairwise
@pytest.mark.parametrize("a_by", ["row", "block1x128"])
@pytest.mark.parametrize("b_by", ["tensor", "block1x128", "block128x128"])
@pytest.mark.parametrize("k", [64, 1000, 3000])
def test_a_row_does_not_depend_on_its_batch(level, a_by, b_by, k):
    a, a_scale = quantized(tame(300 if level.startswith("avx512bf16") else 40, k, seed=3), a_by)
    b, b_scale = quantized(tame(150, k, seed=4), b_by)
    whole = OPS.scaled_mm(a, b, a_scale, b_scale, None, torch.bfloat16)
    for first, last in [(0, 1), (7, 8), (3, 5), (2, 5), (11, 15), (1, 6), (2, 8), (4, 11), (9, 17), (1, 18), (5, 40)]:
        part = OPS.scaled_mm(a[first:last], b, a_scale[first:last], b_scale, None, torch.bfloat16)
        assert_bits_equal(part, whole[first:last])


@pytest.mark.parametrize("dtype", FORMATS)
def test_more_rows_than_are_unpacked_at_a_time(level, dtype):
    """At K = 4096 a panel of 8 MiB is 512 rows of FP32 or 1,024 of BF16."""
    a, a_scale = quantized(tame(1100, 4096, seed=5), "row")
    b, b_scale = quantized(tame(40, 4096, seed=6), "row", dtype)
    whole = OPS.scaled_mm(a, b, a_scale, b_scale, None, torch.bfloat16)
    for first, last in [(0, 3), (362, 380), (545, 560), (1090, 1100)]:
        part = OPS.scaled_mm(a[first:last], b, a_scale[first:last], b_scale, None, torch.bfloat16)
        assert_bits_equal(part, whole[first:last])


def test_threads_do_not_change_the_result(threads):
    a, a_scale = quantized(tame(530, 1100, seed=3), "row")
    b, b_scale = quantized(tame(700, 1100, seed=4), "row")
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(OPS.scaled_mm(a, b, a_scale, b_scale, None, torch.float32))
    assert_bits_equal(results[1], results[0])
    assert_bits_equal(results[2], results[0])


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("out", HIGH)
@pytest.mark.parametrize("bias_dtype", HIGH)
def test_output_and_bias_types(level, out, bias_dtype):
    a, a_scale = quantized(tame(6, 100, seed=1), "row")
    b, b_scale = quantized(tame(20, 100, seed=2), "row")
    bias = tame(1, 20, seed=3)[0].to(bias_dtype)
    full = OPS.scaled_mm(a, b, a_scale, b_scale, None, torch.float32)
    actual = OPS.scaled_mm(a, b, a_scale, b_scale, bias, out)
    assert_bits_equal(actual, (full + bias.float()).to(out))


@pytest.mark.parametrize("shape", [(0, 5, 64), (5, 0, 64), (3, 4, 0)])
def test_empty(level, shape):
    m, n, k = shape
    a, b, one = torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3), torch.tensor(1.0)
    bias = torch.arange(n).float()
    actual = OPS.scaled_mm(a, b, one, one, bias, torch.float32)
    assert torch.equal(actual, torch.zeros(m, n) + bias)


def test_nan_and_infinity_affect_only_their_row(level):
    a = tame(6, 130, seed=1).clamp(-400, 400)
    a[2, 64], a[4, 129] = torch.nan, torch.inf
    one = torch.tensor(1.0)
    actual = OPS.scaled_mm(a.to(E5M2), tame(20, 130, seed=2).to(E4M3), one, one, None, torch.float32)
    assert actual[2].isnan().all()
    assert not actual[4].isfinite().any()
    assert actual[[0, 1, 3, 5]].isfinite().all()


def test_non_contiguous_operands(level):
    a, b = tame(130, 12, seed=1).to(E4M3).t(), tame(130, 9, seed=2).to(E4M3).t()
    one = torch.tensor(1.0)
    actual = OPS.scaled_mm(a, b, one, one, None, torch.float32)
    assert_bits_equal(actual, OPS.scaled_mm(a.contiguous(), b.contiguous(), one, one, None, torch.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4, 200)}, "a: dtype is Float, must be Float8_e4m3fn or Float8_e5m2"),
        ({"b": torch.zeros(6, 199).to(E4M3)}, "b: dim 1 is 199, must be K = 200"),
        ({"b_scale": torch.ones(6, 3)}, r"b_scale_inv: dim 1 is 3, must be ceil\(K=200 / 128\) = 2"),
        ({"b_scale": torch.ones(5, 2)}, r"b_scale_inv: dim 0 is 5, must be ceil\(N=6 / 128\) = 1"),
        ({"a_scale": torch.ones(4)}, "a_scale_inv: has 1 dimensions, must have 2"),
        ({"a_scale": torch.ones(4, 1).double()}, "a_scale_inv: dtype is Double, must be Float"),
        ({"bias": torch.zeros(7)}, "bias: dim 0 is 7, must be N = 6"),
        ({"out": torch.int32}, "out_dtype: is Int, must be Float, BFloat16 or Half"),
    ],
)
def test_the_error_names_the_wrong_argument(change, message):
    good = {"a": torch.zeros(4, 200).to(E4M3), "b": torch.zeros(6, 200).to(E4M3), "a_scale": torch.tensor(1.0)}
    good |= {"b_scale": torch.tensor(1.0), "bias": None, "out": torch.float32}
    with pytest.raises(RuntimeError, match=message):
        OPS.scaled_mm(*(good | change).values())


FAR = [(3e38, 1e-6), (1e-6, 3e38), (1e-30, 2e28), (2.0**-140, 2.0**120), (2e38, 1e-38), (0.25, 3.0)]


def far_operands(rows: int, by_row: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns small integers in FP8, whose sums are exact, and very large and very small scales whose products are
    moderate."""
    a, b = tame(rows, 64, seed=1).round().to(E4M3), tame(48, 64, seed=2).round().to(E4M3)
    pairs = torch.tensor([FAR[i % len(FAR)] for i in range(max(rows, 48))])
    if not by_row:
        return a, b, *pairs[0]
    return a, b, pairs[:rows, :1], pairs[:48, 1:]


def assert_exact_bits(actual: Tensor, operands: tuple[Tensor, Tensor, Tensor, Tensor], extra: Tensor) -> None:
    """Checks the bits of the reference, and that its only errors are roundings."""
    assert_bits_equal(actual, reference.scaled_mm(*operands, extra, torch.float32))
    assert_true_to_roundings(actual, operands, extra)


def assert_true_to_roundings(actual: Tensor, operands: tuple[Tensor, Tensor, Tensor, Tensor], extra: Tensor) -> None:
    """Checks that errors against FP64 are roundings only, for all results that are normal FP32 numbers."""
    a, b, a_scale, b_scale = (t.double() for t in operands)
    truth = (a @ b.t()) * a_scale * b_scale.t() + extra.double()
    normal = (truth.abs() < 3.4e38) & (truth.abs() > 1.2e-38)
    assert normal.any()
    torch.testing.assert_close(actual.double()[normal], truth[normal], rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("rows", [1, 5, 40, 130])
@pytest.mark.parametrize("by_row", [False, True])
def test_scales_far_from_one_that_cancel_do_not_overflow(level, rows, by_row):
    """With scales such as 3e38 and 1e-6, the sum times the first scale would be infinite."""
    operands, bias = far_operands(rows, by_row), torch.arange(48.0)
    assert_exact_bits(OPS.scaled_mm(*operands, bias, torch.float32), operands, bias)
    packed = torch.empty(operands[1].numel(), dtype=torch.uint8).view(E4M3).view(packing.packed_shape(48, 64))
    OPS.pack_weight(operands[1], packed)
    actual = OPS.packed_mm(operands[0], packed, *operands[2:], bias, None, torch.float32)
    assert_exact_bits(actual, operands, bias)
    residual = torch.ones(rows, 48, dtype=torch.bfloat16)
    product = OPS.scaled_mm(*operands, bias, torch.bfloat16)
    assert_bits_equal(OPS.scaled_mm_add(*operands, bias, residual), residual + product)


def test_far_scales_of_blocks_and_of_empty_sums_do_not_overflow(level):
    a, b = tame(3, 200, seed=1).to(E4M3), tame(48, 200, seed=2).to(E4M3)
    far = torch.full((), 1e30)
    actual = OPS.scaled_mm(a, b, far, torch.full((1, 2), 1e-30), None, torch.float32)
    truth = exact(a, b, far, torch.full((1, 2), 1e-30))
    torch.testing.assert_close(actual.double(), truth, rtol=1e-4, atol=1e-3)
    assert OPS.scaled_mm(a[:, :0], b[:, :0], far, far, None, torch.float32).eq(0).all()
