"""Packed weights have the reference's order on every level, and products with them the bits of unpacked weights."""

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import packing, reference
from tests.csrc.helpers import FORMATS, assert_bits_equal, assert_fp8_equal

OPS = torch.ops.fp8serve
E4M3, E5M2 = FORMATS
TYPES = (*FORMATS, torch.bfloat16)
SHAPES = [(16, 8), (48, 72), (128, 1024), (64, 1032), (144, 2304)]
ROWS = [
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    13,
    40,
    64,
    65,
    130,
]  # read directly in one pass or several, or through an unpacked panel


def every_code(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Returns random finite values of an FP8 format; infinities and NaN are replaced by 1."""
    make = torch.Generator().manual_seed(rows + cols)
    packed = torch.randint(0, 256, (rows, cols), generator=make, dtype=torch.uint8).view(dtype)
    return packed.float().nan_to_num(1.0, 1.0, 1.0).to(dtype)


def weight_of(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    if dtype != torch.bfloat16:
        return every_code(rows, cols, dtype)
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).bfloat16()


def pack(weight: Tensor) -> Tensor:
    out = torch.empty(packing.packed_shape(*weight.shape), dtype=weight.dtype)
    OPS.pack_weight(weight, out)
    return out


def assert_same(actual: Tensor, expected: Tensor) -> None:
    (assert_fp8_equal if actual.element_size() == 1 else assert_bits_equal)(actual, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_has_the_order_of_the_reference(shape, dtype):
    weight = weight_of(*shape, dtype)
    expected = torch.empty(packing.packed_shape(*shape), dtype=dtype)
    reference.pack_weight(weight, expected)
    assert_same(pack(weight), expected)
    assert_same(packing.unpack_weight(expected), weight)


def test_packing_has_the_documented_order():
    """Sixteen rows are interleaved: k = 0 to 3 of the first run of 8, of the second run, then k = 4 to 7 of both."""
    numbers = torch.arange(16 * 16).view(16, 16)
    packed = pack((numbers // 16 * 2).bfloat16())[0].flatten().view(2, 2, 16, 4)  # halves, runs, rows, k
    rows = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]  # BF16: the order that unpack instructions produce
    assert packed[0, 0, :, 0].tolist() == [2 * row for row in rows]
    packed = pack((numbers % 16).to(E4M3)).float().flatten().view(2, 2, 16, 4)
    assert packed[0, 1, 5].tolist() == [8, 9, 10, 11]
    assert packed[1, 0, 5].tolist() == [4, 5, 6, 7]


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_products_have_the_bits_of_unpacked_weights(level, shape, dtype, scales):
    (n, k), make = shape, torch.Generator().manual_seed(7)
    weight = every_code(n, k, dtype)
    packed = pack(weight)
    for m in ROWS:
        a = torch.randn(m, k, generator=make).to(E4M3 if m % 2 else E5M2)
        shapes = {
            "tensor": ((), ()),
            "row": ((m, 1), (n, 1)),
            "block": ((m, -(-k // 128)), (-(-n // 128), -(-k // 128))),
        }
        a_scale, b_scale = (torch.rand(size, generator=make) + 0.5 for size in shapes[scales])
        bias = torch.randn(n, generator=make)
        for out in (torch.bfloat16, torch.float32):
            expected = OPS.scaled_mm(a, weight, a_scale, b_scale, bias, out)
            assert_bits_equal(OPS.packed_mm(a, packed, a_scale, b_scale, bias, None, out), expected)
        residual = torch.randn(m, n, generator=make).bfloat16()
        expected = OPS.scaled_mm_add(a, weight, a_scale, b_scale, None, residual)
        assert_bits_equal(OPS.packed_mm(a, packed, a_scale, b_scale, None, residual, torch.bfloat16), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_products_have_the_bits_of_mm(level, shape):
    n, k = shape
    weight = weight_of(n, k, torch.bfloat16)
    packed = pack(weight)
    for m in ROWS:
        a = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
        actual = OPS.packed_mm(a, packed, None, None, None, None, torch.float32)
        assert_bits_equal(actual, OPS.mm(a, weight, None, torch.float32))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads_change_nothing(threads, count):
    weight, a = every_code(512, 1024, E4M3), torch.randn(8, 1024).to(E4M3)
    one = torch.ones(())
    expected = OPS.scaled_mm(a, weight, one, one, None, torch.float32)
    torch.set_num_threads(count)
    assert_bits_equal(OPS.packed_mm(a, pack(weight), one, one, None, None, torch.float32), expected)


WEIGHT, ONE = torch.ones(16, 8).to(E4M3), torch.ones(())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: OPS.pack_weight(torch.ones(15, 8).to(E4M3), WEIGHT), "multiple of 16 rows of a multiple of 8"),
        (lambda: OPS.pack_weight(torch.ones(16, 9).to(E4M3), WEIGHT), "multiple of 16 rows of a multiple of 8"),
        (lambda: OPS.pack_weight(WEIGHT, WEIGHT), "has 2 dimensions, must have 3"),
        (lambda: OPS.pack_weight(WEIGHT.float(), torch.zeros(1, 1, 128)), "weight"),
        (lambda: OPS.pack_weight(WEIGHT, torch.zeros(1, 1, 128)), "out"),
        (lambda: OPS.packed_mm(WEIGHT, WEIGHT, ONE, ONE, None, None, torch.float32), "has 2 dimensions, must have 3"),
        (lambda: OPS.packed_mm(torch.ones(1, 16).to(E4M3), pack(WEIGHT), ONE, ONE, None, None, torch.float32), "dim 1"),
        (lambda: OPS.packed_mm(WEIGHT[:, :7], pack(WEIGHT), ONE, ONE, None, None, torch.float32), "a multiple of 8"),
        (lambda: OPS.packed_mm(WEIGHT, pack(WEIGHT), ONE, None, None, None, torch.float32), "must both be given"),
        (
            lambda: OPS.packed_mm(WEIGHT.bfloat16(), pack(WEIGHT.bfloat16()), ONE, ONE, None, None, torch.float32),
            "are for FP8",
        ),
        (lambda: OPS.scaled_mm(WEIGHT, pack(WEIGHT), ONE, ONE, None, torch.float32), "has 3 dimensions, must have 2"),
    ],
)
def test_wrong_arguments_are_refused(call, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        call()
