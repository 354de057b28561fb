"""`fast_amax` equals `amax` for all values."""

import math

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import amax, fast_amax

VALUES = {
    "plain": [0.5, -3.0, 2.0],
    "zeros": [0.0, -0.0],
    "a NaN, which does not count": [1.0, math.nan, -2.0],
    "only NaN": [math.nan],
    "an infinity": [-math.inf, 1.0],
    "NaN and infinity": [math.nan, math.inf],
    "no values": [],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
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
