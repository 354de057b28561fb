"""`fast_amax` equals `amax` for all values, and `is_finite` finds every value that is not finite."""

import math

import pytest
import torch
from torch import Tensor

from fp8serve.engine.weights import _is_finite
from fp8serve.fp8.ops.arithmetic import amax, fast_amax, is_finite

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
VALUES = {
    "plain": [0.5, -3.0, 2.0],
    "zeros": [0.0, -0.0],
    "a NaN, which does not count": [1.0, math.nan, -2.0],
    "only NaN": [math.nan],
    "an infinity": [-math.inf, 1.0],
    "NaN and infinity": [math.nan, math.inf],
    "no values": [],
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_fast_amax_has_the_bits_of_amax(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    actual = fast_amax(x)
    assert actual.dtype == torch.float32
    assert actual.shape == ()
    assert torch.equal(actual.view(torch.int32), amax(x).view(torch.int32))


def test_fast_amax_of_a_transposed_matrix_that_requires_grad() -> None:
    x = torch.randn(5, 7, requires_grad=True).t()
    assert torch.equal(fast_amax(x), amax(x).detach())


def test_fast_amax_can_be_traced() -> None:
    def twice(x: Tensor) -> Tensor:
        return fast_amax(x) * 2

    x = torch.tensor([1.0, math.nan, -3.0])
    assert torch.equal(torch.compile(twice, backend="eager", fullgraph=True)(x), torch.tensor(6.0))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2])
def test_is_finite_finds_one_element_at_any_place(dtype: torch.dtype) -> None:
    """Also NaN with any sign and payload; a row of 70 has whole vectors and a rest."""
    extremes = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0, -0.0]).to(dtype)
    row = extremes.repeat(18)[:70]
    assert is_finite(row)
    assert is_finite(row[:0])
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    codes = torch.arange(256 if bits is torch.uint8 else 2**16).to(bits)
    values = (codes << 16 if bits is torch.int32 else codes).view(dtype)
    invalid = values[~values.float().isfinite()].view(bits)
    for code in invalid[:: max(1, len(invalid) // 4)]:
        for place in (0, 31, 63, 64, 69):
            changed = row.clone()
            changed.view(bits)[place] = code
            assert not is_finite(changed), (code, place)
    assert not is_finite(torch.full((3, 8), torch.nan).to(dtype).t())


def test_a_weight_in_e4m3_is_checked_by_its_codes() -> None:
    finite = [code for code in range(256) if code not in (0x7F, 0xFF)]
    assert _is_finite(torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert _is_finite(torch.empty(0, dtype=torch.float8_e4m3fn))
    for nan in (0x7F, 0xFF):
        assert not _is_finite(torch.tensor([*finite, nan, 0], dtype=torch.uint8).view(torch.float8_e4m3fn))
