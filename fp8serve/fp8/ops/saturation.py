"""Casts of served inputs, which count what they cut off: a served model watches its calibrated ranges by them."""

from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from fp8serve.fp8.ops.activation import silu_mul
from fp8serve.fp8.ops.arithmetic import CUT_OFF
from fp8serve.fp8.ops.gemm import mm_case
from fp8serve.fp8.ops.inputs import dense_like, normal
from fp8serve.fp8.ops.norm import rms_norm
from fp8serve.fp8.ops.registry import Case, define, reference

E4M3 = torch.float8_e4m3fn
_Cast = tuple[Tensor, Tensor]  # FP8 data and their amax


def _source(x: Tensor, other: Tensor | None, eps: float | None) -> Tensor:
    if other is None:
        return x
    return silu_mul(x, other) if eps is None else rms_norm(x, other, eps)


def _watched(ops: Any) -> Any:
    """quantize_watched by the casts of `ops`."""

    def quantize_watched(
        x: Tensor,
        other: Tensor | None,
        eps: float | None,
        scale: Tensor,
        seen: Tensor,
        saturated: Tensor,
        rows: Tensor | None,
    ) -> Tensor:
        """An input [T, K] cast to E4M3 by scale []: x itself, rms_norm(x, other, eps), or, without eps, silu_mul(x,
        other). seen FP32 [] rises to its amax, saturated int64 [] by the number of elements that were cut off among the
        first `rows` int64 [], None for all."""
        q, amax = _cast(ops, x, other, eps, scale)
        _count(x, other, eps, scale, amax, seen, saturated, rows)
        return q

    return quantize_watched


def _count(
    x: Tensor,
    other: Tensor | None,
    eps: float | None,
    scale: Tensor,
    amax: Tensor,
    seen: Tensor,
    saturated: Tensor,
    rows: Tensor | None,
) -> None:
    torch.fmax(seen, amax, out=seen)  # a NaN is not a magnitude
    limit = CUT_OFF[E4M3]
    if amax.device.type == "cpu" and not bool(amax * scale > limit):
        return
    cut = (_source(x, other, eps).float() * scale).abs() > limit
    if rows is not None:
        cut = cut & (torch.arange(x.shape[0], device=x.device) < rows).unsqueeze(1)
    saturated += cut.sum()


def _cast(ops: Any, x: Tensor, other: Tensor | None, eps: float | None, scale: Tensor) -> _Cast:
    if other is None:
        return cast(_Cast, ops.quantize(x, scale, E4M3))
    if eps is None:
        return cast(_Cast, ops.silu_mul_quantize(x, other, scale, E4M3))
    return cast(_Cast, ops.rms_norm_quantize(x, other, eps, scale, E4M3))


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty(x.shape, dtype=E4M3, device=x.device)


def _watch_case(
    rows: int, cols: int, source: str, dtype: torch.dtype, scale: float, live: int | None
) -> tuple[Any, ...]:
    """Sources of one kind (plain, norm, gated) in non-adjacent rows."""
    x, up = torch.chunk(normal(rows, 2 * cols, dtype, 1), 2, 1)
    other, eps = {"plain": (None, None), "norm": (normal(1, cols, dtype, 2)[0], 1e-5), "gated": (up, None)}[source]
    counters = torch.tensor(0.5), torch.tensor(5)
    return x, other, eps, torch.tensor(scale), *counters, None if live is None else torch.tensor(live)


def _watch_cases() -> list[Case]:
    sizes, dtypes = ((3, 64), (70, 130), (130, 1032), (0, 16)), (torch.float32, torch.bfloat16, torch.float16)
    grid = product(sizes, ("plain", "norm", "gated"), dtypes, (1.0, 230.0), (None, 2))
    return [Case(f"{s} {k} {d} scale {f} rows {n}", partial(_watch_case, *s, k, d, f, n)) for s, k, d, f, n in grid]


define(
    "quantize_watched(Tensor x, Tensor? other, float? eps, Tensor scale, Tensor(a!) seen, Tensor(b!) saturated,"
    " Tensor? rows) -> Tensor",
    _watched(reference),
    composition=_watched(torch.ops.fp8serve),
    fake=_fake,
    cases=_watch_cases,
)


def _multiplied(ops: Any) -> Any:
    """watched_mm_add as a sequence of `ops`."""

    def watched_mm_add(
        x: Tensor,
        scale: Tensor,
        seen: Tensor,
        saturated: Tensor,
        rows: Tensor | None,
        b: Tensor,
        scale_inv: Tensor,
        b_scale_inv: Tensor,
        bias: Tensor | None,
        residual: Tensor,
    ) -> Tensor:
        """residual [M, N] + what x [M, K], cast by `quantize_watched`, gives as scaled_mm_add's a, by scale_inv []."""
        q = ops.quantize_watched(x, None, None, scale, seen, saturated, rows)
        return ops.scaled_mm_add(q, b, scale_inv, b_scale_inv, bias, residual)  # type: ignore[no-any-return]

    return watched_mm_add


def _fake_mm_add(*args: Any) -> Tensor:
    return dense_like(args[-1])


def _mm_add_case(
    sizes: tuple[int, int, int], by: str, dtype: torch.dtype, scale: float, live: int | None
) -> tuple[Any, ...]:
    rows, n, k = sizes
    _, b, _, b_scale_inv, bias, _ = mm_case(rows, n, k, E4M3, E4M3, ("tensor", by), dtype)
    scales, counters = (torch.tensor(scale), torch.tensor(1 / scale)), (torch.tensor(0.5), torch.tensor(5))
    live_rows = None if live is None else torch.tensor(live)
    x, residual = normal(rows, k, dtype, 1), normal(rows, n, dtype, 3)
    return x, scales[0], *counters, live_rows, b, scales[1], b_scale_inv, bias, residual


def _mm_add_cases() -> list[Case]:
    """Of few rows, of more than are cast where they are multiplied, and of K that is no multiple of 16."""
    sizes = ((1, 40, 1200), (5, 11, 64), (12, 24, 272), (33, 16, 144), (64, 9, 128), (70, 24, 144), (3, 11, 70))
    grid = product(sizes, ("tensor", "row", "128x128"), (torch.bfloat16, torch.float32), ((64.0, None), (250.0, 2)))
    return [
        Case(f"{s} {by} {d} scale {f} rows {n}", partial(_mm_add_case, s, by, d, f, n)) for s, by, d, (f, n) in grid
    ]


define(
    "watched_mm_add(Tensor x, Tensor scale, Tensor(a!) seen, Tensor(b!) saturated, Tensor? rows, Tensor b,"
    " Tensor scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor residual) -> Tensor",
    _multiplied(reference),
    composition=_multiplied(torch.ops.fp8serve),
    fake=_fake_mm_add,
    cases=_mm_add_cases,
    kernels=("cuda",),
)
