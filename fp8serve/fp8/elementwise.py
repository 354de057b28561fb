"""The differentiable operations between a decoder's GEMMs: RMSNorm, silu(gate) * up, rotary position.

Training, calibration and serving call the same ops, so that a norm has the same bits in all three: the fused ops of the
decode path (`rms_norm_quantize`, `silu_mul_quantize`, `rotary_write_kv`) are these ops and a cast. If they were
composed of torch's own operations, each would read and write the activation six to ten times, forward and backward.

Without gradients the op is called directly: an autograd.Function costs ten microseconds, as much as the op at decode.
Mixed types (an FP32 weight on BF16 activations) go through the reference, which promotes as torch does.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.ops import activation, norm

# overloads are looked up once: through torch.ops a call takes a microsecond longer
_rms_norm = torch.ops.fp8serve.rms_norm.default
_silu_mul = torch.ops.fp8serve.silu_mul.default
_rotary = torch.ops.fp8serve.rotary.default


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return cast(Tensor, _rms_norm(x, weight, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_x, d_weight = torch.ops.fp8serve.rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps)
        return d_x, d_weight, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return cast(Tensor, _silu_mul(gate, up))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.silu_mul_backward(grad, *ctx.saved_tensors))


class _Rotary(torch.autograd.Function):
    """A rotation: its gradient is the rotation back. Both halves of cos, and of sin, are equal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return cast(Tensor, _rotary(x, cos, sin))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotary(grad, cos, -sin), None, None


def _apply(function: type[torch.autograd.Function], op: Any, *args: Any) -> Tensor:
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return cast(Tensor, function.apply(*args))  # type: ignore[no-untyped-call]
    return cast(Tensor, op(*args))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] / rms(x) * weight [K]: FP32 up to the rounding to x's dtype, then the product."""
    if x.dtype != weight.dtype:
        return norm.rms_norm(x, weight, eps)
    flat = x.reshape(-1, x.shape[-1])
    return _apply(_RmsNorm, _rms_norm, flat, weight, eps).view_as(x)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., K]; silu is rounded to its dtype before the product."""
    if gate.dtype != up.dtype:
        return activation.silu_mul(gate, up)
    if gate.dim() == 2:
        return _apply(_SiluMul, _silu_mul, gate, up)
    flat = (t.reshape(-1, t.shape[-1]) for t in (gate, up))
    return _apply(_SiluMul, _silu_mul, *flat).view(gate.shape)


def gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, both [..., K]; GELU by its tanh approximation, in FP32, rounded to its dtype before the product.

    It is written out because the last bit of torch's own GELU depends on an element's position in its tensor, and a row
    must not depend on its neighbours.
    """
    x = gate.float()
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return (0.5 * x * (1 + torch.tanh(inner))).to(gate.dtype) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] turned by cos, sin [T, 1, D] of its dtype; dimension i is paired with i + D/2."""
    return _apply(_Rotary, _rotary, x, cos, sin)
