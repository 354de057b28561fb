"""Casts have the bits of a search in a table of all FP8 values; rows C, A and S of docs/numerics.md."""

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8serve.fp8.ops import Case, arithmetic, cases, reference
from fp8serve.fp8.ops.arithmetic import BLOCK, FLT_MAX, FP8_MAX

DTYPES = list(FP8_MAX)
LAYOUT = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}  # (mantissa bits, exponent bias)


@cache
def magnitudes(dtype: torch.dtype) -> NDArray[np.float64]:
    """Returns the non-negative finite values of an FP8 format in the order of their codes, from its definition."""
    mantissa_bits, bias = LAYOUT[dtype]
    bits = np.arange({torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}[dtype])
    exponent, mantissa = bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    fraction = mantissa / 2.0**mantissa_bits
    values: NDArray[np.float64] = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    return values


def nearest_bits(x: Tensor, dtype: torch.dtype) -> NDArray[np.uint8]:
    """Returns the FP8 bits of FP32 values: the nearest value of the table, the even code on a tie, 0x7F for NaN."""
    table, values = magnitudes(dtype), x.double().numpy()
    size = np.abs(values)
    upper = np.searchsorted(table, size).clip(1, len(table) - 1)
    below, above = size - table[upper - 1], table[upper] - size
    code = np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)
    code = np.where(size >= table[-1], len(table) - 1, code)
    code = np.where(np.isnan(size), 0x7F, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def assert_same_bits(q: Tensor, expected: NDArray[np.uint8]) -> None:
    """Bit equality; a NaN may have any sign and payload of its format."""
    actual = q.contiguous().view(torch.uint8).numpy()
    nan = q.float().isnan().numpy()
    assert (nan == ((expected & 0x7F) == 0x7F)).all()
    np.testing.assert_array_equal(actual[~nan], expected[~nan])


def every_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def many_fp32() -> Tensor:
    """Returns 2^18 random bit patterns, all FP8 values, and the midpoints between them with their FP32 neighbours."""
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    points = [bits.view(torch.float32)]
    for dtype in DTYPES:
        table = torch.from_numpy(magnitudes(dtype)).float()
        middle = (table[1:] + table[:-1]) / 2
        points += [table, middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(torch.inf))]
    values = torch.cat(points)
    return torch.cat([values, -values])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x", [every_bf16(), many_fp32()], ids=["all bf16", "fp32"])
def test_cast_of_every_value(x: Tensor, dtype: torch.dtype) -> None:
    """Rows C1 to C4 and C6: nearest even, saturation, infinities, NaN, subnormals, signed zero."""
    for kernel in (reference.quantize, torch.ops.fp8serve.quantize):
        q, _ = kernel(x, torch.tensor(1.0), dtype)
        assert_same_bits(q, nearest_bits(x.float(), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [3.0, 1e-30, FLT_MAX])
def test_the_scale_multiplies_in_fp32(dtype: torch.dtype, scale: float) -> None:
    """Row C5: the product is rounded to FP32, overflows to infinity and then saturates."""
    x = every_bf16().float()
    with np.errstate(over="ignore", invalid="ignore"):
        product = x.numpy() * np.float32(scale)
    q, _ = torch.ops.fp8serve.quantize(x, torch.tensor(scale), dtype)
    assert_same_bits(q, nearest_bits(torch.from_numpy(product), dtype))


def test_amax_ignores_nan_and_keeps_infinity() -> None:
    """Rows A1 to A3."""
    one = torch.tensor(1.0)
    for values, expected in (
        ([-3.0, torch.nan, 2.0], 3.0),
        ([torch.nan], 0.0),
        ([], 0.0),
        ([-torch.inf, 1.0], torch.inf),
    ):
        x = torch.tensor(values).view(1, -1)
        assert torch.ops.fp8serve.quantize(x, one, DTYPES[0])[1].item() == expected
        assert arithmetic.amax(x).item() == expected


def expected_scale(amax: float, fp8_max: float, power_2: bool) -> np.float32:
    """Returns the scale of current scaling in numpy FP32, as docs/numerics.md defines it."""
    if not 0 < amax < np.inf:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(fp8_max) / np.float32(amax), np.float32(FLT_MAX))
    return np.float32(2.0 ** (np.frexp(scale)[1] - 1)) if power_2 else np.float32(scale)


@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_current_scale_edges(dtype: torch.dtype, power_2: bool) -> None:
    """Rows S1 to S4: zero, NaN and infinite amax give 1, overflow gives FLT_MAX, power_2 rounds down."""
    for amax in (0.0, np.nan, np.inf, 1e-45, 1e-38, 1e-36, 0.1, 1.0, 3.0, 448.0, 449.0, 57344.0, 1e30, FLT_MAX):
        x = torch.tensor([[-amax, 0.0]])
        scale = expected_scale(float(np.float32(amax)), FP8_MAX[dtype], power_2)
        q, scale_inv = torch.ops.fp8serve.quantize_current(x, dtype, power_2)
        assert scale_inv.item() == np.float32(1) / scale
        assert_same_bits(q, nearest_bits(x * torch.tensor(scale), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_is_a_true_division(dtype: torch.dtype) -> None:
    """448 / amax, not 448 * (1 / amax): the two differ in the last bit for every third amax."""
    x = torch.rand(2000, generator=torch.Generator().manual_seed(1))
    expected = (np.float32(FP8_MAX[dtype]) / x.numpy()).astype(np.float32)
    actual = arithmetic.scale_from_amax(x, FP8_MAX[dtype], False)
    np.testing.assert_array_equal(actual.numpy(), expected)
    assert (actual != x.reciprocal() * FP8_MAX[dtype]).any()


def expected_blocks(x: Tensor, dtype: torch.dtype, rows: int, cols: int, power_2: bool) -> tuple[Tensor, Tensor]:
    """Returns (scaled values, scale_inv), computed block by block in loops. Blocks at the right and lower edges may be
    smaller than rows x cols."""
    scaled, inverse = torch.empty_like(x), torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // cols))
    for i in range(inverse.shape[0]):
        for j in range(inverse.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
            numbers = x[at][~x[at].isnan()]
            scale = expected_scale(float(numbers.abs().max()) if numbers.numel() else 0.0, FP8_MAX[dtype], power_2)
            scaled[at], inverse[i, j] = x[at] * torch.tensor(scale), float(np.float32(1) / scale)
    return scaled, inverse


def holds_infinity(x: Tensor, rows: int, cols: int) -> Tensor:
    """Returns one bool for each block of rows x cols: whether it has an infinity."""
    bands = [torch.stack([part.isinf().any() for part in band.split(cols, 1)]) for band in x.split(rows) if len(band)]
    return torch.stack(bands) if bands else torch.zeros(0, -(-x.shape[1] // cols), dtype=torch.bool)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_current"), ids=lambda c: c.name)
def test_current_casts(case: Case) -> None:
    """Rows S1 to S4, and the scale_inv of a gradient that holds an infinity (G5)."""
    x, dtype, power_2, *infinity_is_nan = case.make()
    scaled, inverse = expected_blocks(x.float(), dtype, max(x.shape[0], 1), max(x.shape[1], 1), power_2)
    expected_inverse = inverse.reshape(()) if inverse.numel() else torch.ones(())
    if infinity_is_nan and x.isinf().any():
        expected_inverse = torch.tensor(torch.nan)
    for kernel in (reference.quantize_current, torch.ops.fp8serve.quantize_current):
        q, scale_inv = kernel(*case.make())
        torch.testing.assert_close(scale_inv, expected_inverse, rtol=0, atol=0, equal_nan=True)
        assert_same_bits(q, nearest_bits(scaled, dtype))


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_block"), ids=lambda c: c.name)
def test_block_casts(case: Case) -> None:
    """Rows S5 to S7: ragged edges, all-zero blocks, and a block with an infinity does not touch its neighbours."""
    x, dtype, block_rows, power_2, *infinity_is_nan = case.make()
    scaled, inverse = expected_blocks(x.float(), dtype, block_rows, BLOCK, power_2)
    if infinity_is_nan:
        inverse = torch.where(holds_infinity(x, block_rows, BLOCK), torch.nan, inverse)
    for kernel in (reference.quantize_block, torch.ops.fp8serve.quantize_block):
        q, scale_inv = kernel(*case.make())
        torch.testing.assert_close(scale_inv, inverse, rtol=0, atol=0, equal_nan=True)
        assert_same_bits(q, nearest_bits(scaled, dtype))


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_rowwise"), ids=lambda c: c.name)
def test_row_casts(case: Case) -> None:
    x, dtype, power_2, *infinity_is_nan = case.make()
    width = max(x.shape[1], 1)
    scaled, inverse = expected_blocks(x.float(), dtype, 1, width, power_2)
    if infinity_is_nan:
        inverse = torch.where(holds_infinity(x, 1, width), torch.nan, inverse)
    for kernel in (reference.quantize_rowwise, torch.ops.fp8serve.quantize_rowwise):
        q, scale_inv = kernel(*case.make())
        torch.testing.assert_close(scale_inv, inverse, rtol=0, atol=0, equal_nan=True)
        assert_same_bits(q, nearest_bits(scaled, dtype))
