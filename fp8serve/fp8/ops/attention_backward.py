"""The gradients of causal attention within sequences, for training through the forward pass of a server."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.attention import attend
from fp8serve.fp8.ops.fakes import dense_like
from fp8serve.fp8.ops.registry import Case, define

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Gradients:
    """Gradients (d_q, d_k, d_v, d_sinks) of causal attention within each sequence; `grad` is that of its output.

    grad, q and d_q BF16 [T, heads, head_dim]; k, v, d_k and d_v BF16 [T, kv_heads, head_dim]; T is the sum of
    `lengths`. window, softcap and sinks as in `paged_attention`; d_sinks FP32 [heads], zeros without sinks. The
    reference differentiates in FP64. The kernel recomputes the weights tile by tile (Dao et al., FlashAttention, 2022,
    algorithm 4), from queries and keys alone.
    """
    given = torch.zeros(q.shape[1], device=q.device) if sinks is None else sinks
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v, given)]
    parts = zip(*(torch.split(t, lengths) for t in leaves[:3]), strict=True)
    joining = leaves[3] if sinks is not None else None
    with torch.enable_grad():
        out = [
            attend(a, b.transpose(0, 1), c.transpose(0, 1), softmax_scale, window, softcap, joining)
            for a, b, c in parts
        ]
        every = torch.cat([leaves[0][:0], *out])
        found = torch.autograd.grad(every, leaves, grad.double(), allow_unused=True, materialize_grads=True)
    d_q, d_k, d_v, d_sinks = (d.to(t.dtype) for d, t in zip(found, (q, k, v, given), strict=True))
    return d_q, d_k, d_v, d_sinks


def _fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Gradients:
    return dense_like(q), dense_like(k), dense_like(v), q.new_empty(q.shape[1], dtype=torch.float32)


def _case(lengths: list[int], heads: int, kv_heads: int, dim: int, *options: Any) -> tuple[Any, ...]:
    noise = torch.Generator().manual_seed(sum(lengths) + heads)
    counts, tokens = (heads, heads, kv_heads, kv_heads), sum(lengths)
    grad, q, k, v = (torch.randn(tokens, count, dim, generator=noise).bfloat16() for count in counts)
    return grad, q, k, v, lengths, dim**-0.5, *options


def _cases() -> list[Case]:
    shapes = ((4, 2, 16), (3, 3, 8), (6, 1, 80))
    plain = [(lengths, *shape) for lengths, shape in product(([1, 7, 5], [0, 150], []), shapes)]
    sinks = torch.tensor([0.5, -4.0, 3.0, 0.0])
    options = [([90, 1, 130], 4, 2, 16, *given) for given in ((8,), (33, None, sinks), (None, 2.0), (70, 0.5, sinks))]
    return [Case(f"{given}", partial(_case, *given)) for given in [*plain, *options]]


define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, int[] lengths, float softmax_scale,"
    " int? window=None, float? softcap=None, Tensor? sinks=None)"
    " -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_sinks)",
    attention_backward,
    fake=_fake,
    cases=_cases,
    kernels=("cpu",),
)
