"""The order of sums of the numerics classes `four_lanes`, `amx_tiles` and `pairs_bf16`, by models in NumPy, at every
level.

The models are written from docs/numerics-classes.md, the first comments of csrc/cpu/gemm.h and pair_product.h, and of
AMX from the operation of TDPBF16PS in Intel's manual. With `flush` they take values and sums that are subnormal in FP32
as zero, as `amx_tiles` and the classes that end with `_ftz`.
"""

from collections.abc import Iterator
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
from fp8serve.fp8.ops.packing import packed_weight
from tests.csrc.helpers import assert_bits_equal
from tests.csrc.numerics_rows import PRESENT, row_of

OPS = torch.ops.fp8serve
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
Array = NDArray[np.float32]
BLOCK, SCALE_BLOCK, RUN, LANES, STEP = 1024, 128, 8, 4, 32


def flushed(x: Array, flush: bool) -> Array:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0) * x, x) if flush else x


def plus(total: Array, a: Array, b: Array, flush: bool) -> Array:
    """Returns total [M, N] + a [M] b [N], whose products are exact."""
    return flushed(total + flushed(a, flush)[:, None] * flushed(b, flush), flush)


def four_lanes(total: list[Array], a: Array, b: Array, flush: bool) -> list[Array]:
    """Returns the four lanes of `total` plus the products of a [M, K] and b [N, K]."""
    for run in range(0, a.shape[1], RUN):
        for lane in range(LANES):
            for k in (run + 2 * lane + 1, run + 2 * lane):
                if k < a.shape[1]:
                    total[lane] = plus(total[lane], a[:, k], b[:, k], flush)
    return total


def amx_tiles(total: list[Array], a: Array, b: Array, flush: bool) -> list[Array]:
    """Returns `total`, of which only the first has values, plus the products of a [M, K] and b [N, K]."""
    for step in range(0, a.shape[1], STEP):
        halves = [np.zeros_like(total[0]) for _ in range(2)]
        for k in range(step, min(step + STEP, a.shape[1])):
            halves[k % 2] = plus(halves[k % 2], a[:, k], b[:, k], flush)
        total[0] = flushed(total[0] + flushed(halves[0] + halves[1], flush), flush)
    return total


ORDERS = {"four_lanes": four_lanes, "four_lanes_ftz": four_lanes, "amx_tiles": amx_tiles}


def product(a: Array, b: Array, scales: Any, numerics: str) -> Array:
    """Returns the sums of a [M, K] times b [N, K]. scales(i) are those of the i-th 128 of K [M, N], or None."""
    add, flush = ORDERS[numerics], numerics != "four_lanes"
    result = None
    for begin in range(0, a.shape[1], BLOCK):
        zeros = [np.zeros((len(a), len(b)), np.float32) for _ in range(LANES)]
        end, total = min(begin + BLOCK, a.shape[1]), list(zeros)
        if scales is None:
            total = add(total, a[:, begin:end], b[:, begin:end], flush)
        for part in range(begin, end, SCALE_BLOCK) if scales is not None else ():
            stop = min(part + SCALE_BLOCK, end)
            lanes = add(list(zeros), a[:, part:stop], b[:, part:stop], flush)
            total = [t + lane * scales(part // SCALE_BLOCK) for t, lane in zip(total, lanes, strict=True)]
        block = (total[0] + total[2]) + (total[1] + total[3])
        result = block if result is None else result + block
    assert result is not None
    return result


def pairs(a: Array, b: Array, flush: bool) -> Array:
    """Returns a^T b for a [K, M] and b [K, N]: one running sum, of each pair of k the odd one first."""
    total = np.zeros((a.shape[1], b.shape[1]), np.float32)
    for even in range(0, len(a), 2):
        for k in (even + 1, even):
            if k < len(a):
                total = plus(total, a[k], b[k], flush)
    return total


def class_at(cap: str, op: str, *arguments: Any) -> str:
    return row_of(op, arguments).cells[PRESENT[cap]]


@pytest.fixture(params=PRESENT)
def cap(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    OPS.cpu_isa(name)
    yield name
    OPS.cpu_isa("best")


def with_subnormals(rows: int, columns: int, seed: int) -> Tensor:
    """Returns BF16 values of which every third is subnormal. Their products with integers are exact."""
    x = random_normal(rows, columns, torch.float32, seed) * 2.0**-125
    x[:, ::3] *= 2.0**-4
    return x.to(BF16)


@pytest.mark.parametrize("rows", [5, 37, 130])
@pytest.mark.parametrize(("formats", "k"), [((E4M3, E4M3), 2100), ((E5M2, E4M3), 1031), ((E4M3, E5M2), 5)])
def test_the_sum_of_a_product(cap: str, formats: tuple[torch.dtype, torch.dtype], k: int, rows: int) -> None:
    a, b, a_scale, b_scale, bias, out = mm_case(rows, 19, k, *formats, ("row", "row"), torch.float32)
    numerics = class_at(cap, "scaled_mm", a, b, a_scale, b_scale)
    sums = torch.from_numpy(product(a.float().numpy(), b.float().numpy(), None, numerics))
    assert_bits_equal(OPS.scaled_mm(a, b, a_scale, b_scale, bias, out), sums * a_scale * b_scale.t() + bias)


@pytest.mark.parametrize(("kinds", "k"), [(("1x128", "1x128"), 2100), (("1x128", "128x128"), 1160)])
def test_block_scales_multiply_the_sum_of_128(cap: str, kinds: tuple[str, str], k: int) -> None:
    a, b, a_scale, b_scale, _, out = mm_case(21, 18, k, E4M3, E4M3, kinds, torch.float32)
    of_rows, of_columns = a_scale.numpy(), b_scale.expand(18, -1).numpy()
    numerics = class_at(cap, "scaled_mm", a, b, a_scale, b_scale)
    scales = lambda i: of_rows[:, i, None] * of_columns[:, i]  # noqa: E731
    sums = product(a.float().numpy(), b.float().numpy(), scales, numerics)
    assert_bits_equal(OPS.scaled_mm(a, b, a_scale, b_scale, None, out), torch.from_numpy(sums))


@pytest.mark.parametrize("k", [7, 1060])
def test_subnormals_of_bf16_count_as_zero_where_the_class_says_so(cap: str, k: int) -> None:
    a, b = with_subnormals(5, k, 1), torch.randint(-8, 9, (19, k), generator=torch.Generator().manual_seed(2)).to(BF16)
    arguments = a, b, None, torch.float32
    numerics = class_at(cap, "mm", *arguments)
    sums = torch.from_numpy(product(a.float().numpy(), b.float().numpy(), None, numerics))
    assert_bits_equal(OPS.mm(*arguments), sums)
    assert numerics == "four_lanes" or not torch.equal(sums, reference.mm(*arguments))


@pytest.mark.parametrize("tokens", [1, 601])
def test_gradients_add_pairs(cap: str, tokens: int) -> None:
    dy, x = random_normal(tokens, 7, BF16, 1), random_normal(tokens, 70, BF16, 2)
    small = with_subnormals(tokens, 7, 3)
    integers = torch.randint(-8, 9, (tokens, 70), generator=torch.Generator().manual_seed(4)).to(BF16)
    for a, b in ((dy, x), (small, integers)):
        sums = pairs(a.float().numpy(), b.float().numpy(), class_at(cap, "wgrad", a, b).endswith(FTZ))
        assert_bits_equal(OPS.wgrad(a, b), torch.from_numpy(sums))


WEIGHTS = {"FP8": E4M3, "BF16": BF16}


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 65])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_rows_do_not_depend_on_their_number_nor_on_packing(cap: str, weights: str, rows: int) -> None:
    a, b = random_normal(rows, 1160, BF16, 1), random_normal(48, 1160, torch.float32, 2).to(WEIGHTS[weights])
    packed, one = packed_weight(b), torch.tensor(1.0)
    scales = (one, one) if b.dtype == E4M3 else (None, None)
    whole = OPS.packed_mm(a, packed, *scales, None, None, torch.float32)
    single = [OPS.packed_mm(row, packed, *scales, None, None, torch.float32) for row in a.split(1)]
    assert_bits_equal(whole, torch.cat(single))
    sums = product(a.float().numpy(), b.float().numpy(), None, class_at(cap, "packed_mm", a, b, *scales))
    assert_bits_equal(whole, torch.from_numpy(sums))
