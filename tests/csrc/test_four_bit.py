"""Products with weights in 4 bits have the bits of the BF16 product with the widened weights, on every level."""

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import four_bit, reference
from fp8serve.fp8.ops.arithmetic import E8M0
from fp8serve.fp8.ops.four_bit import E4M3, packed_shapes, random_4bit
from fp8serve.fp8.ops.grouped import expert_row_ranges
from fp8serve.model.formats.microscaling import mxfp4
from tests.csrc.helpers import assert_bits_equal, assert_fp8_equal
from tests.csrc.test_grouped import COUNTS, offsets_of

OPS = torch.ops.fp8serve
FORMATS = (E4M3, E8M0)
SHAPES = [(16, 32), (48, 96), (128, 1024), (64, 1056), (144, 2304)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 40, 64, 65, 130]  # streamed in one pass or several, or over a panel


def weight_of(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns every code beside scales of every size: with zeros and subnormals, and of both signs in E4M3."""
    codes, scales = random_4bit(rows, columns, dtype, seed)
    if dtype == E4M3:
        signs = torch.randint(0, 2, scales.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        scales = (scales.view(torch.uint8) | signs << 7).view(E4M3)
    return codes, scales


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    shapes = packed_shapes(codes, scales)
    out = torch.zeros(shapes[0], dtype=torch.uint8), torch.zeros(shapes[1], dtype=torch.uint8).view(scales.dtype)
    OPS.pack_4bit(codes, scales, *out)
    return out


def product(x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns the BF16 product with the widened weight, which is scaled and rounded by torch."""
    weight, row_scales = four_bit.widen(codes, scales)
    out = OPS.mm(x, weight, None, torch.float32)
    for scale in (row_scales, global_scale):
        out = out if scale is None else out * scale
    return (out if bias is None else out + bias.float()).bfloat16()


@pytest.mark.parametrize("dtype", FORMATS)
def test_widened_values_are_those_of_the_format(dtype: torch.dtype) -> None:
    """All 256 scales beside all 16 codes, computed in FP64; of MXFP4 also as `mxfp4` reads a checkpoint."""
    block = four_bit.BLOCK_OF[dtype]
    codes = four_bit.pack_codes(torch.arange(16, dtype=torch.uint8).repeat(256, block // 16))
    scales = torch.arange(256, dtype=torch.uint8).view(dtype).view(256, 1)
    values = torch.tensor([*four_bit.E2M1_VALUES, *(-v for v in four_bit.E2M1_VALUES)], dtype=torch.float64)
    expected = values.repeat(256, block // 16) * scales.double()
    weight, row_scales = four_bit.widen(codes, scales)
    actual = weight.double() * (1 if row_scales is None else row_scales.double().unsqueeze(1))
    if dtype == E8M0:
        expected[:9] = 0  # blocks whose scale is below 2^-118 are taken as zero
    assert torch.equal(actual.nan_to_num(0.125), expected.nan_to_num(0.125))
    if dtype == E8M0:
        usual = slice(9, 253)  # neither subnormal nor infinite in BF16
        assert torch.equal(actual[usual], mxfp4(codes, scales)[usual].double())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_has_the_bytes_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    codes, scales = weight_of(*shape, dtype)
    scales.view(torch.uint8)[5, -1] = 255
    for actual, expected in zip(pack(codes, scales), four_bit.packed_4bit(codes, scales), strict=True):
        assert_fp8_equal(actual, expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_packed_weight_widens_to_the_same_values(dtype: torch.dtype) -> None:
    codes, scales = weight_of(32, 256, dtype)
    scales.view(torch.uint8)[3, 1] = 255
    (weight, rows), (packed, packed_rows) = four_bit.widen(codes, scales), four_bit.widen(*pack(codes, scales))
    assert_bits_equal(packed + 0.0, weight + 0.0)  # a zero may have lost its sign
    if rows is not None and packed_rows is not None:
        assert_bits_equal(packed_rows, rows)


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_products_have_the_bits_of_widened_weights(level, shape, dtype, is_packed):
    (n, k), make = shape, torch.Generator().manual_seed(7)
    weight = weight_of(n, k, dtype)
    operand = pack(*weight) if is_packed else weight
    for m in ROWS:
        x = torch.randn(m, k, generator=make).bfloat16()
        bias = (None, torch.randn(n, generator=make), torch.randn(n, generator=make).bfloat16())[m % 3]
        scale = (torch.rand((), generator=make) + 0.5, torch.rand(n, generator=make) + 0.5, None)[m % 3]
        scale = None if dtype == E8M0 else scale
        expected = product(x, *weight, scale, bias)
        assert_bits_equal(OPS.mm_4bit(x, *operand, scale, bias), expected)


@pytest.mark.parametrize("shape", [(17, 32), (5, 64), (1, 1056)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_any_number_of_rows_is_multiplied_unpacked(level, shape, dtype):
    weight = weight_of(*shape, dtype)
    for m in (1, 3, 20):
        x = torch.randn(m, shape[1], generator=torch.Generator().manual_seed(m)).bfloat16()
        assert_bits_equal(OPS.mm_4bit(x, *weight, None, None), product(x, *weight, None, None))


@pytest.mark.parametrize("m", [1, 5, 20, 70])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_nan_scale_makes_its_column_nan(level, dtype, is_packed, m):
    codes, scales = random_4bit(32, 2112, dtype, 0)
    codes[9], codes[20] = 0, 0
    for row, block in ((3, 0), (9, 1), (20, scales.shape[1] - 1), (31, 40)):
        scales.view(torch.uint8)[row, block] = 255
    x = torch.randn(m, 2112, generator=torch.Generator().manual_seed(m)).bfloat16()
    expected = product(x, codes, scales, None, None)
    assert expected.isnan().any(0).nonzero().flatten().tolist() == [3, 9, 20, 31]
    operand = pack(codes, scales) if is_packed else (codes, scales)
    assert_bits_equal(OPS.mm_4bit(x, *operand, None, None), expected)


@pytest.mark.parametrize("m", [1, 6, 70])
@pytest.mark.parametrize("dtype", FORMATS)
def test_infinities_nan_and_tiny_numbers_of_the_input(level, dtype, m):
    """Products that are zero, infinite, NaN or tiny; also zero blocks, and results that BF16 rounds to a subnormal."""
    codes, scales = weight_of(32, 1056, dtype)
    scales.view(torch.uint8)[::2, ::2] = 0
    x = torch.randn(m, 1056, generator=torch.Generator().manual_seed(m)).bfloat16()
    x[0, ::7], x[m // 2, 5], x[m // 3, 9] = 0, torch.inf, torch.nan
    tiny = torch.tensor(2.0**-132) if dtype == E4M3 else None
    for operand in ((codes, scales), pack(codes, scales)):
        for scale in (None, tiny):
            assert_bits_equal(OPS.mm_4bit(x, *operand, scale, None), product(x, codes, scales, scale, None))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads_change_nothing(threads, count):
    weight, x = weight_of(512, 1024, E4M3), torch.randn(8, 1024).bfloat16()
    expected = product(x, *weight, None, None)
    torch.set_num_threads(count)
    assert_bits_equal(OPS.mm_4bit(x, *pack(*weight), None, None), expected)


def stack(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(48, 96), (144, 1120), (32, 2304), (17, 64)])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("scale_per", ["expert", "row", "none"])
def test_grouped_products_are_those_of_each_expert(level, shape, counts, dtype, is_packed, scale_per):
    """Experts without rows have NaN as scales, which must not reach the result of another expert."""
    (n, k), rows, make = shape, COUNTS[counts], torch.Generator().manual_seed(3)
    experts, is_packed = len(rows), is_packed and n % 16 == 0
    weights = [weight_of(n, k, dtype, 10 * e) for e in range(experts)]
    for (_, scales), count in zip(weights, rows, strict=True):
        scales.view(torch.uint8)[:] = scales.view(torch.uint8) if count else 255
    x, bias = torch.randn(sum(rows), k, generator=make).bfloat16(), torch.randn(experts, n, generator=make)
    shapes = {"expert": (experts,), "row": (experts, n)}
    has_scale = scale_per != "none" and dtype == E4M3
    global_scale = torch.rand(shapes[scale_per], generator=make) + 0.5 if has_scale else None
    parts = [
        product(x[i:j], *weights[e], None if global_scale is None else global_scale[e], bias[e])
        for e, (i, j) in enumerate(expert_row_ranges(offsets_of(rows)))
    ]
    operand = map(stack, zip(*(pack(*w) if is_packed else w for w in weights), strict=True))
    assert_bits_equal(OPS.grouped_mm_4bit(x, *operand, global_scale, offsets_of(rows), bias), torch.cat(parts))


X = torch.ones(1, 32).bfloat16()
CODES, SCALES, MX_SCALES = (
    torch.zeros(16, 16, dtype=torch.uint8),
    torch.ones(16, 2).to(E4M3),
    torch.ones(16, 1).to(E8M0),
)


def grouped(codes=CODES[None], scales=SCALES[None], global_scale=None, offsets=(1,), bias=None):
    return OPS.grouped_mm_4bit(X, codes, scales, global_scale, torch.tensor(offsets, dtype=torch.int32), bias)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: OPS.mm_4bit(X.float(), CODES, SCALES, None, None), "x: dtype is Float, must be BFloat16"),
        (lambda: OPS.mm_4bit(X, CODES, SCALES.float(), None, None), "scales: dtype is Float"),
        (lambda: OPS.mm_4bit(X, CODES, SCALES[:, :1], None, None), "scales: dim 1 is 1, must be blocks = 2"),
        (lambda: OPS.mm_4bit(X, CODES[:, :8], SCALES, None, None), "codes: dim 1 is 8, must be K / 2 = 16"),
        (lambda: OPS.mm_4bit(X[:, :8], CODES, SCALES, None, None), "must be a multiple of 16"),
        (lambda: OPS.mm_4bit(X[:, :16], CODES, MX_SCALES, None, None), "must be a multiple of 32"),
        (lambda: OPS.mm_4bit(X, CODES, MX_SCALES, torch.ones(()), None), "global_scale: is for E4M3 scales"),
        (lambda: OPS.mm_4bit(X, CODES, SCALES, torch.ones(3), None), "global_scale: dim 0 is 3, must be N = 16"),
        (lambda: OPS.mm_4bit(X, CODES, SCALES, None, torch.ones(3)), "bias: dim 0 is 3, must be N = 16"),
        (lambda: OPS.mm_4bit(X, *pack(CODES, SCALES)[:1], SCALES, None, None), "scales: has 2 dimensions, must have 3"),
        (lambda: grouped(CODES[None, :, :8]), "codes: dim 2 is 8, must be K / 2 = 16"),
        (lambda: grouped(scales=MX_SCALES[None, :5]), "scales: dim 1 is 5, must be N = 16"),
        (lambda: grouped(CODES), "codes: has 2 dimensions, must have 3"),
        (lambda: grouped(offsets=[2]), "offsets: ends at 2, must end at the number of rows, 1"),
        (lambda: grouped(offsets=[0, 1]), "offsets: dim 0 is 2, must be E = 1"),
        (lambda: grouped(global_scale=torch.ones(2)), "global_scale: dim 0 is 2, must be E = 1"),
        (lambda: grouped(global_scale=torch.ones(1, 3)), "global_scale: dim 1 is 3, must be N = 16"),
        (lambda: grouped(bias=torch.ones(16)), "bias: has 1 dimensions, must have 2"),
        (lambda: OPS.pack_4bit(CODES[:15], SCALES[:15], *pack(CODES, SCALES)), "a multiple of 16 rows"),
        (lambda: OPS.pack_4bit(CODES, SCALES, CODES, SCALES), "out_codes: has 2 dimensions, must have 3"),
    ],
)
def test_wrong_arguments_are_refused(call, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        call()


def test_the_reference_refuses_a_global_scale_beside_e8m0_scales() -> None:
    with pytest.raises(ValueError, match="global_scale is for E4M3 scales"):
        reference.mm_4bit(X, CODES, MX_SCALES, torch.ones(()), None)
