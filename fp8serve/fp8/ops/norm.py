"""RMSNorm, its gradient, and norms fused with a cast.

A fused op equals the composition of its parts and rounds where they round, so a model gives the same numbers with fused
ops. Only the order in which the squares are summed is not fixed: a kernel may differ from this reference in the last
bit of their mean.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.ops.inputs import (
    dense_like,
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
    """Returns the gradients of `rms_norm` for x [T, hidden] and weight, computed in FP32 and rounded once."""
    x_fp32, upstream = x.float(), grad.float() * weight.float()
    factor = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    normed = x_fp32 * factor
    d_x = factor * (upstream - normed * (upstream * normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), (grad.float() * normed.to(x.dtype)).sum(0).to(weight.dtype)


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return dense_like(x), torch.empty_like(weight)


define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor d_x, Tensor d_weight)",
    rms_norm_backward,
    fake=_fake_backward,
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
