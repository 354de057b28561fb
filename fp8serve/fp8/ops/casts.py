"""Casts to FP8: by a given scale, by the tensor's own, by row and by block; and transposes."""

from collections.abc import Callable
from functools import partial
from itertools import product
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
    inverse_of,
    saturate,
    scale_from_amax,
)
from fp8serve.fp8.ops.inputs import fake_cast, hostile, quantized, tiles
from fp8serve.fp8.ops.registry import Case, define


def _inputs() -> dict[str, Callable[[], Tensor]]:
    """The tensors every cast is tried on."""
    return {
        "tiles 64x256": lambda: tiles(64, 256),
        "tiles bf16 ragged 67x300": lambda: tiles(67, 300, torch.bfloat16),
        "fp16 3x129": lambda: tiles(3, 129, torch.float16),
        "hostile": hostile,
        "hostile bf16": lambda: hostile(torch.bfloat16),
        "transposed view": lambda: tiles(40, 20).t(),
        "strided view": lambda: tiles(20, 80)[:, ::2],
        "one element": lambda: torch.tensor([[-3.0]]),
        "no rows": lambda: torch.empty(0, 128),
        "all zeros": lambda: torch.zeros(130, 130, dtype=torch.bfloat16),
        "tiny": lambda: tiles(5, 140) * 1e-38,
    }


def fixed_scale_cases() -> list[Case]:
    def make(x: Callable[[], Tensor], dtype: torch.dtype, scale: float) -> tuple[Any, ...]:
        return x(), torch.tensor(scale), dtype

    grid = product(_inputs().items(), FP8_MAX, (1.0, 7.3, 1e-3, FLT_MAX))
    return [Case(f"{name}, {dtype}, scale {scale}", partial(make, x, dtype, scale)) for (name, x), dtype, scale in grid]


def _cast_cases(*rest: tuple[Any, ...]) -> list[Case]:
    def make(x: Callable[[], Tensor], dtype: torch.dtype, extra: tuple[Any, ...]) -> tuple[Any, ...]:
        return (x(), dtype, *extra)

    grid = product(_inputs().items(), FP8_MAX, rest)
    return [Case(f"{name}, {dtype}, {extra}", partial(make, x, dtype, extra)) for (name, x), dtype, extra in grid]


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize by a given scale []: (q, amax of x)."""
    return saturate(x.float() * scale, dtype), amax(x)


define(
    "quantize(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    quantize,
    fake=fake_cast,
    cases=fixed_scale_cases,
    recipes=("delayed",),
)


def quantize_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [M, K] by a given scale []: (q [M, K], its transpose [K, M], amax of x), all in one read of x."""
    q, largest = quantize(x, scale, dtype)
    return q, q.t().clone(memory_format=torch.contiguous_format), largest


def _composed_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, amax = torch.ops.fp8serve.quantize(x, scale, dtype)
    return q, q.t().clone(memory_format=torch.contiguous_format), amax


def _fake_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, amax = fake_cast(x, scale, dtype)
    return q, q.new_empty((x.shape[1], x.shape[0])), amax


define(
    "quantize_transpose(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor q_t, Tensor amax)",
    quantize_transpose,
    composition=_composed_transpose,
    fake=_fake_transpose,
    cases=fixed_scale_cases,
)


def quantize_current(
    x: Tensor, dtype: torch.dtype, power_2: bool, infinity_is_nan: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize by the tensor's own amax: (q, scale_inv []). infinity_is_nan: an infinite amax makes scale_inv NaN."""
    largest = amax(x)
    scale = scale_from_amax(largest, FP8_MAX[dtype], power_2)
    return saturate(x.float() * scale, dtype), inverse_of(scale, largest, infinity_is_nan)


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
    """Quantize x [M, K] by the amax of each row: (q, scale_inv [M, 1]). infinity_is_nan: as in `quantize_current`."""
    largest = amax(x, (1,)).unsqueeze(1)
    scale = scale_from_amax(largest, FP8_MAX[dtype], power_2)
    return saturate(x.float() * scale, dtype), inverse_of(scale, largest, infinity_is_nan)


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
    """Quantize x [M, K] by the amax of each block of block_rows x 128, ragged edges padded with zeros.

    infinity_is_nan: as in `quantize_current`.
    """
    rows, cols = x.shape
    padded = F.pad(x, (0, -cols % BLOCK, 0, -rows % block_rows))
    tiled = padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // BLOCK, BLOCK)
    largest = amax(tiled, (1, 3))
    scale = scale_from_amax(largest, FP8_MAX[dtype], power_2)
    return saturate(x.float() * expand(scale, rows, cols), dtype), inverse_of(scale, largest, infinity_is_nan)


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
    """Quantized q [M, K] as [K, M], contiguous."""
    return q.t().clone(memory_format=torch.contiguous_format)


def _fake_transposed(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


def _turned_case(rows: int, cols: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (quantized(rows, cols, dtype, 1),)


def _turned_cases() -> list[Case]:
    shapes = ((128, 256), (144, 48), (17, 33), (16, 7), (0, 8), (3, 0))
    return [Case(f"{s} {d}", partial(_turned_case, *s, d)) for s, d in product(shapes, FP8_MAX)]


define(
    "transpose_fp8(Tensor q) -> Tensor",
    transpose_fp8,
    composition=transpose_fp8,
    fake=_fake_transposed,
    cases=_turned_cases,
)


def transpose_half(x: Tensor) -> Tensor:
    """x BF16 or FP16 [M, K] as [K, M], contiguous."""
    return x.t().clone(memory_format=torch.contiguous_format)


def _half_case(rows: int, cols: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (tiles(rows, cols, dtype, 1),)


def _half_cases() -> list[Case]:
    shapes = ((72, 264), (128, 64), (17, 33), (16, 7), (0, 8), (3, 0))
    return [Case(f"{s} {d}", partial(_half_case, *s, d)) for s, d in product(shapes, (torch.bfloat16, torch.float16))]


define(
    "transpose_half(Tensor x) -> Tensor",
    transpose_half,
    composition=transpose_half,
    fake=_fake_transposed,
    cases=_half_cases,
)
