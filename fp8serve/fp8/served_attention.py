"""Causal attention over flattened sequences as a server computes it, but differentiable, for training.

The forward pass is serving's own op, `paged_attention`, with the new keys and values for its cache, one token a block.
A query's result depends on itself, its keys and its position alone (csrc/cpu/attention.h), so these are the bits of
prefill, decoding, any chunk and any cached prefix. With the scales of an FP8 cache (`KvScale`) keys and values are cast
as the server casts them.

The backward pass recomputes the weights from queries, keys and values, and keeps nothing else: on a CPU it is our op
`attention_backward`, where there is no kernel that of `causal_attention`, the gradient of the same function. Gradients
pass unchanged through the cast to an FP8 cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops
from fp8serve.fp8.attention import causal_attention, check_lengths

E4M3 = torch.float8_e4m3fn
_HAS_KERNEL = "cpu kernel" in ops.backends("cpu")["paged_attention"]
_attention_backward = torch.ops.fp8serve.attention_backward.default
_paged_attention = torch.ops.fp8serve.paged_attention.default
_quantize = torch.ops.fp8serve.quantize.default


@dataclass(frozen=True, slots=True)
class KvScale:
    """Multipliers of one layer's FP8 cache: `scale` FP32 [] to quantize, and its reciprocal."""

    k: Tensor
    v: Tensor
    k_inv: Tensor
    v_inv: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "KvScale":
        return cls(k, v, k.reciprocal(), v.reciprocal())


class _Options(NamedTuple):
    """The arguments of `causal_attention` that have no gradient."""

    lengths: Sequence[int]
    softmax_scale: float
    window: int | None
    softcap: float | None


class _Served(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, scale: KvScale | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.options, ctx.scale = options, scale
        return _paged(q, k, v, sinks, options, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = cast(list[Tensor], [None if t is None else t.detach() for t in ctx.saved_tensors])
        if ctx.scale is not None:
            k, v = _rounded(k, ctx.scale.k, ctx.scale.k_inv), _rounded(v, ctx.scale.v, ctx.scale.v_inv)
        backward = _backward if is_served(q) else _backward_by_torch
        gradients = backward(grad, q, k, v, sinks, ctx.options, ctx.needs_input_grad[:4])
        return *gradients, None, None


def served_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: KvScale | None = None,
) -> Tensor:
    """As `causal_attention`, with the bits of a server whose cache is in BF16, or in E4M3 by `scale`.

    Where `is_served` does not hold it is `causal_attention`, or with a `scale` the reference's attention. Raises
    ValueError if the lengths do not add up.
    """
    check_lengths(q, lengths)
    if scale is None and not is_served(q):
        return causal_attention(q, k, v, lengths, softmax_scale, window, softcap, sinks)
    options = _Options(lengths, softmax_scale, window, softcap)
    return cast(Tensor, _Served.apply(q, k, v, sinks, options, scale))  # type: ignore[no-untyped-call]


def is_served(q: Tensor) -> bool:
    """Whether a server's kernel computes attention of these queries: BF16 on a CPU, outside torch.compile."""
    on_cpu = q.device.type == "cpu" and q.dtype == torch.bfloat16
    return _HAS_KERNEL and on_cpu and not torch.compiler.is_compiling()


def _paged(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, scale: KvScale | None) -> Tensor:
    if scale is not None:
        k, v = (_quantize(x, s, E4M3)[0] for x, s in ((k, scale.k), (v, scale.v)))
    scales = (None, None) if scale is None else (scale.k_inv, scale.v_inv)
    where = _tables(options.lengths, q.device)
    scores = options.softmax_scale, options.window, options.softcap
    return cast(Tensor, _paged_attention(q, k.unsqueeze(1), v.unsqueeze(1), *where, *scales, *scores, sinks))


Gradients = tuple[Tensor | None, ...]  # of q, k, v and sinks; None where none is wanted


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, needed: Sequence[bool]
) -> Gradients:
    lengths, *scores = options
    wide = None if sinks is None else sinks.float()
    gradients = _attention_backward(grad.to(q.dtype), q, k, v, list(lengths), *scores, wide)
    *of_tokens, of_sinks = (d if is_needed else None for d, is_needed in zip(gradients, needed, strict=True))
    return *of_tokens, of_sinks if sinks is None or of_sinks is None else of_sinks.to(sinks.dtype)


def _backward_by_torch(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, needed: Sequence[bool]
) -> Gradients:
    places = [i for i, is_needed in enumerate(needed) if is_needed]
    leaves = [cast(Tensor, (q, k, v, sinks)[i]).requires_grad_() for i in places]
    with torch.enable_grad():
        out = causal_attention(q, k, v, options.lengths, options.softmax_scale, options.window, options.softcap, sinks)
    gradients = dict(zip(places, torch.autograd.grad(out, leaves, grad), strict=True))
    return tuple(gradients.get(i) for i in range(len(needed)))


def _tables(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """int32 (block_tables [S, longest], context_lens [S], query_starts [S + 1]) where a block is one token."""
    counts = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    tables = torch.arange(max(lengths, default=0), dtype=torch.int32) + starts[:-1, None]
    return tables.to(device), counts.to(device), starts.to(device)


def _rounded(x: Tensor, scale: Tensor, scale_inv: Tensor) -> Tensor:
    """The value of x as an E4M3 cache holds it, in x's type."""
    q: Tensor = _quantize(x, scale, E4M3)[0]
    return (q.float() * scale_inv).to(x.dtype)
