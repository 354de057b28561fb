"""Every op in plain PyTorch: the specification, the fallback where no kernel was built, and the oracle of the tests.

The inputs it is tried on are in cases.py.

All arithmetic on values is FP32 unless a comment says otherwise. Rules that hold everywhere (docs/numerics.md has the
table with the test of each row):

* A cast rounds to nearest even and saturates: beyond the maximum, infinities included, it gives +-max; NaN stays NaN.
  torch's own cast to E5M2 does not saturate, so values are clamped first (clamp keeps NaN).
* `scale` multiplies to quantize, `scale_inv = 1 / scale` multiplies to dequantize. Both FP32.
* `amax` is the largest magnitude, NaN elements ignored; of nothing it is 0. It may be infinite.
* `a / b` is always a true division: `float / tensor` in torch is a reciprocal and a product, one rounding too many.

Shapes: `scale_inv` is [] per tensor, [rows, 1] per row, [rows, ceil(cols/128)] for 1x128 blocks and
[ceil(rows/128), ceil(cols/128)] for 128x128 blocks.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

BLOCK = 128
FLT_MAX = torch.finfo(torch.float32).max
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# An element is cut off when |x * scale| is above this: the maximum and four steps of FP32, which is what the roundings
# of a scale made for x, of its inverse and of the product can add (docs/numerics.md).
CUT_OFF = {torch.float8_e4m3fn: 448.0 + 4 * 2.0**-15, torch.float8_e5m2: 57344.0 + 4 * 2.0**-8}


def amax(x: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
    """Largest |x| in FP32 over `dims` (default all), ignoring NaN; 0 where there is nothing."""
    magnitude = x.abs().float().nan_to_num(nan=0.0, posinf=torch.inf)
    if x.numel() == 0:
        return magnitude.sum(dims) if dims else magnitude.sum()  # zeros of the reduced shape
    return magnitude.amax(dims)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast FP32 to FP8, contiguous: nearest even, +-max beyond the range, NaN stays NaN."""
    limit = FP8_MAX[dtype]
    return x.clamp(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def scale_from_amax(amax: Tensor, fp8_max: float, power_2: bool) -> Tensor:
    """Current scaling: `fp8_max / amax`, at most FLT_MAX; 1 where amax is 0, infinite or NaN; power_2 rounds down."""
    scale = (torch.full_like(amax, fp8_max) / amax).clamp(max=FLT_MAX)
    if power_2:
        scale = (scale.view(torch.int32) & -(2**23)).view(torch.float32)  # sign and exponent, mantissa cleared
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def expand(scale: Tensor, rows: int, cols: int) -> Tensor:
    """A scale of any granularity as something that broadcasts over [rows, cols]."""
    if scale.dim() == 0:
        return scale
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(BLOCK, 0)[:rows]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(BLOCK, 1)[:, :cols]


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize by a given scale []: (q, amax of x)."""
    return saturate(x.float() * scale, dtype), amax(x)


def quantize_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [M, K] by a given scale []: (q [M, K], its transpose [K, M], amax of x), all in one read of x."""
    q, largest = quantize(x, scale, dtype)
    return q, q.t().clone(memory_format=torch.contiguous_format), largest


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension: FP32 up to the rounding to x's dtype, then the product."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension, as torch computes it in x's dtype."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; silu is rounded to its dtype before the product."""
    return F.silu(gate) * up


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x [M, K], quantized by a given scale []: (q, amax)."""
    return quantize(rms_norm(x, weight, eps), scale, dtype)


def layer_norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`layer_norm` of x [M, K], quantized by a given scale []: (q, amax)."""
    return quantize(layer_norm(x, weight, bias, eps), scale, dtype)


def silu_mul_quantize(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`silu_mul` of gate and up [M, K], quantized by a given scale []: (q, amax)."""
    return quantize(silu_mul(gate, up), scale, dtype)


def quantize_current(x: Tensor, dtype: torch.dtype, power_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize by the tensor's own amax: (q, scale_inv [])."""
    scale = scale_from_amax(amax(x), FP8_MAX[dtype], power_2)
    return saturate(x.float() * scale, dtype), scale.reciprocal()


def quantize_rowwise(x: Tensor, dtype: torch.dtype, power_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] by the amax of each row: (q, scale_inv [M, 1])."""
    scale = scale_from_amax(amax(x, (1,)), FP8_MAX[dtype], power_2).unsqueeze(1)
    return saturate(x.float() * scale, dtype), scale.reciprocal()


def quantize_block(x: Tensor, dtype: torch.dtype, block_rows: int, power_2: bool) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] by the amax of each block of block_rows x 128, ragged edges padded with zeros."""
    rows, cols = x.shape
    padded = F.pad(x, (0, -cols % BLOCK, 0, -rows % block_rows))
    blocks = padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // BLOCK, BLOCK)
    scale = scale_from_amax(amax(blocks, (1, 3)), FP8_MAX[dtype], power_2)
    return saturate(x.float() * expand(scale, rows, cols), dtype), scale.reciprocal()


def dequantize(q: Tensor, scale_inv: Tensor) -> Tensor:
    """q [..., K] times its scale_inv, in FP32."""
    if scale_inv.dim() == 0:
        return q.float() * scale_inv
    return q.float() * expand(scale_inv, q.shape[0], q.shape[1])


def _is_block(scale_inv: Tensor, rows: int, cols: int) -> bool:
    return scale_inv.dim() == 2 and tuple(scale_inv.shape) not in {(rows, 1), (1, 1)}


def _padded(a: Tensor) -> Tensor:
    return F.pad(a, (0, 0, 0, -a.shape[0] % 8))


def _scaled_by(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """sums * a * b, rounded after each product. Where a is far from one and b on its other side, the first product may
    leave the range of FP32 though the second would bring it back: then 2^64 goes from one to the other, which moves no
    bit of a result that stays in range."""
    one = torch.ones((), device=sums.device)
    far_up, far_down = 2.0**64 * one, 2.0**-64 * one
    up, down = (a > far_up) & (b < 1), (a < far_down) & (b > 1)
    of_a = torch.where(up, far_down, torch.where(down, far_up, one))
    return sums * (a * of_a) * (b / of_a)


def scaled_mm(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """[M, K] x [N, K] -> [M, N], accumulated in FP32; the scales multiply the FP32 sums, bias is added before rounding.

    With block scales the operands are dequantized first, one FP32 rounding per element: as accurate as scaling the
    partial sum of every block, and one matmul instead of K/128. Rows are padded to a multiple of 8, because a BLAS adds
    in another order for few rows: so a row's result does not depend on the rows beside it.
    """
    rows = a.shape[0]
    with torch.autocast(a.device.type, enabled=False):  # a surrounding torch.autocast would make the matmul BF16
        if _is_block(a_scale_inv, *a.shape) or _is_block(b_scale_inv, *b.shape):
            out = (_padded(dequantize(a, a_scale_inv)) @ dequantize(b, b_scale_inv).t())[:rows]
        else:
            out = _scaled_by((_padded(a.float()) @ b.float().t())[:rows], a_scale_inv, b_scale_inv.t())
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def scaled_mm_quantize(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_scale: Tensor,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`scaled_mm` in FP32, quantized by a given scale []: (q [M, N], amax before the scale). No rounding between."""
    return quantize(scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, torch.float32), out_scale, out_dtype)


def _updated(
    scale: Tensor, history: Tensor, limit: Tensor, due: Tensor, algo: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Steps 3 to 6 of docs/numerics.md for S states at once: history [S, N] -> (scale, history, ran, nonfinite)."""
    staged = history[:, 0]
    dropped = ~staged.isfinite()
    ran = (staged > 0) & ~dropped
    amax = staged if algo == "most_recent" else history.amax(1)
    fresh = ran & due & amax.isfinite()
    new_scale = torch.where(fresh, (limit / amax).clamp(max=FLT_MAX), scale)
    zero = torch.zeros_like(staged).unsqueeze(1)
    rotated = torch.cat([zero, history[:, 2:], staged.unsqueeze(1)], 1)[:, : history.shape[1]]
    waiting = torch.cat([zero, history[:, 1:]], 1)
    return new_scale, torch.where(ran.unsqueeze(1), rotated, waiting), ran, dropped


def delayed_update(
    scales: list[Tensor],
    amax_histories: list[Tensor],
    nonfinite: list[Tensor],
    steps: list[Tensor],
    fp8_maxes: list[float],
    margin: int,
    interval: int,
    algo: str,
) -> None:
    """The delayed-scaling update of any number of states, in place (docs/numerics.md).

    Per state: scale FP32 [], amax_history FP32 [N], nonfinite int64 [], steps int64 []. `steps` counts recorded steps;
    the scale is recomputed when it is a multiple of `interval` before counting, so the first step always counts.
    """
    for length in {h.shape[0] for h in amax_histories}:
        chosen = [i for i, h in enumerate(amax_histories) if h.shape[0] == length]
        picked = [[column[i] for i in chosen] for column in (scales, amax_histories, nonfinite, steps)]
        scale, history, bad, step = (torch.stack(column) for column in picked)
        limit = torch.tensor([fp8_maxes[i] / 2.0**margin for i in chosen], dtype=torch.float32, device=scale.device)
        scale, history, ran, dropped = _updated(scale, history, limit, step % interval == 0, algo)
        for column, values in zip(picked, (scale, history, bad + dropped, step + ran), strict=True):
            torch._foreach_copy_(column, list(values.unbind()))


def _gather(cache: Tensor, blocks: Tensor, length: int, scale_inv: Tensor | None) -> Tensor:
    """The first `length` tokens of a sequence from its blocks: [kv_heads, length, head_dim] in FP64."""
    tokens = cache[blocks.long()].flatten(0, 1)[:length]
    values = tokens.float() if scale_inv is None else tokens.float() * scale_inv
    return values.double().transpose(0, 1)


def hidden(queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [queries, length]: what the last `queries` of `length` tokens do not see.

    A token sees itself and those before it, with a window (>= 1) only the last `window` of these.
    """
    ahead = torch.arange(length, device=device) - torch.arange(length - queries, length, device=device).unsqueeze(1)
    return ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)


def attention_weights(scores: Tensor, unseen: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys: scores [..., T, L] in high precision, bool `unseen` [T, L] -> like scores.

    softcap: scores become softcap * tanh(scores / softcap). sinks: logits [..., 1, 1] that join the sum of weights.
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
    tanh(score / softcap). sinks FP32 [heads]: logits that join their head's sum of weights. Each sequence is computed
    alone and in FP64, rounded once at the end: its result does not depend on its neighbours, nor on how its prompt was
    cut into chunks.
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
