"""Fused ops in plain PyTorch: several ops of a decoder layer as one.

Each is by definition the composition of its parts, rounding where the parts round, so that a model gives the same
numbers fused or not. Only where a part itself leaves the order of a sum open (the mean of squares) or a transcendental
function its last bit (the sigmoid) may a kernel differ from this page, by that last bit.
"""

import torch
from torch import Tensor

from fp8serve.fp8 import reference


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
    q: Tensor, amax: Tensor, seen: Tensor, saturated: Tensor, limit: float, rows: Tensor | None
) -> None:
    """Watch an input that was cast to q [T, K]: seen FP32 [] rises to its amax []; where that is beyond `limit`, the
    largest input that is not cut off, saturated int64 [] counts the codes at the format's end (E4M3) among the first
    `rows` int64 [], None for all."""
    torch.fmax(seen, amax, out=seen)  # a NaN is no largest magnitude
    cut = (q.view(torch.uint8) & 0x7F).eq(0x7E)
    if rows is not None:
        cut = cut & (torch.arange(q.shape[0], device=q.device) < rows).unsqueeze(1)
    saturated += cut.sum() * (amax > limit)
