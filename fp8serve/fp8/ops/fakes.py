"""Fake kernels that several ops share: the shapes of results, for torch.compile, without their values."""

from typing import Any

import torch
from torch import Tensor


def dense_like(x: Tensor) -> Tensor:
    """A contiguous tensor of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_like_first(x: Tensor, *rest: Any) -> Tensor:
    """For an op whose result is like its first argument."""
    return dense_like(x)


def fake_cast(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """For an op (x, ..., dtype) -> (quantized data of x's shape, a number)."""
    return torch.empty(x.shape, dtype=rest[-1], device=x.device), x.new_empty((), dtype=torch.float32)


def fake_nothing(*args: Any) -> None:
    """For an op that returns nothing and writes into its arguments."""
    return
