"""Causal attention over flattened sequences, for training and calibration.

`causal_attention` calls PyTorch's scaled_dot_product_attention, which is differentiable and has a fused kernel on every
device. That function supports neither soft caps nor sinks; with these the steps of attention are computed one by one.
One call of scaled_dot_product_attention takes sequences of equal length. Sequences of different lengths are computed
one by one, unless the GPU can run flash attention, the op beneath it. Flash attention takes the boundaries of all
sequences in one call.

On a CPU, and on a GPU with invariant kernels (batch_invariant.py), `served_attention` has the same bits as serving. Its
forward pass runs the op of serving, `paged_attention`, with the new keys and values as its cache, in blocks of one
token. The result of a query depends only on the query, its keys and its position (csrc/cpu/attention.h). So it has the
same bits as in prefill, decoding, any chunk and with any cached prefix. With the scales of an FP8 cache (`KvScale`),
keys and values are cast as in serving. The backward pass saves queries, keys and values only, and recomputes the
attention weights. It runs our op `attention_backward` on a CPU; elsewhere it computes the gradient of
`causal_attention`. The gradient of the cast to an FP8 cache is the identity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.ops.attention import attention_mask, attention_weights

E4M3 = torch.float8_e4m3fn
_HAS_KERNEL = "cpu kernel" in ops.backends("cpu")["paged_attention"]
_attention_backward = torch.ops.fp8serve.attention_backward.default
_paged_attention = torch.ops.fp8serve.paged_attention.default
_quantize = torch.ops.fp8serve.quantize.default
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
        backward = _backward if has_serving_kernel(q) and q.device.type == "cpu" else _backward_by_torch
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
    """Returns whether a kernel of serving that gives these queries the bits of serving supports them: BF16 on a CPU or
    on a GPU with invariant kernels, outside of torch.compile."""
    has_kernel = _HAS_KERNEL if q.device.type == "cpu" else has_batch_invariant_products(q.device.type)
    return has_kernel and q.dtype == torch.bfloat16 and not torch.compiler.is_compiling()


def _run_paged_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: _Options, scale: KvScale | None
) -> Tensor:
    if scale is not None:
        k, v = (_quantize(x, s, E4M3)[0] for x, s in ((k, scale.k), (v, scale.v)))
    scales = (None, None) if scale is None else (scale.k_inv, scale.v_inv)
    tables = _paging_tables(tuple(options.lengths), q.device)
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


@lru_cache(maxsize=4)
def _paging_tables(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns block_tables [S, longest], context_lens [S] and query_starts [S + 1], int32, for blocks of one token. All
    layers of a batch use one copy on the device."""
    with torch.inference_mode(False):
        counts = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
        tables = torch.arange(max(lengths, default=0), dtype=torch.int32) + starts[:-1, None]
        return tables.to(device), counts.to(device), starts.to(device)


def _round_to_e4m3(x: Tensor, scale: Tensor, scale_inv: Tensor) -> Tensor:
    """Returns x rounded to the values of an E4M3 cache, in x's dtype."""
    q: Tensor = _quantize(x, scale, E4M3)[0]
    return (q.float() * scale_inv).to(x.dtype)
