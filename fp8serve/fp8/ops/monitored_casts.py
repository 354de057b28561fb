"""Casts of inputs that record amaxes and count saturated elements, with which a server monitors calibrated scales."""

from typing import Any, cast

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import SATURATION_LIMIT
from fp8serve.fp8.ops.gemm import mm_case
from fp8serve.fp8.ops.inputs import fake_like_last, grid_cases, random_normal
from fp8serve.fp8.ops.registry import Case, define_composed

E4M3 = torch.float8_e4m3fn
_Cast = tuple[Tensor, Tensor]  # FP8 data and their amax


def _compute_input(ops: Any, x: Tensor, other: Tensor | None, eps: float | None) -> Tensor:
    if other is None:
        return x
    return cast(Tensor, ops.silu_mul(x, other) if eps is None else ops.rms_norm(x, other, eps))


def quantize_watched(
    ops: Any,
    x: Tensor,
    other: Tensor | None,
    eps: float | None,
    scale: Tensor,
    running_amax: Tensor,
    saturated: Tensor,
    rows: Tensor | None,
) -> Tensor:
    """Casts an input [T, K] to E4M3 by scale [] and records its amax and the number of saturated elements.

    The input is x, or rms_norm(x, other, eps), or silu_mul(x, other) if eps is None. `running_amax`, FP32 [], rises
    to the amax, and `saturated`, int64 [], by the number of saturated elements. Both count only the first `rows`
    rows, int64 [], because the others are padding. If `rows` is None, there is no padding.
    """
    q, amax = _cast(ops, x, other, eps, scale)
    _count(ops, x, other, eps, scale, amax, running_amax, saturated, rows)
    return q


def _count(
    ops: Any,
    x: Tensor,
    other: Tensor | None,
    eps: float | None,
    scale: Tensor,
    amax: Tensor,
    running_amax: Tensor,
    saturated: Tensor,
    rows: Tensor | None,
) -> None:
    limit = SATURATION_LIMIT[E4M3]
    if rows is not None and x.numel() > 0:
        magnitudes = _compute_input(ops, x, other, eps).float().abs()
        is_live = (torch.arange(x.shape[0], device=x.device) < rows).unsqueeze(1)
        magnitudes = torch.where(is_live & ~magnitudes.isnan(), magnitudes, 0.0)
        torch.fmax(running_amax, magnitudes.amax(), out=running_amax)
        saturated += (magnitudes * scale > limit).sum()
        return
    torch.fmax(running_amax, amax, out=running_amax)  # ignores NaN
    if amax.device.type == "cpu" and not bool(amax * scale > limit):
        return
    saturated += ((_compute_input(ops, x, other, eps).float() * scale).abs() > limit).sum()


def _cast(ops: Any, x: Tensor, other: Tensor | None, eps: float | None, scale: Tensor) -> _Cast:
    if other is None:
        return cast(_Cast, ops.quantize(x, scale, E4M3))
    if eps is None:
        return cast(_Cast, ops.silu_mul_quantize(x, other, scale, E4M3))
    return cast(_Cast, ops.rms_norm_quantize(x, other, eps, scale, E4M3))


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty(x.shape, dtype=E4M3, device=x.device)


def _watch_case(
    shape: tuple[int, int], source: str, dtype: torch.dtype, scale: float, live_rows: int | None
) -> tuple[Any, ...]:
    """Arguments with rows that are not adjacent in memory; `source` is "plain", "norm" or "gated"."""
    rows, cols = shape
    x, up = torch.chunk(random_normal(rows, 2 * cols, dtype, 1), 2, 1)
    weight = random_normal(1, cols, dtype, 2)[0]
    other, eps = {"plain": (None, None), "norm": (weight, 1e-5), "gated": (up, None)}[source]
    counters = torch.tensor(0.5), torch.tensor(5)
    return x, other, eps, torch.tensor(scale), *counters, None if live_rows is None else torch.tensor(live_rows)


def _watch_cases() -> list[Case]:
    sizes, dtypes = ((3, 64), (70, 130), (130, 1032), (0, 16)), (torch.float32, torch.bfloat16, torch.float16)
    sources, scales, rows = ("plain", "norm", "gated"), (1.0, 230.0), (None, 2)
    return grid_cases("{} {} {} scale {} rows {}", _watch_case, sizes, sources, dtypes, scales, rows)


define_composed(
    "quantize_watched(Tensor x, Tensor? other, float? eps, Tensor scale, Tensor(a!) running_amax, Tensor(b!) saturated,"
    " Tensor? rows) -> Tensor",
    quantize_watched,
    fake=_fake,
    cases=_watch_cases,
)


def watched_mm_add(
    ops: Any,
    x: Tensor,
    scale: Tensor,
    running_amax: Tensor,
    saturated: Tensor,
    rows: Tensor | None,
    b: Tensor,
    scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    residual: Tensor,
) -> Tensor:
    """Casts x [M, K] with quantize_watched and returns scaled_mm_add of the result, with scale_inv [] for a."""
    q = ops.quantize_watched(x, None, None, scale, running_amax, saturated, rows)
    return ops.scaled_mm_add(q, b, scale_inv, b_scale_inv, bias, residual)  # type: ignore[no-any-return]


def _mm_add_case(
    size: tuple[int, int, int], kind: str, dtype: torch.dtype, options: tuple[float, int | None]
) -> tuple[Any, ...]:
    (rows, n, k), (scale, live_rows) = size, options
    _, b, _, b_scale_inv, bias, _ = mm_case(rows, n, k, E4M3, E4M3, ("tensor", kind), dtype)
    scales, counters = (torch.tensor(scale), torch.tensor(1 / scale)), (torch.tensor(0.5), torch.tensor(5))
    counted = None if live_rows is None else torch.tensor(live_rows)
    x, residual = random_normal(rows, k, dtype, 1), random_normal(rows, n, dtype, 3)
    return x, scales[0], *counters, counted, b, scales[1], b_scale_inv, bias, residual


def _mm_add_cases() -> list[Case]:
    """Cases with few rows, with more rows than the fused kernel casts, and with a K that is no multiple of 16."""
    sizes = ((1, 40, 1200), (5, 11, 64), (12, 24, 272), (33, 16, 144), (64, 9, 128), (70, 24, 144), (3, 11, 70))
    kinds, dtypes = ("tensor", "row", "128x128"), (torch.bfloat16, torch.float32)
    name = "{0} {1} {2} scale {3[0]} rows {3[1]}"
    return grid_cases(name, _mm_add_case, sizes, kinds, dtypes, ((64.0, None), (250.0, 2)))


define_composed(
    "watched_mm_add(Tensor x, Tensor scale, Tensor(a!) running_amax, Tensor(b!) saturated, Tensor? rows, Tensor b,"
    " Tensor scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor residual) -> Tensor",
    watched_mm_add,
    fake=fake_like_last,
    cases=_mm_add_cases,
    kernel_devices=("cuda",),
)


def stored_gated_mm(
    ops: Any,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    running_amax: Tensor,
    saturated: Tensor,
    rows: Tensor | None,
    *norm: Any,
) -> Tensor:
    """Multiplies a [M, K] by b [2 N, K] as stored_mm does, with BF16 output. The halves of the output are gate and
    up. Returns quantize_watched of silu_mul(gate, up) [M, N]."""
    gate, up = ops.stored_mm(a, b, a_scale_inv, b_scale_inv, bias, torch.bfloat16, *norm).chunk(2, 1)
    return ops.quantize_watched(gate, up, None, scale, running_amax, saturated, rows)  # type: ignore[no-any-return]


def _fake_gated(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0] // 2), dtype=E4M3)


def _gated_case(
    shape: tuple[int, int, int], kinds: tuple[str, str], options: tuple[float, int | None]
) -> tuple[Any, ...]:
    scale, rows = options
    *arguments, _, _ = mm_case(*shape, E4M3, E4M3, kinds, torch.bfloat16)
    bias = torch.linspace(-2, 2, shape[1]).bfloat16() if rows is None else None
    counters = torch.tensor(scale), torch.tensor(0.25), torch.tensor(7)
    return *arguments, bias, *counters, None if rows is None else torch.tensor(rows)


def _gated_cases() -> list[Case]:
    shapes = [(1, 64, 144), (5, 96, 1200), (16, 32, 2064), (3, 40, 208)]
    kinds = [("tensor", "row"), ("tensor", "tensor")]
    return grid_cases("{0} {1} scale {2[0]} rows {2[1]}", _gated_case, shapes, kinds, ((0.02, None), (8.0, 2)))


define_composed(
    "stored_gated_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor scale,"
    " Tensor(a!) running_amax, Tensor(b!) saturated, Tensor? rows, Tensor? norm_weight=None, float? eps=None,"
    " Tensor? norm_scale=None, Tensor(c!)? norm_amax=None, Tensor(d!)? norm_saturated=None,"
    " Tensor? norm_rows=None) -> Tensor",
    stored_gated_mm,
    fake=_fake_gated,
    cases=_gated_cases,
    kernel_devices=("cuda",),
)
