"""Differentiable causal attention over flattened sequences with the same bits as in serving, for training.

The forward pass runs the op of serving, `paged_attention`, with the new keys and values as its cache, in blocks of one
token. The result of a query depends only on the query, its keys and its position (csrc/cpu/attention.h). So it has the
same bits as in prefill, decoding, any chunk and with any cached prefix. With the scales of an FP8 cache (`KvScale`),
keys and values are cast as in serving.

The backward pass saves queries, keys and values only, and recomputes the attention weights. It runs our op
`attention_backward` on a CPU; without a kernel it computes the gradient of `causal_attention`. The gradient of the cast
to an FP8 cache is the identity.
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
    """The scales, FP32 [], by which a layer's keys and values are multiplied for an FP8 cache, and their
    reciprocals."""

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


class _ServedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, scale: KvScale | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.options, ctx.scale = options, scale
        return _run_paged_attention(q, k, v, sinks, options, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = cast(list[Tensor], [None if t is None else t.detach() for t in ctx.saved_tensors])
        if ctx.scale is not None:
            k, v = _round_to_e4m3(k, ctx.scale.k, ctx.scale.k_inv), _round_to_e4m3(v, ctx.scale.v, ctx.scale.v_inv)
        backward = _backward if has_serving_kernel(q) else _backward_by_torch
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
    """Returns causal attention, bit-equal to serving with a BF16 cache or, if `scale` is given, an E4M3 cache.

    Without a kernel of serving (`has_serving_kernel`) it calls `causal_attention`, or with `scale` the reference of
    `paged_attention`. Raises ValueError if the lengths do not add up.
    """
    check_lengths(q, lengths)
    if scale is None and not has_serving_kernel(q):
        return causal_attention(q, k, v, lengths, softmax_scale, window, softcap, sinks)
    options = _Options(lengths, softmax_scale, window, softcap)
    return cast(Tensor, _ServedAttention.apply(q, k, v, sinks, options, scale))  # type: ignore[no-untyped-call]


def has_serving_kernel(q: Tensor) -> bool:
    """Returns whether a kernel of serving supports these queries: BF16 on a CPU, outside of torch.compile."""
    is_cpu_bf16 = q.device.type == "cpu" and q.dtype == torch.bfloat16
    return _HAS_KERNEL and is_cpu_bf16 and not torch.compiler.is_compiling()


def _run_paged_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, scale: KvScale | None
) -> Tensor:
    if scale is not None:
        k, v = (_quantize(x, s, E4M3)[0] for x, s in ((k, scale.k), (v, scale.v)))
    scales = (None, None) if scale is None else (scale.k_inv, scale.v_inv)
    tables = _paging_tables(options.lengths, q.device)
    scores = options.softmax_scale, options.window, options.softcap
    return cast(Tensor, _paged_attention(q, k.unsqueeze(1), v.unsqueeze(1), *tables, *scales, *scores, sinks))


Gradients = tuple[Tensor | None, ...]  # of q, k, v and sinks; None for those that are not needed


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, needed: Sequence[bool]
) -> Gradients:
    lengths, *scores = options
    fp32_sinks = None if sinks is None else sinks.float()
    gradients = _attention_backward(grad.to(q.dtype), q, k, v, list(lengths), *scores, fp32_sinks)
    *d_qkv, d_sinks = (d if is_needed else None for d, is_needed in zip(gradients, needed, strict=True))
    return *d_qkv, d_sinks if sinks is None or d_sinks is None else d_sinks.to(sinks.dtype)


def _backward_by_torch(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, needed: Sequence[bool]
) -> Gradients:
    indices = [i for i, is_needed in enumerate(needed) if is_needed]
    leaves = [cast(Tensor, (q, k, v, sinks)[i]).requires_grad_() for i in indices]
    with torch.enable_grad():
        out = causal_attention(q, k, v, options.lengths, options.softmax_scale, options.window, options.softcap, sinks)
    gradients = dict(zip(indices, torch.autograd.grad(out, leaves, grad), strict=True))
    return tuple(gradients.get(i) for i in range(len(needed)))


def _paging_tables(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns block_tables [S, longest], context_lens [S] and query_starts [S + 1], int32, for blocks of one token."""
    counts = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    tables = torch.arange(max(lengths, default=0), dtype=torch.int32) + starts[:-1, None]
    return tables.to(device), counts.to(device), starts.to(device)


def _round_to_e4m3(x: Tensor, scale: Tensor, scale_inv: Tensor) -> Tensor:
    """Returns x rounded to the values of an E4M3 cache, in x's dtype."""
    q: Tensor = _quantize(x, scale, E4M3)[0]
    return (q.float() * scale_inv).to(x.dtype)
