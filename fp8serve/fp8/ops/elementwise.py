"""RMSNorm, silu(gate) * up, their gradients, and norms and silu fused with a cast; `look_up`, which evaluates a BF16
function by a table.

A fused op equals the composition of its parts and rounds where they round, so a model gives the same numbers with fused
ops. Two things are not fixed: the order in which the squares of a norm are summed, and the last bit of the sigmoid. So
a kernel may differ from this reference in the last bit of the mean of the squares, or of the sigmoid.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.ops.inputs import (
    dense_like,
    edge_values,
    fake_cast,
    fake_like_first,
    gradient_cases,
    grid_cases,
    random_normal,
    row_cases,
    tiled_noise,
)
from fp8serve.fp8.ops.registry import Case, define, define_composed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dimension; x / rms(x) is FP32 and is rounded to x's dtype."""
    x_fp32 = x.float()
    x_fp32 = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x_fp32.to(x.dtype)


def _rms_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    return random_normal(rows, cols, dtype), torch.linspace(0.5, 2, cols).to(dtype), 1e-6


define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    rms_norm,
    fake=fake_like_first,
    cases=partial(row_cases, _rms_case),
)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `rms_norm` for x [T, hidden] and weight, computed in FP32 and rounded at the end.

    The gradient of weight uses x / rms(x) as the forward pass rounded it.
    """
    x_fp32, upstream = x.float(), grad.float() * weight.float()
    factor = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    normed = x_fp32 * factor
    d_x = factor * (upstream - normed * (upstream * normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), (grad.float() * normed.to(x.dtype)).sum(0).to(weight.dtype)


def _fake_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return dense_like(x), torch.empty_like(weight)


define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor d_x, Tensor d_weight)",
    rms_norm_backward,
    fake=_fake_norm_backward,
    cases=partial(gradient_cases, _rms_case),
)


def rms_norm_quantize(ops: Any, x: Tensor, weight: Tensor, eps: float, scale: Tensor, dtype: torch.dtype) -> Any:
    """Quantizes rms_norm(x), x [M, K], by `scale` []; returns (q, amax)."""
    return ops.quantize(ops.rms_norm(x, weight, eps), scale, dtype)


def _norm_case(dtype: torch.dtype, shape: tuple[int, int], fp8: torch.dtype, bias: bool | None) -> tuple[Any, ...]:
    """Arguments of a norm; with `bias` None, those of RMSNorm, which has no bias."""
    x, weight = tiled_noise(*shape, dtype), torch.linspace(0.5, 2, shape[1]).to(dtype)
    shift = () if bias is None else (weight - 1 if bias else None,)
    return x, weight, *shift, 1e-6, torch.tensor(64.0), fp8


def _norm_cases(*biases: bool | None) -> list[Case]:
    dtypes, shapes = (torch.float32, torch.bfloat16), ((5, 64), (33, 300))
    return grid_cases("{} {} {} bias {}", _norm_case, dtypes, shapes, FP8_MAX, biases)


define_composed(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    rms_norm_quantize,
    fake=fake_cast,
    cases=partial(_norm_cases, None),
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean) / std * weight + bias over the last dimension, computed by torch in x's dtype."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def layer_norm_quantize(
    ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor, dtype: torch.dtype
) -> Any:
    """Quantizes layer_norm(x), x [M, K], by `scale` []; returns (q, amax)."""
    return ops.quantize(layer_norm(x, weight, bias, eps), scale, dtype)


define_composed(
    "layer_norm_quantize(Tensor x, Tensor weight, Tensor? bias, float eps, Tensor scale, ScalarType dtype)"
    " -> (Tensor q, Tensor amax)",
    layer_norm_quantize,
    fake=fake_cast,
    cases=partial(_norm_cases, True, False),
    kernel_devices=("cuda",),
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up; silu(gate) is rounded to its dtype before the product."""
    return F.silu(gate) * up


def _silu_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    return random_normal(rows, cols, dtype), random_normal(rows, cols, dtype, 1)


define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    silu_mul,
    fake=fake_like_first,
    cases=partial(row_cases, _silu_case),
)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `silu_mul` for gate and up, computed in FP32 and rounded at the end.

    The gradient of up uses silu(gate) as the forward pass rounded it.
    """
    gate_fp32, upstream = gate.float(), grad.float()
    sigmoid = gate_fp32.sigmoid()
    d_gate = upstream * up * (sigmoid * (1 + gate_fp32 * (1 - sigmoid)))
    return d_gate.to(gate.dtype), (upstream * (gate_fp32 * sigmoid).to(gate.dtype)).to(up.dtype)


def _fake_silu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return dense_like(gate), dense_like(up)


define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor d_gate, Tensor d_up)",
    silu_mul_backward,
    fake=_fake_silu_backward,
    cases=partial(gradient_cases, _silu_case),
)


def silu_mul_quantize(ops: Any, gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
    """Quantizes silu_mul(gate, up), both [M, K], by `scale` []; returns (q, amax)."""
    return ops.quantize(ops.silu_mul(gate, up), scale, dtype)


def _silu_quantize_case(dtype: torch.dtype, shape: tuple[int, int], fp8: torch.dtype) -> tuple[Any, ...]:
    return tiled_noise(*shape, dtype), tiled_noise(*shape, dtype, seed=1), torch.tensor(3.0), fp8


define_composed(
    "silu_mul_quantize(Tensor gate, Tensor up, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    silu_mul_quantize,
    fake=fake_cast,
    cases=partial(
        grid_cases,
        "{} {} {}",
        _silu_quantize_case,
        (torch.float32, torch.bfloat16),
        ((5, 64), (33, 300)),
        FP8_MAX,
    ),
)


def look_up(x: Tensor, table: Tensor) -> Tensor:
    """Replaces each element of x, BF16 [M, K], by table[bits of the element as an integer], BF16 [65536]."""
    indices = x.contiguous().view(torch.uint16).int()
    return table.index_select(0, indices.view(-1)).view(x.shape)  # five times as fast as table[indices]


def _look_up_case(kind: str) -> tuple[Any, ...]:
    """Arguments with a table of distinct entries: entry i is the BF16 number with the bits i, negated."""
    table = torch.arange(2**16).to(torch.int16).roll(2**15).view(torch.bfloat16)
    dtype = torch.bfloat16
    inputs = {
        "hostile": lambda: edge_values(dtype).nan_to_num(0.0, torch.inf, -torch.inf),  # NaN equals nothing
        "odd": lambda: random_normal(5, 70, dtype),
        "rows apart": lambda: random_normal(9, 64, dtype)[:, 3:36],
        "no rows": lambda: random_normal(0, 16, dtype),
        "several tasks": lambda: random_normal(130, 1032, dtype),
    }
    return inputs[kind](), table


define(
    "look_up(Tensor x, Tensor table) -> Tensor",
    look_up,
    fake=fake_like_first,
    cases=partial(grid_cases, "{}", _look_up_case, ("hostile", "odd", "rows apart", "no rows", "several tasks")),
    kernel_devices=("cpu",),
)
