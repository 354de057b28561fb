"""A norm or a gated activation, fused with a cast of its result.

An op equals the composition of its parts: it rounds the result of the norm or activation to the dtype of activations
before the cast. Kernels may differ from the reference only in the last bits in which the ops without a cast may differ
(elementwise.py).

The `_rows` ops compute scales from the rows of the result, for serving. The `_delayed` ops cast by a stored scale and
record the amax (`quantize_delayed`), for training on a GPU.

width          columns of a row that share a scale: 128, or 0 for all
power_2        whether scales are rounded down to a power of two
"""

from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import BLOCK, FP8_MAX, blocks
from fp8serve.fp8.ops.inputs import edge_values, grid_cases, tiled_noise
from fp8serve.fp8.ops.registry import Case, define_composed

E4M3 = torch.float8_e4m3fn
RowCast = tuple[Tensor, Tensor]  # q [M, K], scale_inv [M, 1] or [M, ceil(K / 128)]


def cast_rows(ops: Any, x: Tensor, width: int, power_2: bool) -> RowCast:
    """Casts x [M, K] with `ops`; returns (q, scale_inv [M, 1] or [M, ceil(K / 128)])."""
    if width == 0:
        return ops.quantize_rowwise(x, E4M3, power_2)  # type: ignore[no-any-return]
    return ops.quantize_block(x, E4M3, 1, power_2)  # type: ignore[no-any-return]


def rms_norm_quantize_rows(ops: Any, x: Tensor, weight: Tensor, eps: float, width: int, power_2: bool) -> RowCast:
    """Casts the rows of rms_norm(x), x [M, K]; returns (q, scale_inv)."""
    return cast_rows(ops, ops.rms_norm(x, weight, eps), width, power_2)


def silu_mul_quantize_rows(ops: Any, gate: Tensor, up: Tensor, width: int, power_2: bool) -> RowCast:
    """Casts the rows of silu_mul(gate, up), both [M, K]; returns (q, scale_inv)."""
    return cast_rows(ops, ops.silu_mul(gate, up), width, power_2)


def _fake_rows(x: Tensor, *rest: Any) -> RowCast:
    width = rest[-2]
    scales = (x.shape[0], 1 if width == 0 else blocks(x.shape[1]))
    return torch.empty(x.shape, dtype=E4M3, device=x.device), x.new_empty(scales, dtype=torch.float32)


def _norm_rows_case(dtype: torch.dtype, shape: tuple[int, int], width: int, power_2: bool) -> tuple[Any, ...]:
    return tiled_noise(*shape, dtype), torch.linspace(0.5, 2, shape[1]).to(dtype), 1e-6, width, power_2


def _gated_rows_case(dtype: torch.dtype, shape: tuple[int, int], width: int, power_2: bool) -> tuple[Any, ...]:
    return tiled_noise(*shape, dtype), tiled_noise(*shape, dtype, seed=1), width, power_2


def _rows_cases(case: Any) -> list[Case]:
    dtypes, shapes = (torch.float32, torch.bfloat16), ((5, 64), (33, 300), (0, 16))
    return grid_cases("{} {}, width {}, power of two {}", case, dtypes, shapes, (0, BLOCK), (False, True))


define_composed(
    "rms_norm_quantize_rows(Tensor x, Tensor weight, float eps, int width, bool power_2)"
    " -> (Tensor q, Tensor scale_inv)",
    rms_norm_quantize_rows,
    fake=_fake_rows,
    cases=partial(_rows_cases, _norm_rows_case),
    kernel_devices=("cpu",),
)
define_composed(
    "silu_mul_quantize_rows(Tensor gate, Tensor up, int width, bool power_2) -> (Tensor q, Tensor scale_inv)",
    silu_mul_quantize_rows,
    fake=_fake_rows,
    cases=partial(_rows_cases, _gated_rows_case),
    kernel_devices=("cpu",),
)


DelayedCast = tuple[Tensor, Tensor, Tensor]  # q [M, K], its transpose [K, M] or an empty tensor, scale_inv []
DelayedCasts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def rms_norm_quantize_delayed(
    ops: Any,
    x: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor,
    history: Tensor | None,
    dtype: torch.dtype,
    transpose: bool,
) -> DelayedCast:
    """Returns quantize_delayed of rms_norm(x, weight, eps)."""
    y = ops.rms_norm(x, weight, eps)
    return ops.quantize_delayed(y, scale, history, dtype, transpose, False)  # type: ignore[no-any-return]


def silu_mul_quantize_delayed(
    ops: Any, gate: Tensor, up: Tensor, scale: Tensor, history: Tensor | None, dtype: torch.dtype, transpose: bool
) -> DelayedCast:
    """Returns quantize_delayed of silu_mul(gate, up)."""
    y = ops.silu_mul(gate, up)
    return ops.quantize_delayed(y, scale, history, dtype, transpose, False)  # type: ignore[no-any-return]


def silu_mul_backward_quantize_delayed(
    ops: Any,
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_scale: Tensor,
    gate_history: Tensor | None,
    up_scale: Tensor,
    up_history: Tensor | None,
    dtype: torch.dtype,
    transpose: bool,
) -> DelayedCasts:
    """Returns quantize_delayed of both results of silu_mul_backward; an infinity makes their scale_inv NaN."""
    d_gate, d_up = ops.silu_mul_backward(grad, gate, up)
    return (
        *ops.quantize_delayed(d_gate, gate_scale, gate_history, dtype, transpose, True),
        *ops.quantize_delayed(d_up, up_scale, up_history, dtype, transpose, True),
    )


def _fake_delayed(x: Tensor, *rest: Any) -> DelayedCast:
    dtype, transpose = rest[-2:]
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    return q, q.new_empty((x.shape[1], x.shape[0]) if transpose else (0, 0)), x.new_empty((), dtype=torch.float32)


def _fake_gated_backward(grad: Tensor, *rest: Any) -> DelayedCasts:
    return *_fake_delayed(grad, *rest), *_fake_delayed(grad, *rest)


def _history(staged: float | None) -> Tensor | None:
    return None if staged is None else torch.tensor([staged, 5.0, 7.0])


def _norm_case(dtype: torch.dtype, size: tuple[int, int], *options: Any) -> tuple[Any, ...]:
    staged, fp8, transpose = options
    weight = torch.linspace(0.5, 2, size[1]).to(dtype)
    return tiled_noise(*size, dtype), weight, 1e-6, torch.tensor(64.0), _history(staged), fp8, transpose


def _gated_case(dtype: torch.dtype, size: tuple[int, int], *options: Any) -> tuple[Any, ...]:
    staged, fp8, transpose = options
    gate, up = tiled_noise(*size, dtype), tiled_noise(*size, dtype, seed=1)
    return gate, up, torch.tensor(3.0), _history(staged), fp8, transpose


def _gated_backward_case(dtype: torch.dtype, size: tuple[int, int], *options: Any) -> tuple[Any, ...]:
    staged, fp8, transpose = options
    grad, gate, up = (tiled_noise(*size, dtype, seed=seed) for seed in range(3))
    scales = torch.tensor(3.0), torch.tensor(0.5)
    return grad, gate, up, scales[0], _history(staged), scales[1], _history(1e30), fp8, transpose


def _hostile_case() -> tuple[Any, ...]:
    """An infinity and NaN in the gradient."""
    grad = edge_values(torch.bfloat16)
    gate, up = torch.full_like(grad, 2.0), torch.full_like(grad, 1.0)
    scale = torch.tensor(3.0)
    return grad, gate, up, scale, _history(0.0), scale.clone(), _history(0.0), torch.float8_e5m2, True


def _delayed_cases(make: Any) -> list[Case]:
    staged = cycle((0.0, None, 1e30))
    grid = product(
        (torch.float32, torch.bfloat16), ((5, 64), (33, 300), (128, 256), (144, 136)), FP8_MAX, (True, False)
    )
    return [
        Case(f"{d} {s} {fp8} {t} staged {h}", partial(make, d, s, h, fp8, t))
        for (d, s, fp8, t), h in zip(grid, staged, strict=False)
    ]


def _gated_backward_cases() -> list[Case]:
    return [*_delayed_cases(_gated_backward_case), Case("hostile", _hostile_case)]


_SCALE = (
    "Tensor scale, Tensor(a!)? history, ScalarType dtype, bool transpose) -> (Tensor q, Tensor q_t, Tensor scale_inv)"
)

define_composed(
    f"rms_norm_quantize_delayed(Tensor x, Tensor weight, float eps, {_SCALE}",
    rms_norm_quantize_delayed,
    fake=_fake_delayed,
    cases=partial(_delayed_cases, _norm_case),
    kernel_devices=("cuda",),
)
define_composed(
    f"silu_mul_quantize_delayed(Tensor gate, Tensor up, {_SCALE}",
    silu_mul_quantize_delayed,
    fake=_fake_delayed,
    cases=partial(_delayed_cases, _gated_case),
    kernel_devices=("cuda",),
)
define_composed(
    "silu_mul_backward_quantize_delayed(Tensor grad, Tensor gate, Tensor up, Tensor gate_scale,"
    " Tensor(a!)? gate_history, Tensor up_scale, Tensor(b!)? up_history, ScalarType dtype, bool transpose)"
    " -> (Tensor gate_q, Tensor gate_q_t, Tensor gate_scale_inv, Tensor up_q, Tensor up_q_t, Tensor up_scale_inv)",
    silu_mul_backward_quantize_delayed,
    fake=_fake_gated_backward,
    cases=_gated_backward_cases,
    kernel_devices=("cuda",),
)
