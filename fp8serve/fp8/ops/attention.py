"""Attention over a paged cache of keys and values, and the write into it."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX, saturate
from fp8serve.fp8.ops.fakes import fake_nothing
from fp8serve.fp8.ops.inputs import tiles
from fp8serve.fp8.ops.registry import Case, define


def _gather(cache: Tensor, blocks: Tensor, length: int, scale_inv: Tensor | None) -> Tensor:
    """The first `length` tokens of a sequence from its blocks: [kv_heads, length, head_dim] in FP64."""
    tokens = cache[blocks.long()].flatten(0, 1)[:length]
    values = tokens.float() if scale_inv is None else tokens.float() * scale_inv
    return values.double().transpose(0, 1)


def hidden(queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [queries, length]: True where one of the last `queries` tokens does not see a token of all `length`.

    A token sees itself and those before it; with a window (>= 1) only the last `window` of these.
    """
    ahead = torch.arange(length, device=device) - torch.arange(length - queries, length, device=device).unsqueeze(1)
    return ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)


def attention_weights(scores: Tensor, unseen: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys: scores [..., T, L] in high precision, bool `unseen` [T, L] -> like scores.

    softcap: scores become softcap * tanh(scores / softcap). sinks: logits [..., 1, 1] that join the denominator.
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last T of L tokens: q [T, H, D], k and v [KV, L, D] in FP64 -> [T, H, D] in FP64."""
    queries, heads, dim = q.shape
    kv_heads, length, _ = k.shape
    grouped = q.double().view(queries, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = grouped @ k.unsqueeze(1).transpose(2, 3) * softmax_scale  # [KV, group, T, L]
    if sinks is not None:
        sinks = sinks.view(kv_heads, heads // kv_heads, 1, 1)
    weights = attention_weights(scores, hidden(queries, length, window, q.device), softcap, sinks)
    return (weights @ v.unsqueeze(1)).permute(2, 0, 1, 3).reshape(queries, heads, dim)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    k_scale_inv: Tensor | None,
    v_scale_inv: Tensor | None,
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens over their sequences' paged caches.

    q [T, heads, head_dim] flattened over sequences (query_starts int32 [S+1]); caches [blocks, block_size, kv_heads,
    head_dim]; block_tables int32 [S, max_blocks]; context_lens int32 [S] with the new tokens. window: a token
    sees itself and the `window` - 1 tokens before it; None: all of them. softcap: scores, scaled, become softcap *
    tanh(score / softcap). sinks FP32 [heads]: logits that join the denominator of their head's softmax. Each sequence
    is computed alone and in FP64, rounded once at the end: its result does not depend on its neighbours, nor on how its
    prompt was cut into chunks.
    """
    out = torch.empty_like(q)
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        blocks = block_tables[i, : -(-length // k_cache.shape[1])]
        k, v = _gather(k_cache, blocks, length, k_scale_inv), _gather(v_cache, blocks, length, v_scale_inv)
        if rows.start != rows.stop:
            out[rows] = attend(q[rows], k, v, softmax_scale, window, softcap, sinks).to(q.dtype)
    return out


def _fake_paged_attention(q: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.empty_like(q)


def _paged_case(
    cache: torch.dtype, heads: int, kv_heads: int, dim: int, lengths: list[tuple[int, int]]
) -> tuple[Any, ...]:
    """lengths: per sequence (tokens in the context, new tokens); block size 4, blocks in a shuffled order."""
    noise = torch.Generator().manual_seed(heads)
    per_sequence = max(-(-length // 4) for length, _ in lengths)
    order = torch.randperm(per_sequence * len(lengths), generator=noise)
    k, v = (torch.randn(len(order), 4, kv_heads, dim, generator=noise).to(cache) for _ in range(2))
    starts = torch.tensor([0] + [new for _, new in lengths]).cumsum(0)
    q = torch.randn(int(starts[-1]), heads, dim, generator=noise)
    scale = torch.tensor(0.5) if cache in FP8_MAX else None
    tables = order.view(len(lengths), per_sequence).int(), torch.tensor([n for n, _ in lengths]).int(), starts.int()
    return q if cache in FP8_MAX else q.to(cache), k, v, *tables, scale, scale, dim**-0.5


def prompt_case(
    cache: torch.dtype, heads: int, kv_heads: int, dim: int, lengths: list[tuple[int, int]], *options: Any
) -> tuple[Any, ...]:
    """As `_paged_case`, with BF16 queries over any cache, and with window, soft cap and sinks where given."""
    q, *others = _paged_case(cache, heads, kv_heads, dim, lengths)
    return q.bfloat16(), *others, *options


def _paged_cases() -> list[Case]:
    mixes = {"decode": [(9, 1), (1, 1), (4, 1)], "prefill": [(7, 7), (5, 5)], "mixed": [(13, 5), (6, 1), (3, 3)]}
    grid = product(
        (torch.float32, torch.bfloat16, torch.float8_e4m3fn), ((4, 2, 16), (3, 3, 8), (8, 1, 20)), mixes.items()
    )
    plain = [Case(f"{c} {h} {mix}", partial(_paged_case, c, *h, lengths)) for c, h, (mix, lengths) in grid]
    return [*plain, *_paged_option_cases()]


def _paged_option_case(cache: torch.dtype, *options: Any) -> tuple[Any, ...]:
    return *_paged_case(cache, 4, 2, 16, [(90, 1), (1, 1), (70, 40)]), *options


def _paged_option_cases() -> list[Case]:
    """Window, soft cap, sinks."""
    sinks = torch.tensor([0.5, -4.0, 3.0, 0.0])
    found = ((8,), (33, None, sinks), (None, 2.0), (5, 0.5, sinks))
    grid = product((torch.float32, torch.bfloat16, torch.float8_e4m3fn), found)
    return [Case(f"{c} {options}", partial(_paged_option_case, c, *options)) for c, options in grid]


define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens,"
    " Tensor query_starts, Tensor? k_scale_inv, Tensor? v_scale_inv, float softmax_scale,"
    " int? window=None, float? softcap=None, Tensor? sinks=None) -> Tensor",
    paged_attention,
    fake=_fake_paged_attention,
    cases=_paged_cases,
)


def _write(x: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    if cache.dtype in FP8_MAX:
        x = saturate(x.float() if scale is None else x.float() * scale, cache.dtype)
    kept = slots >= 0
    cache.view(-1, *cache.shape[2:])[slots[kept]] = x[kept].to(cache.dtype)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write k and v [T, kv_heads, head_dim] into their slots (block * block_size + offset; negative: skip).

    An FP8 cache stores saturate(x * scale), scale FP32 [] or None for 1.
    """
    _write(k, k_cache, slots, k_scale)
    _write(v, v_cache, slots, v_scale)


def _write_case(cache: torch.dtype, scale: float | None) -> tuple[Any, ...]:
    k, v = tiles(5, 3 * 8, torch.bfloat16).view(5, 3, 8), tiles(5, 3 * 8, torch.bfloat16, 1).view(5, 3, 8)
    caches = [torch.zeros(4, 4, 3, 8).to(cache) for _ in range(2)]
    given = None if scale is None else torch.tensor(scale)
    return k, v, *caches, torch.tensor([3, 9, -1, 0, 15]), given, given


def _write_cases() -> list[Case]:
    plain = [Case(f"{dtype}", partial(_write_case, dtype, None)) for dtype in (torch.bfloat16, torch.float32, *FP8_MAX)]
    return [*plain, Case("e4m3, scale 4.5", partial(_write_case, torch.float8_e4m3fn, 4.5))]


define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? k_scale,"
    " Tensor? v_scale) -> ()",
    write_kv,
    fake=fake_nothing,
    cases=_write_cases,
)
