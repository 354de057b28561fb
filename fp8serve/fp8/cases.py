"""CASES: one list of inputs per op, for the tests of every kernel, for gradient checks and for benchmarks.

The casts see another magnitude in every tile (a wrong scale cannot hide among equal ones) and hostile values: zeros,
subnormals, limits, infinities, NaN, ragged edges, empty and non-contiguous tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.reference import BLOCK, FLT_MAX, FP8_MAX, amax, rms_norm, saturate, silu_mul
from fp8serve.fp8.reference_packed import pack_weight, packed_shape


@dataclass(frozen=True)
class Case:
    """One input of an op: `make()` gives fresh arguments, always the same values."""

    name: str
    make: Callable[[], tuple[Any, ...]]


def _tiles(rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Noise whose magnitude differs in every 16x16 tile by up to 2^12, so that no two blocks share a scale."""
    noise = torch.Generator().manual_seed(seed)
    magnitude = torch.exp2(torch.randint(-6, 7, (-(-rows // 16), -(-cols // 16)), generator=noise).float())
    spread = magnitude.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :cols]
    return (torch.randn(rows, cols, generator=noise) * spread).to(dtype)


def _hostile(dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros of both signs, subnormals, the limits of both formats and their neighbours, infinities, NaN."""
    edges = [
        0.0,
        1e-45,
        1e-40,
        2.0**-10,
        2.0**-9,
        2.0**-17,
        447.0,
        448.0,
        464.0,
        465.0,
        57344.0,
        61439.0,
        61440.0,
        FLT_MAX,
    ]
    row = torch.tensor([*edges, torch.inf, torch.nan])
    return torch.stack([row, -row, row.roll(3), torch.zeros(16), torch.full((16,), torch.nan), row * 1e-30]).to(dtype)


def _inputs() -> dict[str, Callable[[], Tensor]]:
    """The tensors every cast is tried on."""
    return {
        "tiles 64x256": lambda: _tiles(64, 256),
        "tiles bf16 ragged 67x300": lambda: _tiles(67, 300, torch.bfloat16),
        "fp16 3x129": lambda: _tiles(3, 129, torch.float16),
        "hostile": _hostile,
        "hostile bf16": lambda: _hostile(torch.bfloat16),
        "transposed view": lambda: _tiles(40, 20).t(),
        "strided view": lambda: _tiles(20, 80)[:, ::2],
        "one element": lambda: torch.tensor([[-3.0]]),
        "no rows": lambda: torch.empty(0, 128),
        "all zeros": lambda: torch.zeros(130, 130, dtype=torch.bfloat16),
        "tiny": lambda: _tiles(5, 140) * 1e-38,
    }


def _cast_cases(*rest: tuple[Any, ...]) -> list[Case]:
    def make(x: Callable[[], Tensor], dtype: torch.dtype, extra: tuple[Any, ...]) -> tuple[Any, ...]:
        return (x(), dtype, *extra)

    grid = product(_inputs().items(), FP8_MAX, rest)
    return [Case(f"{name}, {dtype}, {extra}", partial(make, x, dtype, extra)) for (name, x), dtype, extra in grid]


def _given_scale_cases() -> list[Case]:
    def make(x: Callable[[], Tensor], dtype: torch.dtype, scale: float) -> tuple[Any, ...]:
        return x(), torch.tensor(scale), dtype

    grid = product(_inputs().items(), FP8_MAX, (1.0, 7.3, 1e-3, FLT_MAX))
    return [Case(f"{name}, {dtype}, scale {scale}", partial(make, x, dtype, scale)) for (name, x), dtype, scale in grid]


def _scales(rows: int, cols: int, seed: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shapes = {"tensor": (), "row": (rows, 1), "1x128": (rows, -(-cols // BLOCK))}
    shapes["128x128"] = (-(-rows // BLOCK), -(-cols // BLOCK))
    return {name: torch.exp2(torch.randn(shape, generator=noise)) for name, shape in shapes.items()}


def _codes(rows: int, cols: int, dtype: torch.dtype, seed: int) -> Tensor:
    return saturate(_tiles(rows, cols, seed=seed), dtype)


def _mm_case(
    m: int, n: int, k: int, a: torch.dtype, b: torch.dtype, kinds: tuple[str, str], out: torch.dtype
) -> tuple[Any, ...]:
    bias = torch.linspace(-2, 2, n).to(out) if n % 2 else None
    scales = _scales(m, k, 3)[kinds[0]], _scales(n, k, 4)[kinds[1]]
    return _codes(m, k, a, 1), _codes(n, k, b, 2), *scales, bias, out


def _mm_cases() -> list[Case]:
    e4m3, e5m2 = FP8_MAX
    shapes = [(1, 5, 16), (3, 130, 200), (65, 33, 129), (128, 128, 256), (17, 1, 1), (0, 8, 16), (4, 0, 16), (5, 6, 0)]
    formats = [(e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2), (e5m2, e5m2)]
    kinds = [
        ("tensor", "tensor"),
        ("row", "row"),
        ("1x128", "128x128"),
        ("1x128", "1x128"),
        ("tensor", "row"),
        ("row", "128x128"),
    ]
    grid = [
        (s, f, kind, torch.float32) for s, (f, kind) in product(shapes, zip(formats + formats[:2], kinds, strict=True))
    ]
    grid += [((9, 31, 77), formats[0], kinds[0], out) for out in (torch.bfloat16, torch.float16)]
    return [Case(f"{s} {f} {kind} {out}", partial(_mm_case, *s, *f, kind, out)) for s, f, kind, out in grid]


def _states(length: int, count: int) -> tuple[Any, ...]:
    noise = torch.Generator().manual_seed(length)
    histories = [torch.randn(length, generator=noise).abs() * 10.0 ** (i - 3) for i in range(count)]
    for history, staged in zip(histories, (0.0, torch.inf, 1e-38, FLT_MAX, torch.nan), strict=False):
        history[0] = staged
    scales = [torch.tensor(7.0 + i) for i in range(count)]
    counters = [[torch.tensor(i % 3) for i in range(count)] for _ in range(2)]
    return scales, histories, *counters, [448.0 if i % 2 else 57344.0 for i in range(count)]


def _update_cases() -> list[Case]:
    def make(length: int, count: int, *rest: Any) -> tuple[Any, ...]:
        return *_states(length, count), *rest

    grid = product((1, 2, 3, 16, 1024), (1, 9), ((0, 1, "max"), (0, 1, "most_recent"), (3, 2, "max"), (-2, 1, "max")))
    return [Case(f"N={n}, {s} states, {rest}", partial(make, n, s, *rest)) for n, s, rest in grid]


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


def _write_case(cache: torch.dtype, scale: float | None) -> tuple[Any, ...]:
    k, v = _tiles(5, 3 * 8, torch.bfloat16).view(5, 3, 8), _tiles(5, 3 * 8, torch.bfloat16, 1).view(5, 3, 8)
    caches = [torch.zeros(4, 4, 3, 8).to(cache) for _ in range(2)]
    given = None if scale is None else torch.tensor(scale)
    return k, v, *caches, torch.tensor([3, 9, -1, 0, 15]), given, given


def _write_cases() -> list[Case]:
    plain = [Case(f"{dtype}", partial(_write_case, dtype, None)) for dtype in (torch.bfloat16, torch.float32, *FP8_MAX)]
    return [*plain, Case("e4m3, scale 4.5", partial(_write_case, torch.float8_e4m3fn, 4.5))]


def _normal(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _fused_rows(case: Callable[[torch.dtype, int, int], tuple[Any, ...]]) -> list[Case]:
    grid = product((torch.bfloat16, torch.float32), ((3, 64), (5, 70), (0, 16)))
    return [Case(f"{dtype} {shape}", partial(case, dtype, *shape)) for dtype, shape in grid]


def _mm_bf16_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    return _normal(rows, cols, torch.bfloat16), _normal(9, cols, torch.bfloat16, 1), _normal(1, 9, dtype)[0], dtype


def _add_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    args = _mm_case(rows, 11, cols, torch.float8_e4m3fn, torch.float8_e4m3fn, ("row", "tensor"), dtype)
    return *args[:5], _normal(rows, 11, dtype)


def _codes_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    """For FP8 output: a row of zeros, and sums on both sides of the largest code."""
    *args, _ = _mm_case(rows, 11, cols, torch.float8_e4m3fn, torch.float8_e4m3fn, ("row", "tensor"), dtype)
    args[0][:1] = 0
    return *args, torch.tensor(0.03), torch.float8_e4m3fn


def _rotary_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    dim = cols // 2 * 2
    q, k, v = (_normal(rows, heads * dim, dtype, heads).view(rows, heads, dim) for heads in (4, 2, 2))
    angle = _normal(rows, dim // 2, torch.float32).repeat(1, 2).unsqueeze(1)
    caches = [torch.zeros(2, 4, 2, dim, dtype=dtype) for _ in range(2)]
    return q, k, v, angle.cos().to(dtype), angle.sin().to(dtype), *caches, torch.arange(rows), None, None


def _turn_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    q, _, _, cos, sin, *_ = _rotary_case(dtype, rows, cols)
    return q, cos, sin


def _plain_norm_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    return _normal(rows, cols, dtype), torch.linspace(0.5, 2, cols).to(dtype), 1e-6


def _plain_silu_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    return _normal(rows, cols, dtype), _normal(rows, cols, dtype, 1)


def _upstream(case: Callable[[torch.dtype, int, int], tuple[Any, ...]]) -> list[Case]:
    """The cases of a gradient: what flows in, then the arguments of the op."""
    return _fused_rows(lambda dtype, rows, cols: (_normal(rows, cols, dtype, 7), *case(dtype, rows, cols)))


def _norm_case(dtype: torch.dtype, shape: tuple[int, int], fp8: torch.dtype, bias: bool | None) -> tuple[Any, ...]:
    """bias None: RMSNorm, which has no such argument."""
    x, weight = _tiles(*shape, dtype), torch.linspace(0.5, 2, shape[1]).to(dtype)
    shift = () if bias is None else (weight - 1 if bias else None,)
    return x, weight, *shift, 1e-6, torch.tensor(64.0), fp8


def _norm_cases(*biases: bool | None) -> list[Case]:
    grid = product((torch.float32, torch.bfloat16), ((5, 64), (33, 300)), FP8_MAX, biases)
    return [Case(f"{d} {s} {fp8} bias {b}", partial(_norm_case, d, s, fp8, b)) for d, s, fp8, b in grid]


def _silu_case(dtype: torch.dtype, shape: tuple[int, int], fp8: torch.dtype) -> tuple[Any, ...]:
    return _tiles(*shape, dtype), _tiles(*shape, dtype, seed=1), torch.tensor(3.0), fp8


def _silu_cases() -> list[Case]:
    grid = product((torch.float32, torch.bfloat16), ((5, 64), (33, 300)), FP8_MAX)
    return [Case(f"{d} {s} {fp8}", partial(_silu_case, d, s, fp8)) for d, s, fp8 in grid]


def _sample_case(rows: int, vocab: int, filters: bool) -> tuple[Any, ...]:
    """Logits with ties and with tokens that are forbidden; every row with other filters, when there are any."""
    noise = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=noise).mul(3).bfloat16().float()
    logits[:, 3::7] = -torch.inf
    turn = torch.arange(rows)
    temperature, uniform = torch.rand(2, rows, dtype=torch.float64, generator=noise)
    top_k = turn % 4 * 5 if filters else torch.zeros_like(turn)
    top_p = 1 - turn % 3 * 0.3 if filters else torch.ones(rows)
    min_p = turn % 2 * 0.05 if filters else torch.zeros(rows)
    return logits, 0.5 + temperature, top_k, top_p.double(), min_p.double(), uniform


def _sample_cases() -> list[Case]:
    grid = product((1, 12), (1, 37, 3000), (False, True))
    return [Case(f"{r} x {v}, filters {f}", partial(_sample_case, r, v, f)) for r, v, f in grid]


def _watch_case(
    rows: int, cols: int, source: str, dtype: torch.dtype, scale: float, live: int | None
) -> tuple[Any, ...]:
    """Sources of one sort (plain, norm, gated) in rows that lie apart, and what their cast found."""
    x, up = torch.chunk(_normal(rows, 2 * cols, dtype, 1), 2, 1)
    other, eps = {"plain": (None, None), "norm": (_normal(1, cols, dtype, 2)[0], 1e-5), "gated": (up, None)}[source]
    y = x if other is None else silu_mul(x, other) if eps is None else rms_norm(x, other, eps)
    counters = torch.tensor(0.5), torch.tensor(5)
    return x, other, eps, torch.tensor(scale), amax(y), *counters, None if live is None else torch.tensor(live)


def _watch_cases() -> list[Case]:
    sizes, dtypes = ((3, 64), (70, 130), (130, 1032), (0, 16)), (torch.float32, torch.bfloat16, torch.float16)
    grid = product(sizes, ("plain", "norm", "gated"), dtypes, (1.0, 230.0), (None, 2))
    return [Case(f"{s} {k} {d} scale {f} rows {n}", partial(_watch_case, *s, k, d, f, n)) for s, k, d, f, n in grid]


def _turned_case(rows: int, cols: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (_codes(rows, cols, dtype, 1),)


def _turned_cases() -> list[Case]:
    shapes = ((128, 256), (144, 48), (17, 33), (16, 7), (0, 8), (3, 0))
    return [Case(f"{s} {d}", partial(_turned_case, *s, d)) for s, d in product(shapes, FP8_MAX)]


PACKABLE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16)


def _weight(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return _normal(rows, cols, dtype, 3) if dtype == torch.bfloat16 else _codes(rows, cols, dtype, 3)


def _pack_case(rows: int, cols: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return _weight(rows, cols, dtype), torch.zeros(packed_shape(rows, cols)).to(dtype)


def _pack_cases() -> list[Case]:
    shapes = ((16, 8), (48, 72), (32, 1024), (16, 2064))
    return [Case(f"{s} {d}", partial(_pack_case, *s, d)) for s, d in product(shapes, PACKABLE)]


def _packed_mm_case(rows: int, dtype: torch.dtype, blocks: bool, onto: bool) -> tuple[Any, ...]:
    """A product of [rows, 1160] with a packed [144, 1160]."""
    n, k = 144, 1160
    weight, packed = _pack_case(n, k, dtype)
    pack_weight(weight, packed)
    residual = _normal(rows, n, torch.bfloat16, 5) if onto else None
    if dtype == torch.bfloat16:
        return _weight(rows, k, dtype), packed, None, None, _normal(n, 1, torch.float32, 6)[:, 0], residual, dtype
    across = -(-k // BLOCK)
    scales = (_normal(size, across, torch.float32, 8).abs() + 0.5 for size in (rows, -(-n // BLOCK)))
    a_scale, b_scale = scales if blocks else (torch.tensor(0.5), torch.tensor(0.25))
    return _codes(rows, k, torch.float8_e4m3fn, 4), packed, a_scale, b_scale, None, residual, torch.bfloat16


def _packed_mm_cases() -> list[Case]:
    grid = product((1, 8, 70), PACKABLE, (False, True), (False, True))
    return [Case(f"{m} rows {d} blocks {b} onto {o}", partial(_packed_mm_case, m, d, b, o)) for m, d, b, o in grid]


CASES: dict[str, list[Case]] = {
    "quantize": _given_scale_cases(),
    "quantize_transpose": _given_scale_cases(),
    "rms_norm_quantize": _norm_cases(None),
    "layer_norm_quantize": _norm_cases(True, False),
    "silu_mul_quantize": _silu_cases(),
    "quantize_current": _cast_cases((False,), (True,)),
    "quantize_rowwise": _cast_cases((False,), (True,)),
    "quantize_block": _cast_cases((1, False), (128, False), (1, True)),
    "scaled_mm": _mm_cases(),
    "scaled_mm_quantize": _fused_rows(_codes_case),
    "delayed_update": _update_cases(),
    "paged_attention": _paged_cases(),
    "write_kv": _write_cases(),
    "scaled_mm_add": _fused_rows(_add_case),
    "mm": _fused_rows(_mm_bf16_case),
    "pack_weight": _pack_cases(),
    "packed_mm": _packed_mm_cases(),
    "rotary_write_kv": _fused_rows(_rotary_case),
    "rms_norm": _fused_rows(_plain_norm_case),
    "rms_norm_backward": _upstream(_plain_norm_case),
    "silu_mul": _fused_rows(_plain_silu_case),
    "silu_mul_backward": _upstream(_plain_silu_case),
    "rotary": _fused_rows(_turn_case),
    "sample": _sample_cases(),
    "count_saturated": _watch_cases(),
    "transpose_codes": _turned_cases(),
}
