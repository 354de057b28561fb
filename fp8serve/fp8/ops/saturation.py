"""How much of an input a cast to E4M3 cut off: a served model watches its calibrated ranges with it."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.activation import silu_mul
from fp8serve.fp8.ops.arithmetic import CUT_OFF, amax
from fp8serve.fp8.ops.fakes import fake_nothing
from fp8serve.fp8.ops.inputs import normal
from fp8serve.fp8.ops.norm import rms_norm
from fp8serve.fp8.ops.registry import Case, define


def _source(x: Tensor, other: Tensor | None, eps: float | None) -> Tensor:
    if other is None:
        return x
    return silu_mul(x, other) if eps is None else rms_norm(x, other, eps)


def count_saturated(
    x: Tensor,
    other: Tensor | None,
    eps: float | None,
    scale: Tensor,
    amax: Tensor,
    seen: Tensor,
    saturated: Tensor,
    rows: Tensor | None,
) -> None:
    """Watch an input [T, K] that was cast to E4M3 by scale []: x itself, rms_norm(x, other, eps), or, without eps,
    silu_mul(x, other). seen FP32 [] rises to its amax [], saturated int64 [] by the number of elements that were cut
    off among the first `rows` int64 [], None for all."""
    torch.fmax(seen, amax, out=seen)  # a NaN is no largest magnitude
    limit = CUT_OFF[torch.float8_e4m3fn]
    if amax.device.type == "cpu" and not bool(amax * scale > limit):
        return
    cut = (_source(x, other, eps).float() * scale).abs() > limit
    if rows is not None:
        cut = cut & (torch.arange(x.shape[0], device=x.device) < rows).unsqueeze(1)
    saturated += cut.sum()


def _watch_case(
    rows: int, cols: int, source: str, dtype: torch.dtype, scale: float, live: int | None
) -> tuple[Any, ...]:
    """Sources of one sort (plain, norm, gated) in rows that lie apart, and what their cast found."""
    x, up = torch.chunk(normal(rows, 2 * cols, dtype, 1), 2, 1)
    other, eps = {"plain": (None, None), "norm": (normal(1, cols, dtype, 2)[0], 1e-5), "gated": (up, None)}[source]
    y = x if other is None else silu_mul(x, other) if eps is None else rms_norm(x, other, eps)
    counters = torch.tensor(0.5), torch.tensor(5)
    return x, other, eps, torch.tensor(scale), amax(y), *counters, None if live is None else torch.tensor(live)


def _watch_cases() -> list[Case]:
    sizes, dtypes = ((3, 64), (70, 130), (130, 1032), (0, 16)), (torch.float32, torch.bfloat16, torch.float16)
    grid = product(sizes, ("plain", "norm", "gated"), dtypes, (1.0, 230.0), (None, 2))
    return [Case(f"{s} {k} {d} scale {f} rows {n}", partial(_watch_case, *s, k, d, f, n)) for s, k, d, f, n in grid]


define(
    "count_saturated(Tensor x, Tensor? other, float? eps, Tensor scale, Tensor amax, Tensor(a!) seen,"
    " Tensor(b!) saturated, Tensor? rows) -> ()",
    count_saturated,
    composition=count_saturated,
    fake=fake_nothing,
    cases=_watch_cases,
)
