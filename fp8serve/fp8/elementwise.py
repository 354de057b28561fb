"""The differentiable operations between a decoder's GEMMs: RMSNorm, silu(gate) * up and rotary embeddings.

Training, calibration and serving call the same ops, so their results have the same bits in all three. The fused ops of
decoding (`rms_norm_quantize`, `silu_mul_quantize`, `rotary_write_kv`) are these ops followed by a cast. If composed of
torch's ops, each operation would read and write the activation six to ten times, in forward and in backward.

Without gradients the op is called directly, because an autograd.Function takes ten microseconds, as long as the op
takes in decoding. Mixed dtypes (an FP32 weight with BF16 activations) use the reference, which promotes as torch does.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.ops import elementwise as reference

# The overloads are looked up once, because a call through torch.ops takes a microsecond longer.
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
    """A rotation. Its gradient is rotated by the opposite angle. Both halves of cos are equal, and both halves of
    sin."""

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
    """Returns x [..., K] / rms(x) * weight [K]. The quotient is computed in FP32 and rounded to x's dtype first."""
    if x.dtype != weight.dtype:
        return reference.rms_norm(x, weight, eps)
    flat = x.reshape(-1, x.shape[-1])
    return _apply(_RmsNorm, _rms_norm, flat, weight, eps).view_as(x)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, both [..., K]. silu(gate) is rounded to its dtype before the product."""
    if gate.dtype != up.dtype:
        return reference.silu_mul(gate, up)
    if gate.dim() == 2:
        return _apply(_SiluMul, _silu_mul, gate, up)
    flat = (t.reshape(-1, t.shape[-1]) for t in (gate, up))
    return _apply(_SiluMul, _silu_mul, *flat).view(gate.shape)


def gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns gelu(gate) * up, both [..., K], with the tanh approximation of GELU.

    GELU is computed in FP32 and rounded to gate's dtype before the product. torch's own GELU is not used, because its
    last bit depends on an element's position in the tensor, and a row must not depend on the rest of the batch.
    """
    x = gate.float()
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return (0.5 * x * (1 + torch.tanh(inner))).to(gate.dtype) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [T, heads, D] rotated by cos and sin [T, 1, D] of x's dtype; dimension i is paired with i + D/2."""
    return _apply(_Rotary, _rotary, x, cos, sin)
