"""Attention over a paged KV cache, writing to the cache, rotary position embedding, and the gradients of causal
attention. With these gradients, training can run the same forward op as serving."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX, saturating_cast
from fp8serve.fp8.ops.gemm import mm_case
from fp8serve.fp8.ops.inputs import dense_like, fake_like_first, fake_nothing, random_normal, row_cases, tiled_noise
from fp8serve.fp8.ops.registry import Case, define, define_composed


def _cached_tokens(cache: Tensor, blocks: Tensor, length: int, scale_inv: Tensor | None) -> Tensor:
    """Returns the first `length` tokens of a sequence from its blocks, FP64 [kv_heads, length, head_dim]."""
    tokens = cache[blocks.long()].flatten(0, 1)[:length]
    values = tokens.float() if scale_inv is None else tokens.float() * scale_inv
    return values.double().transpose(0, 1)


def attention_mask(queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Returns a mask, bool [queries, length], that is True where a query, one of the last tokens, does not see a token.

    A token sees itself and all tokens before it, or with a window (>= 1) the last `window` of these.
    """
    distance = torch.arange(length, device=device) - torch.arange(length - queries, length, device=device).unsqueeze(1)
    return distance > 0 if window is None else (distance > 0) | (distance <= -window)


def attention_weights(scores: Tensor, mask: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Returns the softmax over the keys of scores [..., T, L], with zeros where `mask`, bool [T, L], is True.

    With `softcap`, scores become softcap * tanh(scores / softcap). `sinks` are logits [..., 1, 1] that are added to the
    denominator.
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(mask, -torch.inf)
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
    """Returns the causal attention, FP64 [T, H, D], of the last T of L tokens: q [T, H, D], FP64 k and v [KV, L, D]."""
    queries, heads, dim = q.shape
    kv_heads, length, _ = k.shape
    grouped = q.double().view(queries, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = grouped @ k.unsqueeze(1).transpose(2, 3) * softmax_scale  # [KV, group, T, L]
    if sinks is not None:
        sinks = sinks.view(kv_heads, heads // kv_heads, 1, 1)
    weights = attention_weights(scores, attention_mask(queries, length, window, q.device), softcap, sinks)
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
    """Returns the causal attention of new tokens over the paged caches of their sequences, of q's shape.

    q [T, heads, head_dim] has the new tokens of all sequences, and query_starts int32 [S+1] the first token of each.
    Caches are [blocks, block_size, kv_heads, head_dim]. block_tables int32 [S, max_blocks] are the blocks of each
    sequence. context_lens int32 [S] include the new tokens. With `window` a token sees itself and the `window` - 1
    tokens before it. `softcap` and `sinks`, FP32 [heads], are as in `attention_weights`. Each sequence is computed
    separately in FP64 and rounded once at the end, so the result depends neither on other sequences nor on the chunks
    in which a prompt is processed.
    """
    out = torch.empty_like(q)
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        blocks = block_tables[i, : -(-length // k_cache.shape[1])]
        k, v = (
            _cached_tokens(k_cache, blocks, length, k_scale_inv),
            _cached_tokens(v_cache, blocks, length, v_scale_inv),
        )
        if rows.start != rows.stop:
            out[rows] = attend(q[rows], k, v, softmax_scale, window, softcap, sinks).to(q.dtype)
    return out


def _paged_case(
    cache: torch.dtype, heads: int, kv_heads: int, dim: int, lengths: list[tuple[int, int]]
) -> tuple[Any, ...]:
    """Arguments with block size 4 and shuffled blocks; `lengths` are (tokens in the context, new tokens)."""
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
    """Returns the arguments of `_paged_case` with BF16 queries, and with `options`: window, soft cap and sinks."""
    q, *arguments = _paged_case(cache, heads, kv_heads, dim, lengths)
    return q.bfloat16(), *arguments, *options


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
    """Cases with a window, a soft cap and sinks."""
    sinks = torch.tensor([0.5, -4.0, 3.0, 0.0])
    choices = ((8,), (33, None, sinks), (None, 2.0), (5, 0.5, sinks))
    grid = product((torch.float32, torch.bfloat16, torch.float8_e4m3fn), choices)
    return [Case(f"{c} {options}", partial(_paged_option_case, c, *options)) for c, options in grid]


define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens,"
    " Tensor query_starts, Tensor? k_scale_inv, Tensor? v_scale_inv, float softmax_scale,"
    " int? window=None, float? softcap=None, Tensor? sinks=None) -> Tensor",
    paged_attention,
    fake=fake_like_first,
    cases=_paged_cases,
)


def _write(x: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    if cache.dtype in FP8_MAX:
        x = saturating_cast(x.float() if scale is None else x.float() * scale, cache.dtype)
    in_cache = slots >= 0
    cache.view(-1, *cache.shape[2:])[slots[in_cache]] = x[in_cache].to(cache.dtype)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Writes k and v [T, kv_heads, head_dim] into their slots (block * block_size + offset); skips negative slots.

    An FP8 cache stores the saturating cast of x * scale; scale is FP32 [], or None for 1.
    """
    _write(k, k_cache, slots, k_scale)
    _write(v, v_cache, slots, v_scale)


def _write_case(cache: torch.dtype, scale: float | None) -> tuple[Any, ...]:
    k, v = tiled_noise(5, 3 * 8, torch.bfloat16).view(5, 3, 8), tiled_noise(5, 3 * 8, torch.bfloat16, 1).view(5, 3, 8)
    caches = [torch.zeros(4, 4, 3, 8).to(cache) for _ in range(2)]
    scales = None if scale is None else torch.tensor(scale)
    return k, v, *caches, torch.tensor([3, 9, -1, 0, 15]), scales, scales


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


def _rotary_write_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    dim = cols // 2 * 2
    q, k, v = (random_normal(rows, heads * dim, dtype, heads).view(rows, heads, dim) for heads in (4, 2, 2))
    angle = random_normal(rows, dim // 2, torch.float32).repeat(1, 2).unsqueeze(1)
    caches = [torch.zeros(2, 4, 2, dim, dtype=dtype) for _ in range(2)]
    return q, k, v, angle.cos().to(dtype), angle.sin().to(dtype), *caches, torch.arange(rows), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, heads, D] by cos and sin [T, 1, D]; dimension i of a head forms a pair with dimension i + D / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rotary_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    q, _, _, cos, sin, *_ = _rotary_write_case(dtype, rows, cols)
    return q, cos, sin


define(
    "rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    rotary,
    fake=fake_like_first,
    cases=partial(row_cases, _rotary_case),
)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """Rotates q [T, heads, D] and k [T, kv_heads, D], writes k and v to the cache, and returns the rotated q."""
    write_kv(rotary(k, cos, sin), v, k_cache, v_cache, slots, k_scale, v_scale)
    return rotary(q, cos, sin)


define(
    "rotary_write_kv(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache,"
    " Tensor slots, Tensor? k_scale, Tensor? v_scale) -> Tensor",
    rotary_write_kv,
    fake=fake_like_first,
    cases=partial(row_cases, _rotary_write_case),
)


def stored_rotary_mm(
    ops: Any,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *norm: Any,
) -> Tensor:
    """Multiplies a [T, K] by b [N, K] as stored_mm does, in BF16. A row of the product has the query heads, then as
    many key heads and value heads as the caches have. Rotates q and k, writes k and v to the caches, and returns the
    rotated q."""
    kv_heads, dim = k_cache.shape[2:]
    y = ops.stored_mm(a, b, a_scale_inv, b_scale_inv, bias, torch.bfloat16, *norm).view(len(a), -1, dim)
    q, k, v = y.split_with_sizes((y.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    return ops.rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale)  # type: ignore[no-any-return]


def _fake_rotary_mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    kv_heads, dim = rest[5].shape[2:]
    return a.new_empty((a.shape[0], b.shape[0] // dim - 2 * kv_heads, dim), dtype=torch.bfloat16)


def rotary_mm_case(
    sizes: tuple[int, int, int, int], inputs: int, kind: str, cache: torch.dtype, is_scaled: bool
) -> tuple[Any, ...]:
    """Arguments for (tokens, heads, kv_heads, head_dim), with a bias if the cache has no scales, and slots of which one
    is skipped."""
    tokens, heads, kv_heads, dim = sizes
    e4m3, rows = torch.float8_e4m3fn, (heads + 2 * kv_heads) * dim
    *operands, _, _ = mm_case(tokens, rows, inputs, e4m3, e4m3, ("tensor", kind), torch.bfloat16)
    angle = random_normal(tokens, dim // 2, torch.float32).repeat(1, 2).unsqueeze(1)
    caches = [torch.zeros(tokens, 2, kv_heads, dim).to(cache) for _ in range(2)]
    slots = torch.arange(tokens) * 2 + 1
    slots[tokens // 2 :][:1] = -1
    scales = (torch.tensor(3.5), torch.tensor(0.25)) if is_scaled else (None, None)
    bias = None if is_scaled else torch.linspace(-2, 2, rows).bfloat16()
    return *operands, bias, angle.cos().bfloat16(), angle.sin().bfloat16(), *caches, slots, *scales


def _rotary_mm_cases() -> list[Case]:
    """Cases with heads of every usual size, shared keys, odd numbers of heads, and up to 17 tokens."""
    sizes = ((1, 3, 1, 64), (5, 4, 2, 80), (16, 3, 3, 16), (2, 5, 1, 96), (9, 2, 1, 128), (17, 2, 2, 32), (3, 2, 1, 24))
    formats = ((torch.bfloat16, False), (torch.float8_e4m3fn, True), (torch.float8_e4m3fn, False))
    inputs = {torch.bfloat16: 1200, torch.float8_e4m3fn: 144, torch.float32: 208}
    grid = [(s, k, *f) for s, k in product(sizes, ("tensor", "row")) for f in formats]
    grid.append(((4, 2, 1, 32), "row", torch.float32, False))
    return [
        Case(f"{s} {kind} {cache} scales {scaled}", partial(rotary_mm_case, s, inputs[cache], kind, cache, scaled))
        for s, kind, cache, scaled in grid
    ]


define_composed(
    "stored_rotary_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor cos, Tensor sin,"
    " Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? k_scale, Tensor? v_scale,"
    " Tensor? norm_weight=None, float? eps=None,"
    " Tensor? norm_scale=None, Tensor(c!)? norm_amax=None, Tensor(d!)? norm_saturated=None,"
    " Tensor? norm_rows=None) -> Tensor",
    stored_rotary_mm,
    fake=_fake_rotary_mm,
    cases=_rotary_mm_cases,
    kernel_devices=("cuda",),
)


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
    """Returns the gradients (d_q, d_k, d_v, d_sinks) of causal attention within each sequence.

    `grad` is the gradient of the output.

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
        d_q[rows], d_k[rows], d_v[rows], d_sequence_sinks = _sequence_backward(
            dy, a, b, c, softmax_scale, window, softcap, sinks
        )
        d_sinks += d_sequence_sinks
        start += length
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks.float()


def _sequence_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Gradients:
    """Returns the gradients of one sequence in FP64.

    With S = Q K^T (after the soft cap), P = softmax(S) and dP = dO V^T, the gradient of S is P (dP - D), where D is the
    sum of P dP over the keys. A sink has no value, so its dP is 0.
    """
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    grad, q, k, v = (t.transpose(0, 1) for t in (grad, q, k, v))  # [heads or kv_heads, L, head_dim]
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    scores = q @ k.mT * softmax_scale
    sink_logits = None if sinks is None else sinks.view(-1, 1, 1)
    mask = attention_mask(q.shape[1], q.shape[1], window, q.device)
    weights = attention_weights(scores, mask, softcap, sink_logits)
    d_weights = grad @ v.mT
    weighted_sum = (weights * d_weights).sum(-1, keepdim=True)
    d_scores = weights * (d_weights - weighted_sum)
    if softcap is not None:
        d_scores = d_scores * (1 - torch.tanh(scores / softcap).square())
    per_head = (d_scores.mT @ q * softmax_scale, weights.mT @ grad)
    d_k, d_v = (d.view(kv_heads, group, *d.shape[1:]).sum(1).transpose(0, 1) for d in per_head)
    d_sinks = -((1 - weights.sum(-1)) * weighted_sum[..., 0]).sum(-1) * (sinks is not None)
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
    options = [([90, 1, 130], 4, 2, 16, *extra) for extra in ((8,), (33, None, sinks), (None, 2.0), (70, 0.5, sinks))]
    return [Case(f"{one}", partial(_case, *one)) for one in [*plain, *options]]


define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, int[] lengths, float softmax_scale,"
    " int? window=None, float? softcap=None, Tensor? sinks=None)"
    " -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_sinks)",
    attention_backward,
    fake=_fake,
    cases=_cases,
    kernel_devices=("cpu",),
)
