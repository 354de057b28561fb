"""grouped_mm and grouped_quantize have the bits of a loop of scaled_mm or quantize, on every level."""

from itertools import product

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import cases, packing, reference
from fp8serve.fp8.ops.grouped import expert_row_ranges
from fp8serve.fp8.ops.inputs import random_fp8, random_mx_scales
from tests.csrc.helpers import FORMATS, HIGH, assert_bits_equal, assert_fp8_equal, hostile, tame

OPS = torch.ops.fp8serve
E4M3, E5M2 = FORMATS
COUNTS = {  # rows of each expert: none, few (weights read directly), a panel, and more than a tile
    "decoding": [0, 1, 0, 0, 1, 1, 0, 2],
    "prefill": [40, 0, 7, 130, 1, 0, 64, 9],
    "one expert": [0, 0, 0, 33, 0, 0, 0, 0],
    "long": [700, 3, 0, 0, 0, 0, 600, 1],
}
SCALES = ["expert", "row", "block", "tensor"]
SHAPES = [(33, 200), (144, 1160), (256, 2304)]


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def operands(counts: list[int], n: int, k: int, scales: str, a: torch.dtype) -> tuple[Tensor, ...]:
    """Returns (a, b, a_scale_inv, b_scale_inv) for experts with these numbers of rows."""
    make, rows, experts = torch.Generator().manual_seed(7), sum(counts), len(counts)
    shapes = {
        "expert": ((experts,), (experts,)),
        "row": ((rows, 1), (experts, n, 1)),
        "block": ((rows, -(-k // 128)), (experts, -(-n // 128), -(-k // 128))),
        "tensor": ((), (experts, n, 1)),
    }
    a_scale, b_scale = (torch.rand(shape, generator=make) + 0.5 for shape in shapes[scales])
    b = torch.stack([tame(n, k, seed=i).to(E4M3) for i in range(experts)])
    return tame(rows, k, seed=99).to(a), b, a_scale, b_scale


def looped(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, bias: Tensor | None, out) -> Tensor:
    parts = []
    for e, (begin, end) in enumerate(expert_row_ranges(offsets)):
        scale = a_scale if a_scale.dim() == 0 else a_scale[e] if a_scale.dim() == 1 else a_scale[begin:end]
        more = None if bias is None else bias[e]
        parts.append(OPS.scaled_mm(a[begin:end], b[e], scale, b_scale[e], more, out))
    return torch.cat(parts)


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("scales", SCALES)
def test_grouped_equals_looped(level, shape, counts, scales):
    (n, k), rows = shape, COUNTS[counts]
    offsets = offsets_of(rows)
    for a_dtype, out in ((E4M3, torch.bfloat16), (E5M2, torch.float32), (torch.bfloat16, torch.bfloat16)):
        args = operands(rows, n, k, scales, a_dtype)
        bias = torch.randn(len(rows), n, generator=torch.Generator().manual_seed(1)) if a_dtype != E5M2 else None
        actual = OPS.grouped_mm(*args, offsets, bias, out)
        assert_bits_equal(actual, looped(*args, offsets, bias, out))


@pytest.mark.pairwise
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("scales", SCALES)
def test_packed_weights_give_the_same_bits(level, counts, scales):
    n, k, rows = 144, 1160, COUNTS[counts]
    offsets, (a, b, *scale) = offsets_of(rows), operands(rows, n, k, scales, E4M3)
    packed = torch.empty_like(b).view(len(rows), *packing.packed_shape(n, k))
    for weight, out in zip(b, packed, strict=True):
        OPS.pack_weight(weight, out)
    actual = OPS.grouped_mm(a, packed, *scale, offsets, None, torch.bfloat16)
    assert_bits_equal(actual, OPS.grouped_mm(a, b, *scale, offsets, None, torch.bfloat16))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("rank", [5, 64])
def test_zero_padded_bf16_matrices_give_the_bits_of_mm(level, counts, rank):
    """Multiplies as for served adapters: first by A [rank, 200], then by B [33, rank] with padding columns of zeros."""
    rows, offsets = COUNTS[counts], offsets_of(COUNTS[counts])
    one, ones = torch.ones(()), torch.ones(len(rows))
    for (n, k), padded in (((rank, 200), 200), ((33, rank), 70)):
        a, b = (torch.nn.functional.pad(tame(m, k, seed=m).bfloat16(), (0, padded - k)) for m in (sum(rows), n))
        experts = torch.stack([b * (e + 1) for e in range(len(rows))])
        actual = OPS.grouped_mm(a, experts, one, ones, offsets, None, torch.float32)
        parts = [
            OPS.mm(a[i:j, :k], experts[e, :, :k], None, torch.float32)
            for e, (i, j) in enumerate(expert_row_ranges(offsets))
        ]
        assert_bits_equal(actual, torch.cat(parts))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_change_nothing(level, threads, count):
    rows = COUNTS["prefill"]
    args = operands(rows, 144, 1160, "row", E4M3)
    torch.set_num_threads(count)
    actual = OPS.grouped_mm(*args, offsets_of(rows), None, torch.bfloat16)
    torch.set_num_threads(1)
    assert_bits_equal(actual, looped(*args, offsets_of(rows), None, torch.bfloat16))


def test_scales_that_cancel_do_not_overflow_in_between(level):
    """One expert has a very large and a very small scale; the others have moderate scales."""
    rows = [3, 2, 4]
    a, b, *_ = operands(rows, 48, 64, "expert", E4M3)
    scales = torch.tensor([1.0, 3e38, 0.5]), torch.tensor([1.0, 1e-6, 2.0])
    actual = OPS.grouped_mm(a, b, *scales, offsets_of(rows), None, torch.float32)
    assert_bits_equal(actual, looped(a, b, *scales, offsets_of(rows), None, torch.float32))
    assert actual.isfinite().all()


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("grouped_quantize"), ids=lambda case: case.name)
def test_casts_are_those_of_each_expert(level, case):
    x, scale, offsets, dtype = case.make()
    q, amax = OPS.grouped_quantize(x, scale, offsets, dtype)
    expected = reference.grouped_quantize(x, scale, offsets, dtype)
    assert_fp8_equal(q, expected[0])
    assert_bits_equal(amax, expected[1])
    for e, (begin, end) in enumerate(expert_row_ranges(offsets)):
        part, largest = OPS.quantize(x[begin:end], scale[e], dtype)
        assert_fp8_equal(q[begin:end], part)
        assert amax[e] == largest


@pytest.mark.parametrize(("dtype", "format_"), list(product(HIGH, FORMATS)))
def test_special_values_are_cast_as_by_quantize(level, dtype, format_):
    x, scale = hostile(70, 300, dtype), torch.tensor([0.5, 7.3, 1e-3])
    q, _ = OPS.grouped_quantize(x, scale, offsets_of([30, 0, 40]), format_)
    assert_fp8_equal(q[30:], OPS.quantize(x[30:], scale[2], format_)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([1, 3, 2, 5], dtype=torch.int32)}, "falls from 3 to 2"),
        ({"offsets": torch.tensor([1, 2, 3, 4], dtype=torch.int32)}, "ends at 4, must end at the number of rows, 5"),
        ({"offsets": torch.tensor([1, 2, 3, 5])}, "dtype is Long, must be Int"),
        ({"offsets": torch.tensor([1, 2, 5], dtype=torch.int32)}, "dim 0 is 3, must be E = 4"),
        ({"a_scale": torch.ones(3)}, "dim 0 is 3, must be E = 4"),
        ({"b_scale": torch.ones(4, 2, 1)}, r"dim 1 is 2, must be ceil\(N=32 / 128\) = 1"),
        ({"a": torch.zeros(5, 63).to(E4M3)}, "dim 2 is 64, must be K = 63"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    a, b, a_scale, b_scale = operands([1, 1, 1, 2], 32, 64, "expert", E4M3)
    arguments = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "offsets": offsets_of([1, 1, 1, 2])} | change
    with pytest.raises(RuntimeError, match=message):
        OPS.grouped_mm(*arguments.values(), None, torch.bfloat16)


MX_A, MX_B = (torch.full(shape, 127, dtype=torch.uint8).view(torch.float8_e8m0fnu) for shape in ((5, 8), (4, 32, 8)))
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(5, 256, dtype=BF16)}, "a_scale_inv: is E8M0 beside values in BF16"),
        ({"b": torch.zeros(4, 32, 256, dtype=BF16)}, "b_scale_inv: is E8M0 beside values in BF16"),
        ({"a_scale": torch.ones(5, 2)}, r"a_scale_inv: has blocks of 128, must be E8M0 or FP32 \[\], \[E\] or \[T"),
        ({"b_scale": torch.ones(4, 1, 2)}, r"b_scale_inv: has blocks of 128, must be E8M0 or FP32 \[E\] or \[E, N"),
        ({"a_scale": MX_A[:, :7]}, r"a_scale_inv: dim 1 is 7, must be ceil\(K=256 / 32\) = 8"),
        ({"b_scale": MX_B[:, :31]}, "b_scale_inv: dim 1 is 31, must be N = 32"),
        ({"b_scale": MX_B[0]}, "b_scale_inv: has 2 dimensions, must have 3"),
        (
            {"a": torch.zeros(5, 40).to(E4M3), "a_scale": torch.tensor(1.0), "b": torch.zeros(4, 2, 5, 128).to(E4M3),
             "b_scale": MX_B[:, :, :2]},
            "b_scale_inv: is E8M0 beside a packed matrix with rows of 40 values, must be a multiple of 32",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_in_mx_blocks_are_refused(change, message):
    arguments = {"a": torch.zeros(5, 256).to(E4M3), "b": torch.zeros(4, 32, 256).to(E4M3), "a_scale": MX_A}
    arguments |= {"b_scale": MX_B, "offsets": offsets_of([1, 1, 1, 2])} | change
    with pytest.raises(RuntimeError, match=message):
        OPS.grouped_mm(*arguments.values(), None, BF16)


@pytest.mark.parametrize("counts", COUNTS)
def test_mx_blocks_give_the_bits_of_mx_mm(level, counts):
    """Experts without rows have NaN as scales, which must not reach the result of another expert."""
    (n, k), rows, offsets = (48, 288), COUNTS[counts], offsets_of(COUNTS[counts])
    a, b = random_fp8(sum(rows), k, E4M3, 1), torch.stack([random_fp8(n, k, E4M3, 2 + e) for e in range(len(rows))])
    a_scale, b_scale = (
        random_mx_scales(sum(rows), k, 3),
        torch.stack([random_mx_scales(n, k, 4 + e) for e in range(len(rows))]),
    )
    for e, count in enumerate(rows):
        if count == 0:
            b_scale[e].view(torch.uint8)[:] = 255
    parts = [
        OPS.mx_mm(a[i:j], b[e], a_scale[i:j], b_scale[e], None, None, BF16)
        for e, (i, j) in enumerate(expert_row_ranges(offsets))
    ]
    assert_bits_equal(OPS.grouped_mm(a, b, a_scale, b_scale, offsets, None, BF16), torch.cat(parts))
