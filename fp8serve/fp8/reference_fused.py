"""Fused ops in plain PyTorch: several ops of a decoder layer as one.

Each is by definition the composition of its parts, rounding where the parts round, so that a model gives the same
numbers fused or not. Only where a part itself leaves the order of a sum open (the mean of squares) or a transcendental
function its last bit (the sigmoid) may a kernel differ from this page, by that last bit.
"""

import torch
from torch import Tensor

from fp8serve.fp8 import reference
from fp8serve.fp8.reference import CUT_OFF


def mm(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """BF16 [M, K] x BF16 [N, K] -> [M, N], accumulated in FP32: like scaled_mm, a row does not depend on its batch."""
    one = torch.ones((), device=a.device)
    return reference.scaled_mm(a, b, one, one, bias, out_dtype)


def scaled_mm_add(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, bias: Tensor | None, residual: Tensor
) -> Tensor:
    """residual [M, N] + scaled_mm(...), whose result is rounded to the residual's dtype before it is added."""
    return residual + reference.scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, residual.dtype)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of `reference.rms_norm` of x [T, hidden] with respect to x and weight; FP32 inside, rounded once."""
    wide, upstream = x.float(), grad.float() * weight.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * factor
    d_x = factor * (upstream - normed * (upstream * normed).mean(-1, keepdim=True))
    return d_x.to(x.dtype), (grad.float() * normed.to(x.dtype)).sum(0).to(weight.dtype)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `reference.silu_mul` with respect to gate and up; FP32 inside, rounded once."""
    wide, upstream = gate.float(), grad.float()
    sigmoid = wide.sigmoid()
    d_gate = upstream * up * (sigmoid * (1 + wide * (1 - sigmoid)))
    return d_gate.to(gate.dtype), (upstream * (wide * sigmoid).to(gate.dtype)).to(up.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] turned by its position: cos, sin [T, 1, D]; the halves of a head's dimensions are pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """q [T, heads, D] and k [T, kv_heads, D] turned by cos, sin [T, 1, D]; k and v written; returns the turned q."""
    reference.write_kv(rotary(k, cos, sin), v, k_cache, v_cache, slots, k_scale, v_scale)
    return rotary(q, cos, sin)


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


def _source(x: Tensor, other: Tensor | None, eps: float | None) -> Tensor:
    if other is None:
        return x
    return reference.silu_mul(x, other) if eps is None else reference.rms_norm(x, other, eps)
