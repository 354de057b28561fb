"""Layers that fuse the cast with the op before it, which saves a read and a write of the activation.

    NormLinear      RMSNorm or LayerNorm, then Linear
    SiluMulLinear   silu(gate) * up, then Linear (the second half of a gated MLP)

Fused, the high-precision activation between the two is never written: one op produces its FP8 data and its amax. The
backward pass computes it again from the layer's own inputs, which are kept anyway, so only FP8 data is stored for it.
The FP8 data, and so everything computed from them, are bit-equal to those of the unfused layers in FP32, BF16 and FP16:
`elementwise.rms_norm` (or torch's layer norm) or `elementwise.silu_mul`, then the Linear. A kernel computes both with
one function, so sums have the same order and roundings the same place. torch's own `nn.RMSNorm` and `silu` may differ
from them by the last bit of a sum or an exponential.

Fusion needs the scale before the values are known, so it happens under DelayedScaling; where wgrad reads the input in
high precision, or under another recipe, the layer runs its two halves one after the other. The ops are composed of the
others until a device has a kernel for them. One Linear per NormLinear: fuse q, k and v into one weight, or the norm is
computed three times.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8.elementwise import rms_norm, silu_mul
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops.norm import layer_norm

Sources = tuple[Tensor | None, ...]
Produce = Callable[..., Tensor]  # (*sources) -> the activation in high precision


class _StandIn(torch.autograd.Function):
    """Represents the activation in the graph and holds no values; the backward pass computes the activation again."""

    @staticmethod
    def forward(ctx: Any, produce: Produce, dtype: torch.dtype, *sources: Tensor | None) -> Tensor:
        ctx.produce = produce
        ctx.save_for_backward(*sources)
        first = cast(Tensor, sources[0])
        return first.new_empty(1, dtype=dtype).expand(first.shape)  # no memory: nothing reads it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Sources:
        needed = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, needed, strict=True)
        with torch.enable_grad():
            sources = [None if s is None else s.detach().requires_grad_(w) for s, w in pairs]
            produced = ctx.produce(*sources)
        chosen = [s for s, w in zip(sources, needed, strict=True) if s is not None and w]
        gradients = iter(torch.autograd.grad(produced, chosen, gradient))
        return None, None, *(next(gradients) if w else None for w in needed)


def _dtype(sources: Sources) -> torch.dtype:
    """What an elementwise function of the sources promotes to."""
    dtypes = [s.dtype for s in sources if s is not None]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def _rows(sources: Sources) -> list[Tensor | None]:
    return [s.reshape(-1, s.shape[-1]) if s is not None and s.dim() > 1 else s for s in sources]


def _through(
    linear: Linear,
    produce: Produce,
    op: Callable[..., tuple[Tensor, Tensor]],
    sources: Sources,
    is_first_microbatch: bool | None,
) -> Tensor:
    """linear(produce(*sources)), the cast fused by `op(*sources, scale, dtype)` where the recipe allows it."""
    dtype, kind = _dtype(sources), cast(Tensor, sources[0]).device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != dtype:
        return cast(
            Tensor, linear(produce(*sources), is_first_microbatch)
        )  # torch.autocast adds a rounding between the two
    edge = cast(Tensor, _StandIn.apply(produce, dtype, *sources))  # type: ignore[no-untyped-call]
    return linear.run(
        edge,
        lambda: produce(*sources),
        lambda scale, fmt: op(*_rows(sources), scale, fmt),
        is_first_microbatch,
    )


class NormLinear(nn.Module):
    """[..., in_features] -> [..., out_features]: a norm over the last dimension, then the Linear.

    norm: any module with `weight` (and `bias`, `eps`): nn.LayerNorm centres, everything else is an RMSNorm. An eps of
    None is FP32's, as in nn.RMSNorm. Its parameters and those of `linear` are shared, not copied. TypeError for a norm
    without a weight.
    """

    def __init__(self, norm: nn.Module, linear: Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear
        self.center = isinstance(norm, nn.LayerNorm)
        if not isinstance(getattr(norm, "weight", None), Tensor):
            raise TypeError(
                f"NormLinear multiplies by the weight of its norm, and this {type(norm).__name__} has none; "
                "make it with elementwise_affine=True, or call it before a Linear."
            )
        eps = cast(Any, norm).eps
        self.eps = torch.finfo(torch.float32).eps if eps is None else float(eps)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """linear(norm(x), is_first_microbatch)."""
        weight, bias = cast(Tensor, self.norm.weight), cast(Tensor | None, getattr(self.norm, "bias", None))
        eps = self.eps
        if self.center:

            def produce(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return layer_norm(x, weight, bias, eps)

            def op(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Any:
                return torch.ops.fp8serve.layer_norm_quantize(x, weight, bias, eps, scale, dtype)

            return _through(self.linear, produce, op, (x, weight, bias), is_first_microbatch)
        return _through(
            self.linear,
            lambda x, weight: rms_norm(x, weight, eps),
            lambda x, weight, scale, dtype: torch.ops.fp8serve.rms_norm_quantize(x, weight, eps, scale, dtype),
            (x, weight),
            is_first_microbatch,
        )


class SiluMulLinear(nn.Module):
    """(gate, up) [..., in_features] -> [..., out_features]: linear(silu(gate) * up)."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, gate: Tensor, up: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """linear(silu(gate) * up, is_first_microbatch)."""
        return _through(self.linear, silu_mul, torch.ops.fp8serve.silu_mul_quantize, (gate, up), is_first_microbatch)
