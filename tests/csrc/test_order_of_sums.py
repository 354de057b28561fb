"""The order of sums of the numerics classes `four_lanes` and `pairs_bf16`, by models in NumPy, at every level.

The models are written from docs/numerics-classes.md and the first comments of csrc/cpu/gemm.h and pair_product.h. With
`flush` they take values and sums that are subnormal in FP32 as zero, as the classes that end with `_ftz`.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8serve.fp8.numerics_classes import FTZ
from fp8serve.fp8.ops import reference
from fp8serve.fp8.ops.gemm import mm_case
from fp8serve.fp8.ops.inputs import random_normal
from tests.csrc.helpers import assert_bits_equal
from tests.csrc.numerics_rows import row_of

OPS = torch.ops.fp8serve
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
Array = NDArray[np.float32]
BLOCK, SCALE_BLOCK, RUN, LANES = 1024, 128, 8, 4


def flushed(x: Array, flush: bool) -> Array:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0) * x, x) if flush else x


def plus(total: Array, a: Array, b: Array, flush: bool) -> Array:
    """Returns total [M, N] + a [M] b [N], whose products are exact."""
    return flushed(total + flushed(a, flush)[:, None] * flushed(b, flush), flush)


def four_lanes(a: Array, b: Array, scales: Any, flush: bool) -> Array:
    """Returns the sums of a [M, K] times b [N, K]. scales(i) are those of the i-th 128 of K [M, N], or None."""
    blocks = []
    for begin in range(0, a.shape[1], BLOCK):
        end = min(begin + BLOCK, a.shape[1])
        total = [np.zeros((len(a), len(b)), np.float32) for _ in range(LANES)]
        for part in range(begin, end, SCALE_BLOCK):
            lanes = total if scales is None else [np.zeros_like(t) for t in total]
            for run in range(part, min(part + SCALE_BLOCK, end), RUN):
                for lane in range(LANES):
                    for k in (run + 2 * lane + 1, run + 2 * lane):
                        if k < end:
                            lanes[lane] = plus(lanes[lane], a[:, k], b[:, k], flush)
            if scales is not None:
                total = [t + lane * scales(part // SCALE_BLOCK) for t, lane in zip(total, lanes, strict=True)]
        blocks.append((total[0] + total[2]) + (total[1] + total[3]))
    result = blocks[0]
    for block in blocks[1:]:
        result = result + block
    return result


def pairs(a: Array, b: Array, flush: bool) -> Array:
    """Returns a^T b for a [K, M] and b [K, N]: one running sum, of each pair of k the odd one first."""
    total = np.zeros((a.shape[1], b.shape[1]), np.float32)
    for even in range(0, len(a), 2):
        for k in (even + 1, even):
            if k < len(a):
                total = plus(total, a[k], b[k], flush)
    return total


def flushes(level: str, op: str, *arguments: Any) -> bool:
    return row_of(op, arguments).cells[level].endswith(FTZ)


def with_subnormals(rows: int, columns: int, seed: int) -> Tensor:
    """Returns BF16 values of which every third is subnormal. Their products with integers are exact."""
    x = random_normal(rows, columns, torch.float32, seed) * 2.0**-125
    x[:, ::3] *= 2.0**-4
    return x.to(BF16)


@pytest.mark.parametrize(("formats", "k"), [((E4M3, E4M3), 2100), ((E5M2, E4M3), 1031), ((E4M3, E5M2), 5)])
def test_products_add_in_four_lanes(level: str, formats: tuple[torch.dtype, torch.dtype], k: int) -> None:
    a, b, a_scale, b_scale, bias, out = mm_case(5, 19, k, *formats, ("row", "row"), torch.float32)
    sums = four_lanes(a.float().numpy(), b.float().numpy(), None, False)
    expected = torch.from_numpy(sums) * a_scale * b_scale.t() + bias
    assert_bits_equal(OPS.scaled_mm(a, b, a_scale, b_scale, bias, out), expected)


@pytest.mark.parametrize(("kinds", "k"), [(("1x128", "1x128"), 2100), (("1x128", "128x128"), 1160)])
def test_products_with_block_scales_promote_every_128(level: str, kinds: tuple[str, str], k: int) -> None:
    a, b, a_scale, b_scale, _, out = mm_case(5, 18, k, E4M3, E4M3, kinds, torch.float32)
    of_rows, of_columns = a_scale.numpy(), b_scale.expand(18, -1).numpy()
    sums = four_lanes(a.float().numpy(), b.float().numpy(), lambda i: of_rows[:, i, None] * of_columns[:, i], False)
    assert_bits_equal(OPS.scaled_mm(a, b, a_scale, b_scale, None, out), torch.from_numpy(sums))


@pytest.mark.parametrize("k", [7, 1060])
def test_subnormals_of_bf16_count_as_zero_where_the_class_says_so(level: str, k: int) -> None:
    a, b = with_subnormals(5, k, 1), torch.randint(-8, 9, (19, k), generator=torch.Generator().manual_seed(2)).to(BF16)
    arguments = a, b, None, torch.float32
    sums = four_lanes(a.float().numpy(), b.float().numpy(), None, flushes(level, "mm", *arguments))
    assert_bits_equal(OPS.mm(*arguments), torch.from_numpy(sums))
    assert not torch.equal(torch.from_numpy(sums), reference.mm(*arguments)) or not flushes(level, "mm", *arguments)


@pytest.mark.parametrize("tokens", [1, 601])
def test_gradients_add_pairs(level: str, tokens: int) -> None:
    dy, x = random_normal(tokens, 7, BF16, 1), random_normal(tokens, 70, BF16, 2)
    small = with_subnormals(tokens, 7, 3)
    integers = torch.randint(-8, 9, (tokens, 70), generator=torch.Generator().manual_seed(4)).to(BF16)
    for a, b in ((dy, x), (small, integers)):
        sums = pairs(a.float().numpy(), b.float().numpy(), flushes(level, "wgrad", a, b))
        assert_bits_equal(OPS.wgrad(a, b), torch.from_numpy(sums))
