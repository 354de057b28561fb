"""The gradients of causal attention within sequences, for training through the forward pass of a server."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.attention import attention_weights, hidden
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
    reference computes in FP64. The kernel recomputes the weights tile by tile (Dao et al., FlashAttention, 2022,
    algorithm 4), from queries and keys alone.
    """
    d_q, d_k, d_v = (torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v))
    d_sinks = torch.zeros(q.shape[1], dtype=torch.float64, device=q.device)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        dy, a, b, c = (t[rows].double() for t in (grad, q, k, v))
        one = _of_sequence(dy, a, b, c, softmax_scale, window, softcap, sinks)
        d_q[rows], d_k[rows], d_v[rows] = one[:3]
        d_sinks += one[3]
        start += length
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks.float()


def _of_sequence(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Gradients:
    """In FP64. With S = Q K^T, capped, P = softmax(S) and dP = dO V^T, the gradient of S is P (dP - D), where D is the
    sum of P dP over the keys. A sink has no value, so its own dP is 0."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    grad, q, k, v = (t.transpose(0, 1) for t in (grad, q, k, v))  # [heads or kv_heads, L, head_dim]
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    scores = q @ k.mT * softmax_scale
    joining = None if sinks is None else sinks.view(-1, 1, 1)
    weights = attention_weights(scores, hidden(q.shape[1], q.shape[1], window, q.device), softcap, joining)
    d_weights = grad @ v.mT
    mean = (weights * d_weights).sum(-1, keepdim=True)
    d_scores = weights * (d_weights - mean)
    if softcap is not None:
        d_scores = d_scores * (1 - torch.tanh(scores / softcap).square())
    of_keys = (d_scores.mT @ q * softmax_scale, weights.mT @ grad)
    d_k, d_v = (d.view(kv_heads, group, *d.shape[1:]).sum(1).transpose(0, 1) for d in of_keys)
    d_sinks = -((1 - weights.sum(-1)) * mean[..., 0]).sum(-1) * (sinks is not None)
    return (d_scores @ k * softmax_scale).transpose(0, 1), d_k, d_v, d_sinks


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
