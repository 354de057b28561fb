"""Products of packed weights by FMAs, where the processor's BF16 dot product is slow, have the bits of that product."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import four_bit
from fp8serve.fp8.ops.arithmetic import E8M0
from tests.csrc.conftest import SLOW_DOT
from tests.csrc.helpers import FORMATS, assert_bits_equal
from tests.csrc.test_four_bit import pack as pack_4bit
from tests.csrc.test_four_bit import stack
from tests.csrc.test_grouped import offsets_of
from tests.csrc.test_packed import every_code, pack

pytestmark = pytest.mark.skipif(not SLOW_DOT, reason="this machine has no avx512bf16")
OPS = torch.ops.fp8serve
E4M3, E5M2 = FORMATS
ONE = torch.tensor(1.0)
COLUMNS = 80
ROWS = [*range(1, 14), 17, 25]
KS = [8, 200, 1096, 2312]  # a run, and blocks of 1024 and what remains of one


def tiny(rows: int, k: int, exponents: tuple[int, int], seed: int) -> Tensor:
    """Returns BF16 values between these powers of two; each fifth column is subnormal, one row has an infinity."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=make) * 2.0 ** torch.randint(*exponents, (rows, k), generator=make)
    x[:, ::5] = 2.0**-130
    x[rows // 2, k // 3] = torch.inf
    return x.bfloat16()


def has_flushed(op: Callable[..., Tensor], *args: object) -> bool:
    """Compares both ways of multiplying, and returns whether FMAs that do not flush give other bits."""
    results = []
    for cap in ("avx512bf16", *SLOW_DOT, "avx512"):
        OPS.cpu_isa(cap)
        results.append(op(*args))
    OPS.cpu_isa("best")
    dot, fma, unflushed = results
    assert_bits_equal(fma, dot)
    return bool((unflushed != dot).any())


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("dtype", [*FORMATS, torch.bfloat16])
def test_fmas_have_the_bits_of_the_dot_product(dtype: torch.dtype, k: int) -> None:
    """BF16 inputs, with products and sums around the smallest normal number."""
    if dtype == torch.bfloat16:
        weight, exponents, scale = tiny(COLUMNS, k, (-68, -60), 1), (-68, -60), None
    else:
        weight, exponents, scale = every_code(COLUMNS, k, dtype), (-128, -118), ONE
    packed = pack(weight)
    args = packed, scale, scale, None, None, torch.float32
    flushed = [has_flushed(OPS.packed_mm, tiny(m, k, exponents, m), *args) for m in ROWS]
    assert any(flushed)


@pytest.mark.parametrize("k", [32, 1056, 2336])
@pytest.mark.parametrize("dtype", [E4M3, E8M0])
def test_weights_in_four_bits(dtype: torch.dtype, k: int) -> None:
    codes, scales = four_bit.random_4bit(COLUMNS, k, dtype, k)
    scales.view(torch.uint8)[7, 0] = 255  # NaN
    packed = pack_4bit(codes, scales)
    for m in ROWS:
        a = tiny(m, k, (-140, -110), m)
        has_flushed(OPS.mm_4bit, a, *packed, None, None)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("inputs", [*FORMATS, torch.bfloat16])
@pytest.mark.parametrize("scales", ["row", "block"])
def test_scales_bias_and_residual(dtype: torch.dtype, inputs: torch.dtype, scales: str) -> None:
    """With a scale for each row, as joined weights have, and with block scales, whose promoted sums are tiny, too."""
    k, make = 1096, torch.Generator().manual_seed(3)
    packed, bias = pack(every_code(COLUMNS, k, dtype)), torch.randn(COLUMNS, generator=make)
    for m in ROWS:
        a = torch.randn(m, k, generator=make).to(inputs)
        shapes = {"row": ((m, 1), (COLUMNS, 1)), "block": ((m, -(-k // 128)), (1, -(-k // 128)))}[scales]
        a_scale, b_scale = (torch.rand(shape, generator=make) + 0.5 for shape in shapes)
        b_scale = b_scale * 2.0**-128 if scales == "block" else b_scale
        a_scale = ONE if inputs == torch.bfloat16 else a_scale
        residual = torch.randn(m, COLUMNS, generator=make).bfloat16()
        for more in ((bias, None, torch.float32), (None, residual, torch.bfloat16)):
            has_flushed(OPS.packed_mm, a, packed, a_scale, b_scale, *more)


COUNTS = [[0, 1, 5, 0, 2, 9, 3, 1], *([m] for m in ROWS)]  # rows of each expert


@pytest.mark.pairwise
@pytest.mark.parametrize("k", [32, 1056, 2336])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("has_mx_scales", [False, True])
def test_grouped_products(dtype: torch.dtype, k: int, has_mx_scales: bool) -> None:
    flushed = []
    for counts in COUNTS:
        experts, make = len(counts), torch.Generator().manual_seed(k)
        weights = torch.stack([pack(every_code(COLUMNS, k + e, dtype)[:, :k].contiguous()) for e in range(experts)])
        shape = experts, COLUMNS, k // 32
        codes = torch.randint(117, 137, shape, generator=make, dtype=torch.uint8)
        scales = codes.view(E8M0) if has_mx_scales else torch.ones(experts)
        a = tiny(sum(counts), k, (-130, -116), 5)
        flushed.append(has_flushed(OPS.grouped_mm, a, weights, ONE, scales, offsets_of(counts), None, torch.float32))
    assert any(flushed)


@pytest.mark.parametrize("dtype", [E4M3, E8M0])
def test_grouped_products_in_four_bits(dtype: torch.dtype) -> None:
    for counts in COUNTS[:4]:
        weights = [pack_4bit(*four_bit.random_4bit(COLUMNS, 1056, dtype, e)) for e in range(len(counts))]
        codes, scales = map(stack, zip(*weights, strict=True))
        a = tiny(sum(counts), 1056, (-140, -110), 5)
        has_flushed(OPS.grouped_mm_4bit, a, codes, scales, None, offsets_of(counts), None)
