"""scaled_mm on the device: every pair of granularities, on every kernel that can compute it."""

from itertools import product as product_of

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.selfcheck.switches import TILES
from tests.csrc.helpers import FORMATS, HIGH, assert_bits_equal, assert_fp8_equal, tame
from tests.csrc.test_gemm import (
    E4M3,
    E5M2,
    GRANULARITIES,
    assert_as_good_as_naive,
    assert_exact_bits,
    assert_true_to_roundings,
    exact,
    far_operands,
    quantized,
)
from tests.cuda.accumulation import assert_within_accumulation

BF16 = torch.bfloat16


def operands(m, n, k, a_by="tensor", b_by="tensor", formats=(E4M3, E4M3)):
    a, a_scale = quantized(tame(m, k, seed=1), a_by, formats[0])
    b, b_scale = quantized(tame(n, k, seed=2), b_by, formats[1])
    return a, b, a_scale, b_scale


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("scaled_mm"), ids=lambda case: case.name)
def test_registered_cases_are_close_to_exact_ones(kernels, case):
    a, b, a_scale, b_scale, bias, out = case.make()
    actual = kernels.run("scaled_mm", a, b, a_scale, b_scale, bias, out)
    assert actual.dtype == out
    if a.shape[1] == 0:
        assert_bits_equal(actual, reference.scaled_mm(a, b, a_scale, b_scale, bias, out))
    else:
        assert_within_accumulation(actual, a, b, a_scale, b_scale, bias, device=kernels.device)


# 5 rows: skinny kernel; 70 rows: mma kernel with partial tiles; K = 400: a partial block of K.
@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(5, 40, 400), (70, 136, 400)])
@pytest.mark.parametrize("a_by", GRANULARITIES)
@pytest.mark.parametrize("b_by", GRANULARITIES)
def test_every_pair_of_granularities(kernels, shape, a_by, b_by):
    a, b, a_scale, b_scale = operands(*shape, a_by, b_by)
    actual = kernels.run("scaled_mm", a, b, a_scale, b_scale, None, BF16)
    naive = reference.scaled_mm(a, b, a_scale, b_scale, None, BF16)
    assert_as_good_as_naive(actual, naive, exact(a, b, a_scale, b_scale))


@pytest.mark.parametrize("a_dtype", FORMATS)
@pytest.mark.parametrize("b_dtype", FORMATS)
@pytest.mark.parametrize("shape", [(3, 17, 272), (130, 70, 144), (20, 9, 77)])
def test_integers_multiply_exactly(kernels, shape, a_dtype, b_dtype):
    """Sums of small integers are exact in every order, even with few fraction bits."""
    m, n, k = shape
    make = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, size, generator=make).float() for size in ((m, k), (n, k)))
    one, bias = torch.tensor(1.0), torch.arange(n).float()
    actual = kernels.run("scaled_mm", a.to(a_dtype), b.to(b_dtype), one, one, bias, torch.float32)
    assert torch.equal(actual, a @ b.t() + bias)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 33, 64])
def test_a_row_does_not_depend_on_its_neighbours(kernels, rows):
    """Tests the skinny kernel (up to 16 rows on Hopper and sm_100, up to 64 elsewhere)."""
    if kernels.device == "cuda" and torch.cuda.get_device_capability()[0] in {9, 10} and rows > 16:
        pytest.skip("another kernel computes this many rows")
    a, b, a_scale, b_scale = operands(64, 48, 2304, "row", "row")
    whole = kernels.run("scaled_mm", a[:rows], b, a_scale[:rows], b_scale, None, torch.float32)
    alone = kernels.run("scaled_mm", a[rows - 1 : rows], b, a_scale[rows - 1 : rows], b_scale, None, torch.float32)
    assert_bits_equal(alone[0], whole[-1])


@pytest.mark.parametrize("m", [3, 80])
@pytest.mark.parametrize("k", [256, 250])
def test_transposed_and_strided_operands_have_the_same_bits(kernels, m, k):
    """Transposed views, as in the backward pass, and strided ones; one K needs padding, the other does not."""
    a, b, a_scale, b_scale = operands(m, 48, k)
    contiguous = kernels.run("scaled_mm", a, b, a_scale, b_scale, None, torch.float32)
    a_t, b_t = (kernels.here(x.t().contiguous()).t() for x in (a, b))
    transposed = kernels.ops.scaled_mm(a_t, b_t, *kernels.here((a_scale, b_scale)), None, torch.float32)
    assert_bits_equal(transposed.cpu(), contiguous)
    wide = kernels.here(torch.cat([a, a], 1))[:, :k]
    strided = kernels.ops.scaled_mm(wide, *kernels.here((b, a_scale, b_scale)), None, torch.float32)
    assert_bits_equal(strided.cpu(), contiguous)


@pytest.mark.pairwise
@pytest.mark.parametrize("out", HIGH)
@pytest.mark.parametrize("bias_dtype", HIGH)
@pytest.mark.parametrize("m", [6, 70])
def test_output_and_bias_types(kernels, out, bias_dtype, m):
    a, b, a_scale, b_scale = operands(m, 24, 128, "row", "row")
    bias = tame(1, 24, seed=3)[0].to(bias_dtype)
    actual = kernels.run("scaled_mm", a, b, a_scale, b_scale, bias, out)
    assert actual.dtype == out
    assert_within_accumulation(actual, a, b, a_scale, b_scale, bias, device=kernels.device)


def whole_numbers(m, n, k, a_dtype=E4M3, b_dtype=E4M3):
    """Returns operands and a bias whose product is exact in FP32 in every order."""
    make = torch.Generator().manual_seed(m)
    a, b = (torch.randint(-3, 4, size, generator=make).float() for size in ((m, k), (n, k)))
    one = torch.tensor(1.0)
    return a.to(a_dtype), b.to(b_dtype), one, one, torch.arange(n).float()


# 5 and 20 rows: skinny kernel, with a split K; 70: partial mma tiles; 128: whole tiles (CUTLASS on its chips).
@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(5, 40, 400), (20, 9, 77), (3, 64, 2304), (70, 33, 144), (128, 256, 256)])
@pytest.mark.parametrize("out", FORMATS)
@pytest.mark.parametrize("a_dtype", FORMATS)
def test_fp8_output_of_the_product_and_its_amax(kernels, shape, out, a_dtype):
    args = whole_numbers(*shape, a_dtype)
    product = args[0].float() @ args[1].float().t() + args[4]
    for scale in (torch.tensor(0.25), torch.tensor(1000.0)):  # 1000: beyond both formats
        q, amax = kernels.run("scaled_mm_quantize", *args, scale, out)
        expected, largest = reference.quantize(product, scale, out)
        assert_fp8_equal(q, expected)
        assert_bits_equal(amax, largest)


@pytest.mark.parametrize("case", cases("scaled_mm_quantize"), ids=lambda case: case.name)
def test_fp8_output_of_cases(kernels, case):
    """The output has the bits of scaled_mm in FP32 and a cast, since both ops use the same kernel."""
    *args, scale, out = case.make()
    q, amax = kernels.run("scaled_mm_quantize", *args, scale, out)
    expected, largest = reference.quantize(kernels.run("scaled_mm", *args, torch.float32), scale, out)
    assert_fp8_equal(q, expected)
    assert_bits_equal(amax, largest)


def test_fp8_output_of_nan_and_of_no_rows(kernels):
    for rows in (4, 70):
        a, b, *rest = whole_numbers(rows, 16, 144)
        a[2, 3] = torch.nan
        q, amax = kernels.run("scaled_mm_quantize", a, b, *rest, torch.tensor(1.0), E4M3)
        assert q[2].isnan().all()
        assert not q[[0, 1, 3]].isnan().any()
        assert amax.isfinite()  # NaN does not count
        assert amax > 0
    empty, none = kernels.run("scaled_mm_quantize", a[:0], b, *rest, torch.tensor(1.0), E4M3)
    assert empty.shape == (0, 16)
    assert none == 0
    with pytest.raises(RuntimeError, match=r"out_dtype: is BFloat16, must be Float8_e4m3fn or Float8_e5m2"):
        kernels.run("scaled_mm_quantize", a, b, *rest, torch.tensor(1.0), BF16)


NAMED = ("skinny", "tall", "mma", *TILES)


@pytest.mark.parametrize("shape", [(24, 64, 256), (300, 136, 400)])
def test_every_kernel_called_by_name_is_exact_or_refuses(kernels, shape):
    """A kernel that supports this device gives the exact product; others raise an error."""
    *args, _ = whole_numbers(*shape)
    product, results = args[0].float() @ args[1].float().t(), {}
    for name, swizzle in product_of(NAMED, (1, 4)):
        try:
            results[name, swizzle] = kernels.run("scaled_mm_by", *args, None, torch.float32, name, swizzle)
        except RuntimeError as refused:
            results[name, swizzle] = str(refused)
    available = {name for (name, _), answer in results.items() if not isinstance(answer, str)}
    for (name, _), answer in results.items():
        if name in available:
            assert torch.equal(answer, product), name
        else:
            assert f"kernel: is {name}, which does not multiply this here" in answer
    assert "mma" in available
    assert ("skinny" in available) == (shape[0] <= 64)
    if kernels.device == "cpu":
        assert available <= {"skinny", "tall", "mma"}
    elif torch.cuda.get_device_capability()[0] >= 9:
        assert available & set(TILES), "CUTLASS was not built in"


def test_an_unknown_kernel_or_swizzle_is_refused(kernels):
    *args, bias = whole_numbers(4, 16, 32)
    with pytest.raises(RuntimeError, match="kernel: is huge, which does not multiply this here"):
        kernels.run("scaled_mm_by", *args, bias, torch.float32, "huge", 1)
    with pytest.raises(RuntimeError, match="swizzle: is 0, must be 1 to 64"):
        kernels.run("scaled_mm_by", *args, bias, torch.float32, "mma", 0)


def test_nan_and_infinity_affect_only_their_row(kernels):
    for rows in (6, 70):
        a = tame(rows, 144, seed=1).clamp(-400, 400)
        a[2, 64], a[4, 129] = torch.nan, torch.inf
        one = torch.tensor(1.0)
        actual = kernels.run("scaled_mm", a.to(E5M2), tame(16, 144, seed=2).to(E4M3), one, one, None, torch.float32)
        assert actual[2].isnan().all()
        assert not actual[4].isfinite().any()
        assert actual[[0, 1, 3, *range(5, rows)]].isfinite().all()


LARGE = [(256, 512, 1024), (300, 264, 400), (1024, 4096, 4096), (8, 4096, 14336), (33, 40, 64)]
PAIRS = [("tensor", "tensor"), ("row", "row"), ("block1x128", "block128x128"), ("block1x128", "block1x128")]


@pytest.mark.pairwise
@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("by", PAIRS)
def test_large_products_are_close_to_exact_ones(gpu, shape, formats, by):
    """Sizes that the kernels of each chip are optimized for; the exact product is computed on the GPU in FP64."""
    a, b, a_scale, b_scale = gpu.here(operands(*shape, *by, formats))
    for out in (BF16, torch.float32):
        bias = gpu.here(torch.linspace(-1, 1, shape[1]).to(out))
        actual = gpu.ops.scaled_mm(a, b, a_scale, b_scale, bias, out)
        assert_within_accumulation(actual, a, b, a_scale, b_scale, bias, device="cuda")
        assert torch.equal(
            gpu.ops.scaled_mm(a, b, a_scale, b_scale, bias, out), actual
        )  # a second run has the same bits


def test_the_error_names_the_wrong_argument(kernels):
    a, b, one = torch.zeros(4, 200).to(E4M3), torch.zeros(6, 200).to(E4M3), torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"b_scale_inv: dim 1 is 3, must be ceil\(K=200 / 128\) = 2"):
        kernels.run("scaled_mm", a, b, one, torch.ones(6, 3), None, torch.float32)
    with pytest.raises(RuntimeError, match="bias: dim 0 is 7, must be N = 6"):
        kernels.run("scaled_mm", a, b, one, one, torch.zeros(7), torch.float32)


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("by_row", [False, True])
def test_scales_far_from_one_that_cancel_do_not_overflow(kernels, rows, by_row):
    """Our own kernels multiply by one scale after the other (scaled_by) and have the bits of the reference.

    cuBLASLt, which may compute the last product, has no documented order, so its last bits may differ. Zeros are added
    to all results because CUTLASS may give -0.0, which a bias would turn into 0.0.
    """
    operands, zeros, available = far_operands(rows, by_row), torch.zeros(48), set()
    for name in NAMED:
        try:
            actual = kernels.run("scaled_mm_by", *operands, None, torch.float32, name, 1)
        except RuntimeError as refused:
            assert f"kernel: is {name}, which does not multiply this here" in str(refused)  # noqa: PT017
            continue
        available.add(name)
        assert_exact_bits(actual + zeros, operands, zeros)
    assert available >= ({"skinny", "tall", "mma"} if rows <= 64 else {"tall", "mma"})
    first = kernels.run("scaled_mm", *operands, None, torch.float32)
    assert_true_to_roundings(first, operands, zeros)
