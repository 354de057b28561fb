"""Fake kernels, which give torch.compile the shapes of results, and test inputs that several ops share.

The inputs of casts have another magnitude in every tile, so that a wrong scale is detected. They include zeros,
subnormals, limits, infinities, NaN, ragged edges, and empty and non-contiguous tensors.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import E8M0, FLT_MAX, MX_BLOCK, blocks, saturating_cast
from fp8serve.fp8.ops.registry import Case


def dense_like(x: Tensor) -> Tensor:
    """Returns an uninitialized contiguous tensor of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_like_first(x: Tensor, *rest: Any, **options: Any) -> Tensor:
    """The fake kernel of an op whose result has the shape and dtype of its first argument."""
    return dense_like(x)


def fake_like_last(*args: Any) -> Tensor:
    """The fake kernel of an op whose result has the shape and dtype of its last argument."""
    return dense_like(args[-1])


def fake_cast(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The fake kernel of an op (x, ..., dtype) -> (quantized data of x's shape, scalar)."""
    return torch.empty(x.shape, dtype=rest[-1], device=x.device), x.new_empty((), dtype=torch.float32)


def fake_nothing(*args: Any) -> None:
    """The fake kernel of an op that returns nothing and writes into its arguments."""
    return


def random_mx_scales(rows: int, cols: int, seed: int) -> Tensor:
    """Returns random E8M0 scales near 1, a far smaller block in each row, and a row of the smallest scales."""
    noise = torch.Generator().manual_seed(seed)
    codes = torch.randint(115, 135, (rows, blocks(cols, MX_BLOCK)), generator=noise)
    codes[:, :1] -= torch.randint(0, 100, (rows, min(1, codes.shape[1])), generator=noise)
    codes[-1:] = codes[-1:] - 115
    return codes.clamp(min=0).to(torch.uint8).view(E8M0)


def tiled_noise(rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Returns noise whose magnitude differs by up to 2^12 between 16x16 tiles, so that blocks have different scales."""
    noise = torch.Generator().manual_seed(seed)
    magnitude = torch.exp2(torch.randint(-6, 7, (-(-rows // 16), -(-cols // 16)), generator=noise).float())
    spread = magnitude.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :cols]
    return (torch.randn(rows, cols, generator=noise) * spread).to(dtype)


def edge_values(dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns zeros of both signs, subnormals, values near the limits of both formats, infinities and NaN."""
    edges = [
        0.0,
        1e-45,
        1e-40,
        2.0**-10,
        2.0**-9,
        2.0**-17,
        447.0,
        448.0,
        464.0,
        465.0,
        57344.0,
        61439.0,
        61440.0,
        FLT_MAX,
    ]
    row = torch.tensor([*edges, torch.inf, torch.nan])
    return torch.stack([row, -row, row.roll(3), torch.zeros(16), torch.full((16,), torch.nan), row * 1e-30]).to(dtype)


def random_normal(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns normally distributed numbers [rows, cols]."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_fp8(rows: int, cols: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns `tiled_noise`, cast to FP8."""
    return saturating_cast(tiled_noise(rows, cols, seed=seed), dtype)


def grid_cases(name: str, make: Callable[..., tuple[Any, ...]], *axes: Iterable[Any]) -> list[Case]:
    """Returns a case `make(*values)` for every combination of values of the axes; `name` is their format string."""
    return [Case(name.format(*values), partial(make, *values)) for values in product(*axes)]


def row_cases(case: Callable[[torch.dtype, int, int], tuple[Any, ...]]) -> list[Case]:
    """Returns cases of `case(dtype, rows, cols)` in BF16 and FP32, with a few rows and with none."""
    shapes = ((3, 64), (5, 70), (0, 16))
    return grid_cases("{} {}", lambda dtype, shape: case(dtype, *shape), (torch.bfloat16, torch.float32), shapes)


def gradient_cases(case: Callable[[torch.dtype, int, int], tuple[Any, ...]]) -> list[Case]:
    """Returns the cases of a gradient op: the gradient of the output, and then the arguments of the op."""
    return row_cases(lambda dtype, rows, cols: (random_normal(rows, cols, dtype, 7), *case(dtype, rows, cols)))
