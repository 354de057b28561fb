"""Attention: causal over flattened sequences for training and calibration, and the paged ops for serving.

Training goes through PyTorch's own scaled_dot_product_attention, which is differentiable and has a fused kernel on
every device. Serving goes through our op, because no PyTorch op reads a paged, possibly FP8, cache.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8 import ops as ops  # registers the ops called below


def causal_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], softmax_scale: float) -> Tensor:
    """Causal attention within each sequence: q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> like q.

    T is the sum of `lengths`; heads is a multiple of kv_heads. Differentiable. Sequences of equal length are computed
    as one batch. Raises ValueError if the lengths do not add up.
    """
    check_lengths(q, lengths)
    if len(set(lengths)) == 1:
        return _batch(q, k, v, len(lengths), softmax_scale)
    parts = (torch.split(t, list(lengths)) for t in (q, k, v))
    return torch.cat([_batch(a, b, c, 1, softmax_scale) for a, b, c in zip(*parts, strict=True)])


def check_lengths(q: Tensor, lengths: Sequence[int]) -> None:
    """Raises ValueError unless the sequences make up q [T, heads, head_dim]."""
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"The sequence lengths add up to {sum(lengths)}, but there are {q.shape[0]} tokens.")


def _batch(q: Tensor, k: Tensor, v: Tensor, count: int, softmax_scale: float) -> Tensor:
    q, k, v = (
        t.reshape(count, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)
    )  # [count, heads, length, head_dim]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    softmax_scale: float,
    k_scale_inv: Tensor | None = None,
    v_scale_inv: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens over their sequences' paged caches -> [T, heads, head_dim] of q's dtype.

    q [T, heads, head_dim] flattened over S sequences, query_starts int32 [S+1]; caches [blocks, block_size, kv_heads,
    head_dim] in BF16, FP32 or E4M3 (dequantized by the scale_inv, FP32 []); block_tables int32 [S, max_blocks];
    context_lens int32 [S] count a sequence's tokens with the new ones.
    """
    scales = (k_scale_inv, v_scale_inv, softmax_scale)
    tables = (block_tables, context_lens, query_starts)
    return cast(Tensor, torch.ops.fp8serve.paged_attention(q, k_cache, v_cache, *tables, *scales))


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write k and v [T, kv_heads, head_dim] at slots int64 [T] = block * block_size + offset (negative: skip).

    FP8 caches store saturate(x * scale), scale FP32 [] (None is 1).
    """
    torch.ops.fp8serve.write_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale)
