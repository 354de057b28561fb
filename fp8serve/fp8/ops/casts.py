"""Casts to FP8 with a given scale, or with scales computed per tensor, per row or per block; and transposes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import (
    BLOCK,
    FLT_MAX,
    FP8_MAX,
    amax,
    blocks,
    expand,
    inverse_scale,
    saturating_cast,
    scale_from_amax,
)
from fp8serve.fp8.ops.inputs import edge_values, fake_cast, grid_cases, random_fp8, tiled_noise
from fp8serve.fp8.ops.registry import Case, define, define_composed

_INPUTS: dict[str, Callable[[], Tensor]] = {  # functions that create the inputs on which every cast is tested
    "tiles 64x256": lambda: tiled_noise(64, 256),
    "tiles bf16 ragged 67x300": lambda: tiled_noise(67, 300, torch.bfloat16),
    "fp16 3x129": lambda: tiled_noise(3, 129, torch.float16),
    "hostile": edge_values,
    "hostile bf16": lambda: edge_values(torch.bfloat16),
    "transposed view": lambda: tiled_noise(40, 20).t(),
    "strided view": lambda: tiled_noise(20, 80)[:, ::2],
    "one element": lambda: torch.tensor([[-3.0]]),
    "no rows": lambda: torch.empty(0, 128),
    "all zeros": lambda: torch.zeros(130, 130, dtype=torch.bfloat16),
    "tiny": lambda: tiled_noise(5, 140) * 1e-38,
}


def fixed_scale_cases() -> list[Case]:
    def make(name: str, dtype: torch.dtype, scale: float) -> tuple[Any, ...]:
        return _INPUTS[name](), torch.tensor(scale), dtype

    return grid_cases("{}, {}, scale {}", make, _INPUTS, FP8_MAX, (1.0, 7.3, 1e-3, FLT_MAX))


def _cast_cases(*rest: tuple[Any, ...]) -> list[Case]:
    def make(name: str, dtype: torch.dtype, extra: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_INPUTS[name](), dtype, *extra)

    return grid_cases("{}, {}, {}", make, _INPUTS, FP8_MAX, rest)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes x by `scale` []; returns (q, amax of x)."""
    return saturating_cast(x.float() * scale, dtype), amax(x)


define(
    "quantize(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    quantize,
    fake=fake_cast,
    cases=fixed_scale_cases,
    recipes=("delayed",),
)


def quantize_transpose(ops: Any, x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes x [M, K] by `scale` []; returns (q [M, K], its transpose [K, M], amax of x). A kernel reads x once."""
    q, largest = ops.quantize(x, scale, dtype)
    return q, q.t().clone(memory_format=torch.contiguous_format), largest


def _fake_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, amax = fake_cast(x, scale, dtype)
    return q, q.new_empty((x.shape[1], x.shape[0])), amax


define_composed(
    "quantize_transpose(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor q_t, Tensor amax)",
    quantize_transpose,
    fake=_fake_transpose,
    cases=fixed_scale_cases,
)


def quantize_current(
    x: Tensor, dtype: torch.dtype, power_2: bool, infinity_is_nan: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantizes x by its amax; returns (q, scale_inv []).

    scale_inv is NaN if the amax is infinite and `infinity_is_nan` is set.
    """
    largest = amax(x)
    scale = scale_from_amax(largest, FP8_MAX[dtype], power_2)
    return saturating_cast(x.float() * scale, dtype), inverse_scale(scale, largest, infinity_is_nan)


def _fake_current(x: Tensor, dtype: torch.dtype, *rest: bool) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty((), dtype=torch.float32)


define(
    "quantize_current(Tensor x, ScalarType dtype, bool power_2, bool infinity_is_nan=False)"
    " -> (Tensor q, Tensor scale_inv)",
    quantize_current,
    fake=_fake_current,
    cases=partial(_cast_cases, (False,), (True,), (False, True)),
    recipes=("current",),
)


def quantize_rowwise(
    x: Tensor, dtype: torch.dtype, power_2: bool, infinity_is_nan: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantizes x [M, K] by the amax of each row; returns (q, scale_inv [M, 1]). See `quantize_current`."""
    largest = amax(x, (1,)).unsqueeze(1)
    scale = scale_from_amax(largest, FP8_MAX[dtype], power_2)
    return saturating_cast(x.float() * scale, dtype), inverse_scale(scale, largest, infinity_is_nan)


def _fake_rowwise(x: Tensor, dtype: torch.dtype, *rest: bool) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty((x.shape[0], 1), dtype=torch.float32)


define(
    "quantize_rowwise(Tensor x, ScalarType dtype, bool power_2, bool infinity_is_nan=False)"
    " -> (Tensor q, Tensor scale_inv)",
    quantize_rowwise,
    fake=_fake_rowwise,
    cases=partial(_cast_cases, (False,), (True,), (False, True)),
    recipes=("rowwise",),
)


def quantize_block(
    x: Tensor, dtype: torch.dtype, block_rows: int, power_2: bool, infinity_is_nan: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantizes x [M, K] by the amax of each block of block_rows x 128; partial blocks are padded with zeros.

    `infinity_is_nan` is as in `quantize_current`.
    """
    rows, cols = x.shape
    padded = F.pad(x, (0, -cols % BLOCK, 0, -rows % block_rows))
    tiled = padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // BLOCK, BLOCK)
    largest = amax(tiled, (1, 3))
    scale = scale_from_amax(largest, FP8_MAX[dtype], power_2)
    return saturating_cast(x.float() * expand(scale, rows, cols), dtype), inverse_scale(scale, largest, infinity_is_nan)


def _fake_block(x: Tensor, dtype: torch.dtype, block_rows: int, *rest: bool) -> tuple[Tensor, Tensor]:
    shape = (-(-x.shape[0] // block_rows), blocks(x.shape[1]))
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(shape, dtype=torch.float32)


define(
    "quantize_block(Tensor x, ScalarType dtype, int block_rows, bool power_2, bool infinity_is_nan=False)"
    " -> (Tensor q, Tensor scale_inv)",
    quantize_block,
    fake=_fake_block,
    cases=partial(_cast_cases, (1, False), (128, False), (1, True), (1, False, True), (128, False, True)),
    recipes=("block",),
)


def transpose_fp8(q: Tensor) -> Tensor:
    """Returns the contiguous transpose [K, M] of FP8 q [M, K]."""
    return q.t().clone(memory_format=torch.contiguous_format)


def _fake_transposed(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


def _transpose_case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    return (random_fp8(*shape, dtype, 1),)


_ODD_SHAPES = ((17, 33), (16, 7), (0, 8), (3, 0))
define(
    "transpose_fp8(Tensor q) -> Tensor",
    transpose_fp8,
    fake=_fake_transposed,
    cases=partial(grid_cases, "{} {}", _transpose_case, ((128, 256), (144, 48), *_ODD_SHAPES), FP8_MAX),
)


def transpose_half(x: Tensor) -> Tensor:
    """Returns the contiguous transpose [K, M] of BF16 or FP16 x [M, K]."""
    return x.t().clone(memory_format=torch.contiguous_format)


def _half_case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    return (tiled_noise(*shape, dtype, 1),)


_HALF_DTYPES = (torch.bfloat16, torch.float16)
define(
    "transpose_half(Tensor x) -> Tensor",
    transpose_half,
    fake=_fake_transposed,
    cases=partial(grid_cases, "{} {}", _half_case, ((72, 264), (128, 64), *_ODD_SHAPES), _HALF_DTYPES),
)
