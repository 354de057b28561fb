"""Layers that fuse the FP8 cast with the op before it, which saves a read and a write of the activation.

    NormLinear      RMSNorm or LayerNorm, then Linear
    SiluMulLinear   silu(gate) * up, then Linear (the second half of a gated MLP)

One op produces the FP8 data and the amax of the activation between the two parts; the high-precision activation is
never written to memory. The backward pass recomputes it from the layer's inputs, which autograd saves anyway. In FP32,
BF16 and FP16 the FP8 data are bit-equal to those of the unfused layers: `elementwise.rms_norm` (or torch's layer norm)
or `elementwise.silu_mul`, then the Linear. Fused and unfused kernels share one function, so the order of sums and the
roundings are the same. torch's own `nn.RMSNorm` and `silu` may differ in the last bit of a sum or an exponential.

A fused op needs the scale before the values are known, so layers fuse only under DelayedScaling. Under other recipes,
or if wgrad reads the input in high precision, the two parts run one after the other. On a device without a fused kernel
the op is composed of other ops. A NormLinear has one Linear: fuse q, k and v into one weight, or the norm is computed
three times.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8.elementwise import rms_norm, silu_mul
from fp8serve.fp8.linear import Linear, LinearInput
from fp8serve.fp8.ops.norm import layer_norm

Inputs = tuple[Tensor | None, ...]  # of the op before the Linear
ComputeActivation = Callable[..., Tensor]  # (*inputs) -> the activation in high precision


class _Placeholder(torch.autograd.Function):
    """A tensor without values that represents the activation in the graph; the backward pass recomputes the values."""

    @staticmethod
    def forward(ctx: Any, compute_activation: ComputeActivation, dtype: torch.dtype, *inputs: Tensor | None) -> Tensor:
        ctx.compute_activation = compute_activation
        ctx.save_for_backward(*inputs)
        first = cast(Tensor, inputs[0])
        return first.new_empty(1, dtype=dtype).expand(first.shape)  # one element of memory; nothing reads it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Inputs:
        needs_grad = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, needs_grad, strict=True)
        with torch.enable_grad():
            inputs = [None if t is None else t.detach().requires_grad_(needed) for t, needed in pairs]
            activation = ctx.compute_activation(*inputs)
        differentiable = [t for t, needed in zip(inputs, needs_grad, strict=True) if t is not None and needed]
        gradients = iter(torch.autograd.grad(activation, differentiable, gradient))
        return None, None, *(next(gradients) if needed else None for needed in needs_grad)


def _promoted_dtype(inputs: Inputs) -> torch.dtype:
    dtypes = [t.dtype for t in inputs if t is not None]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def _as_matrices(inputs: Inputs) -> list[Tensor | None]:
    return [t.reshape(-1, t.shape[-1]) if t is not None and t.dim() > 1 else t for t in inputs]


def _run_fused(
    linear: Linear,
    compute_activation: ComputeActivation,
    op: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    is_first_microbatch: bool | None,
) -> Tensor:
    """Returns `linear(compute_activation(*inputs))`. If the recipe allows it, `op(*inputs, scale, dtype)` returns the
    FP8 data and the amax of the activation."""
    dtype, kind = _promoted_dtype(inputs), cast(Tensor, inputs[0]).device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != dtype:
        # torch.autocast rounds the activation to its dtype before the Linear, which the fused op does not do.
        return cast(Tensor, linear(compute_activation(*inputs), is_first_microbatch))
    placeholder = cast(Tensor, _Placeholder.apply(compute_activation, dtype, *inputs))  # type: ignore[no-untyped-call]
    input = LinearInput(
        placeholder, lambda: compute_activation(*inputs), lambda scale, fmt: op(*_as_matrices(inputs), scale, fmt)
    )
    return linear.run(input, is_first_microbatch)


class NormLinear(nn.Module):
    """A norm over the last dimension followed by a Linear: [..., in_features] -> [..., out_features].

    `norm` is any module with `weight` and `eps`, and optionally `bias`. An nn.LayerNorm subtracts the mean; any other
    module is computed as an RMSNorm. If its eps is None, FP32's is used, as in nn.RMSNorm. The parameters of `norm` and
    `linear` are shared, not copied. Raises TypeError for a norm without a weight.
    """

    def __init__(self, norm: nn.Module, linear: Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear
        self.is_layer_norm = isinstance(norm, nn.LayerNorm)
        if not isinstance(getattr(norm, "weight", None), Tensor):
            raise TypeError(
                f"NormLinear needs a norm with a weight, and this {type(norm).__name__} has none; "
                "make it with elementwise_affine=True, or call it before a Linear."
            )
        eps = cast(Any, norm).eps
        self.eps = torch.finfo(torch.float32).eps if eps is None else float(eps)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Returns `linear(norm(x), is_first_microbatch)`."""
        weight, bias = cast(Tensor, self.norm.weight), cast(Tensor | None, getattr(self.norm, "bias", None))
        eps = self.eps
        if self.is_layer_norm:

            def compute_activation(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return layer_norm(x, weight, bias, eps)

            def op(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Any:
                return torch.ops.fp8serve.layer_norm_quantize(x, weight, bias, eps, scale, dtype)

            return _run_fused(self.linear, compute_activation, op, (x, weight, bias), is_first_microbatch)
        return _run_fused(
            self.linear,
            lambda x, weight: rms_norm(x, weight, eps),
            lambda x, weight, scale, dtype: torch.ops.fp8serve.rms_norm_quantize(x, weight, eps, scale, dtype),
            (x, weight),
            is_first_microbatch,
        )


class SiluMulLinear(nn.Module):
    """silu(gate) * up followed by a Linear: gate and up [..., in_features] -> [..., out_features]."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, gate: Tensor, up: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Returns `linear(silu(gate) * up, is_first_microbatch)`."""
        return _run_fused(self.linear, silu_mul, torch.ops.fp8serve.silu_mul_quantize, (gate, up), is_first_microbatch)
