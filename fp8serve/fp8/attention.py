"""Causal attention over flattened sequences, for training and calibration.

It goes through PyTorch's own scaled_dot_product_attention, which is differentiable and has a fused kernel on every
device. It does not support soft caps and sinks; with these attention is computed step by step. Serving goes through our
own op, `paged_attention`, because no PyTorch op reads a paged, possibly FP8, cache.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.attention import attention_weights, hidden

QUERIES = 256  # queries of a windowed sequence that are computed at once, at least


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence: q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> like q.

    T is the sum of `lengths`; heads is a multiple of kv_heads. window: a token sees itself and the `window` - 1 tokens
    before it. softcap: scores, scaled, become softcap * tanh(score / softcap). sinks [heads]: logits that join the
    denominator of their head's softmax. Differentiable. Sequences of equal length are computed as one batch. Raises
    ValueError if the lengths do not add up.
    """
    check_lengths(q, lengths)
    mix = partial(_batch, scale=softmax_scale, window=window, softcap=softcap, sinks=sinks)
    if len(set(lengths)) == 1:
        return mix(q, k, v, len(lengths))
    parts = (torch.split(t, list(lengths)) for t in (q, k, v))
    return torch.cat([mix(a, b, c, 1) for a, b, c in zip(*parts, strict=True)])


def causal_weights(
    scores: Tensor, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Scores of whole sequences, scaled, [..., heads, L, L] -> weights of the values; see `causal_attention`."""
    unseen = hidden(scores.shape[-2], scores.shape[-1], window, scores.device)
    return attention_weights(scores, unseen, softcap, None if sinks is None else sinks.view(-1, 1, 1))


def check_lengths(q: Tensor, lengths: Sequence[int]) -> None:
    """Raises ValueError unless the sequences make up q [T, heads, head_dim]."""
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"The sequence lengths add up to {sum(lengths)}, but there are {q.shape[0]} tokens.")


def _batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    q, k, v = (
        t.reshape(count, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)
    )  # [count, heads, length, head_dim]
    if softcap is not None or sinks is not None:
        out = _step_by_step(q, k, v, scale, partial(causal_weights, window=window, softcap=softcap, sinks=sinks))
    elif window is not None and window < q.shape[2]:
        out = _windowed(q, k, v, scale, window)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """[count, heads, length, head_dim], computed for some queries at a time, over the keys that any of them sees."""
    length, step = q.shape[2], max(window, QUERIES)
    out = []
    for first in range(0, length, step):
        last, begin = min(first + step, length), max(0, first - window + 1)
        seen = ~hidden(last - first, last - begin, window, q.device)
        part = q[:, :, first:last], k[:, :, begin:last], v[:, :, begin:last], seen
        out.append(F.scaled_dot_product_attention(*part, scale=scale, enable_gqa=True))
    return torch.cat(out, 2)


def _step_by_step(q: Tensor, k: Tensor, v: Tensor, scale: float, weigh: Callable[[Tensor], Tensor]) -> Tensor:
    """[count, heads, length, head_dim]; scores and weights in FP32, or in FP64 where q is, weights rounded to v's."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    high = torch.promote_types(q.dtype, torch.float32)
    return weigh(q.to(high) @ k.to(high).transpose(2, 3) * scale).to(v.dtype) @ v
