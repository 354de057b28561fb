"""Causal attention over flattened sequences, for training and calibration.

It calls PyTorch's scaled_dot_product_attention, which is differentiable and has a fused kernel on every device. That
function supports neither soft caps nor sinks; with these the steps of attention are computed one by one. Serving uses
our own op `paged_attention`, because no PyTorch op reads a paged, possibly FP8, KV cache.

One call of scaled_dot_product_attention takes sequences of equal length. Sequences of different lengths are computed
one by one, unless the GPU can run flash attention, the op beneath it. Flash attention takes the boundaries of all
sequences in one call.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.attention import attention_mask, attention_weights

_flash_attention = torch.ops.aten._flash_attention_forward.default
MAX_FLASH_HEAD_DIM = 256
MIN_QUERIES_PER_CALL = 256  # with a sliding window, a sequence is computed in chunks of at least this many queries


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
    """Returns the output of causal attention within each sequence, in q's shape. It is differentiable.

    Sequences of equal length are computed as one batch. Sequences of different lengths are computed in one call if
    flash attention supports it, else one by one. Raises ValueError if the lengths do not add up to T.

    Args:
        q: [T, heads, head_dim], where heads is a multiple of kv_heads.
        k: [T, kv_heads, head_dim].
        v: [T, kv_heads, head_dim].
        lengths: The number of tokens of each sequence.
        window: If given, a token attends to itself and the `window` - 1 tokens before it.
        softcap: If given, a scaled score becomes softcap * tanh(score / softcap).
        sinks: [heads], logits that are added to the denominator of their head's softmax.
    """
    check_lengths(q, lengths)
    attend = partial(_attend_batch, scale=softmax_scale, window=window, softcap=softcap, sinks=sinks)
    if len(set(lengths)) == 1:
        return attend(q, k, v, len(lengths))
    if softcap is None and sinks is None and _can_use_flash_attention(q, k, v):
        return _attend_flash(q, k, v, tuple(lengths), softmax_scale, window)
    sequences = zip(*(torch.split(t, list(lengths)) for t in (q, k, v)), strict=True)
    return torch.cat([attend(a, b, c, 1) for a, b, c in sequences])


def causal_weights(
    scores: Tensor, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Returns the attention weights of scaled scores [..., heads, L, L] of whole sequences; see `causal_attention`."""
    mask = attention_mask(scores.shape[-2], scores.shape[-1], window, scores.device)
    return attention_weights(scores, mask, softcap, None if sinks is None else sinks.view(-1, 1, 1))


def check_lengths(q: Tensor, lengths: Sequence[int]) -> None:
    """Raises ValueError unless the lengths add up to the tokens of q [T, heads, head_dim]."""
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"The sequence lengths add up to {sum(lengths)}, but there are {q.shape[0]} tokens.")


def _attend_batch(
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
        out = _attend_unfused(q, k, v, scale, partial(causal_weights, window=window, softcap=softcap, sinks=sinks))
    elif window is not None and window < q.shape[2]:
        out = _attend_windowed(q, k, v, scale, window)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _can_use_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether flash attention supports these tensors, and the caller has not turned it off for
    scaled_dot_product_attention."""
    head_dim = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim == v.shape[-1]
        and head_dim % 8 == 0
        and head_dim <= MAX_FLASH_HEAD_DIM
        and torch.backends.cuda.is_flash_attention_available()
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _attend_flash(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float, window: int | None
) -> Tensor:
    """Computes all sequences in one call of flash attention, which also handles the window."""
    ends, longest = _ends(lengths, q.device), max(lengths)
    keys_before = -1 if window is None or window >= longest else window - 1
    operands = q, k, v, ends, ends, longest, longest, 0.0
    outputs = _flash_attention(
        *operands,
        is_causal=keys_before < 0,
        return_debug_mask=False,
        scale=scale,
        window_size_left=keys_before,
        window_size_right=0,
    )
    return cast(Tensor, outputs[0])


@lru_cache(maxsize=4)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns where sequences begin and end, int32 [count + 1]. All layers of a batch use one copy on the device."""
    with torch.inference_mode(False):  # a graph may save it
        return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def _attend_windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Computes a chunk of the queries at a time, with only the keys that lie in the window of any of them."""
    length, chunk = q.shape[2], max(window, MIN_QUERIES_PER_CALL)
    out = []
    for begin in range(0, length, chunk):
        end, first_key = min(begin + chunk, length), max(0, begin - window + 1)
        mask = ~attention_mask(end - begin, end - first_key, window, q.device)
        operands = q[:, :, begin:end], k[:, :, first_key:end], v[:, :, first_key:end], mask
        out.append(F.scaled_dot_product_attention(*operands, scale=scale, enable_gqa=True))
    return torch.cat(out, 2)


def _attend_unfused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, compute_weights: Callable[[Tensor], Tensor]
) -> Tensor:
    """Computes scores and weights in FP32 (in FP64 for q in FP64) and rounds the weights to v's dtype."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    return compute_weights(q.to(dtype) @ k.to(dtype).transpose(2, 3) * scale).to(v.dtype) @ v
