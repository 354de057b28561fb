"""The measurements of `bench ops`: every op at the sizes of a Llama of 1.1 billion parameters and of the linears on
which FP8 kernels are usually compared, beside torch's way of doing the same in BF16.

Every maker frees its tensors before the next one runs.

Every op of `fp8serve.fp8.ops` at the sizes of real models, beside torch in BF16 doing the same in the same run.

An entry (`entries.py`) states the minimum that an op must move and compute: the bytes of its inputs and outputs, each
once, and two operations per multiplication and addition. Divided by the time, these give GB/s and GFLOP/s. The larger
of their shares of this machine's measured peaks is the op's `share_of_peak`, its distance from the roofline. The peaks
are a read of a matrix far larger than the caches, which a kernel working from the caches can exceed, and torch's best
matrix product, which a kernel better than torch's can exceed.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.bench.figures import Call, fastest
from fp8serve.doctor import instruction_sets
from fp8serve.engine.packing import huge_pages
from fp8serve.fp8 import ops
from fp8serve.fp8.frozen import packed as packed_weight
from fp8serve.fp8.ops import OPS as REGISTERED
from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.ops.activation import silu_mul
from fp8serve.fp8.ops.norm import rms_norm
from fp8serve.fp8.ops.packing import packed_shape

OPS = torch.ops.fp8serve
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 2048, 5632, 32000, 32, 4, 64
LINEAR = {  # rows, out, in -> our goal as a multiple of the speed of torch's BF16
    (1, 4096, 4096): 4.0,
    (1, 14336, 4096): 3.0,
    (8, 4096, 4096): 2.0,
    (8, 14336, 4096): 2.0,
    (64, 4096, 4096): None,
    (512, 4096, 4096): 1.0,
    (512, 14336, 4096): 1.0,
}
MEMORY_BOUND = 8  # rows up to which reading a weight takes longer than multiplying by it
TURNS = 4  # weights, more than caches hold
BLOCK = 16  # tokens in a block of the paged cache


@dataclass(frozen=True)
class BenchCase:
    """One op at one size. `torch_bf16` does the same in BF16, or is None where torch has nothing like it.

    `goal`: the multiple of that speed that we aim for, if there is one.
    """

    op: str
    size: str
    call: Call
    torch_bf16: Call | None
    num_bytes: float
    flops: float = 0.0
    goal: float | None = None


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def _fp8(*shape: int) -> Tensor:
    return _noise(*shape).to(E4M3)


def _in_turn(calls: list[Call]) -> Call:
    turn = cycle(calls)
    return lambda: next(turn)()


def _torch_cast(x: Tensor) -> object:
    return x.abs().amax(), (x * 1.5).to(E4M3)


def _torch_unscaled_cast(x: Tensor) -> object:
    return x.abs().amax(), x.to(E4M3)


def _torch_cast_transpose(x: Tensor) -> object:
    return x.abs().amax(), (x * 1.5).to(E4M3).t().contiguous()


def _torch_transpose(q: Tensor) -> object:
    return q.t().contiguous()


def casts() -> Iterator[BenchCase]:
    """A 4096 x 4096 matrix; torch: abs-max, scale and cast. The goal is set against it without the scale, too."""
    x, scale = _noise(4096, 4096), torch.tensor(1.5)
    size, plain, moved = "4096 x 4096", partial(_torch_cast, x), 3.0 * x.numel()
    yield BenchCase("quantize", size, partial(OPS.quantize, x, scale, E4M3), plain, moved)
    unscaled = partial(_torch_unscaled_cast, x)
    call = partial(OPS.quantize, x, scale, E4M3)
    yield BenchCase("quantize", f"{size}, torch: no scale", call, unscaled, moved, goal=10.0)
    yield BenchCase("quantize_current", size, partial(OPS.quantize_current, x, E4M3, False), plain, moved)
    yield BenchCase("quantize_rowwise", size, partial(OPS.quantize_rowwise, x, E4M3, False), plain, moved)
    for rows in (1, 128):
        call = partial(OPS.quantize_block, x, E4M3, rows, False)
        yield BenchCase("quantize_block", f"{size}, {rows} x 128", call, plain, moved)
    both = partial(OPS.quantize_transpose, x, scale, E4M3)
    yield BenchCase("quantize_transpose", size, both, partial(_torch_cast_transpose, x), moved + x.numel())
    q, seen, saturated = x.to(E4M3), torch.zeros(()), torch.zeros((), dtype=torch.int64)
    turned = partial(_torch_transpose, q)
    yield BenchCase("transpose_fp8", size, partial(OPS.transpose_fp8, q), turned, 2.0 * q.numel())
    for kind, cut in (("nothing cut off", 1.0), ("some cut off", 1000.0)):
        watch = partial(OPS.quantize_watched, x, None, None, torch.tensor(cut), seen, saturated, None)
        yield BenchCase(
            "quantize_watched", f"{size}, {kind}", watch, plain, moved + (2.0 * x.numel() if cut > 1 else 0.0)
        )


def _fp8_linear(x: Tensor, scale: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor]) -> object:
    return OPS.scaled_mm(OPS.quantize(x, scale, E4M3)[0], weight, *scales, None, BF16)


def _packed_linear(x: Tensor, scale: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor]) -> object:
    return OPS.packed_mm(OPS.quantize(x, scale, E4M3)[0], weight, *scales, None, None, BF16)


def linears() -> Iterator[BenchCase]:
    """BF16 in, quantized, multiplied, BF16 out; torch: its BF16 linear.

    Uses one weight, which caches may hold, as linears are usually compared and goals are set; with few rows also
    several weights in turn, as a decoder reads them: from memory FP8 can only be faster by as much as it is smaller.
    """
    for (m, n, k), goal in LINEAR.items():
        size = f"{m} x {n} x {k}"
        yield from _linear(m, n, k, 1, size, goal)
        if m <= MEMORY_BOUND:
            yield from _linear(m, n, k, TURNS, f"{size}, {TURNS} in turn", None)


def _linear(m: int, n: int, k: int, count: int, size: str, goal: float | None) -> Iterator[BenchCase]:
    """Weights as a checkpoint has them, and packed, as they are served."""
    x, scale = _noise(m, k), torch.tensor(64.0)
    weights = [_noise(n, k) for _ in range(count)]
    cast = [OPS.quantize_current(w, E4M3, False) for w in weights]
    inverse, theirs = scale.reciprocal(), _in_turn([partial(F.linear, x, w) for w in weights])
    figures = theirs, n * k + 2.0 * m * (n + k), 2.0 * m * n * k, goal
    plain = _in_turn([partial(_fp8_linear, x, scale, q, (inverse, s)) for q, s in cast])
    yield BenchCase("quantize + scaled_mm", size, plain, *figures)
    packed = [(packed_weight(q, huge_pages(q.nbytes).view(E4M3)), s) for q, s in cast]
    served = _in_turn([partial(_packed_linear, x, scale, q, (inverse, s)) for q, s in packed])
    yield BenchCase("quantize + packed_mm", size, served, *figures)


def packing() -> Iterator[BenchCase]:
    """Packs a weight into the order of packed_mm; torch: a copy."""
    weight = _noise(4096, 4096).to(E4M3)
    out = huge_pages(weight.nbytes).view(E4M3).view(packed_shape(*weight.shape))
    copy = partial(torch.Tensor.copy_, torch.empty_like(weight), weight)
    yield BenchCase("pack_weight", "4096 x 4096", partial(OPS.pack_weight, weight, out), copy, 2.0 * weight.nbytes)


def products() -> Iterator[BenchCase]:
    """The product alone with the scales of each recipe, added to a residual, and cast to FP8; torch: its BF16
    linear."""
    n = k = 4096
    one, x_all, w = torch.ones(()), _noise(512, k), _noise(n, k)
    w_q = w.to(E4M3)
    for m in (1, 8, 512):
        x, residual = x_all[:m], _noise(m, n)
        q, size = x.to(E4M3), f"{m} x {n} x {k}"
        moved, flops = n * k + m * k + 2.0 * m * n, 2.0 * m * n * k
        blocks = torch.ones(m, k // 128), torch.ones(n // 128, k // 128)
        scales = {"per tensor": (one, one), "per row": (torch.ones(m, 1), torch.ones(n, 1)), "blocks": blocks}
        for name, pair in scales.items():
            call = partial(OPS.scaled_mm, q, w_q, *pair, None, BF16)
            yield BenchCase("scaled_mm", f"{size}, {name}", call, partial(F.linear, x, w), moved, flops)
        call = partial(OPS.scaled_mm_add, q, w_q, one, one, None, residual)
        yield BenchCase("scaled_mm_add", size, call, partial(torch.addmm, residual, x, w.t()), moved + 2 * m * n, flops)
        call = partial(OPS.scaled_mm_quantize, q, w_q, one, one, None, one, E4M3)
        yield BenchCase(
            "scaled_mm_quantize", size, call, partial(_then_cast, F.linear, one, x, w), moved - m * n, flops
        )


def heads() -> Iterator[BenchCase]:
    """`lm_head` in BF16, rows independent of each other; torch: its BF16 linear."""
    w = _noise(VOCAB, HIDDEN)
    for m in (1, 8):
        x, work = _noise(m, HIDDEN), m * w.numel()
        call, plain = partial(OPS.mm, x, w, None, BF16), partial(F.linear, x, w)
        yield BenchCase("mm", f"{m} x {VOCAB} x {HIDDEN}", call, plain, 2.0 * w.numel(), 2.0 * work)


def _then_cast(produce: Callable[..., Tensor], scale: Tensor, *args: Any) -> object:
    return (produce(*args) * scale).to(E4M3)


def between() -> Iterator[BenchCase]:
    """Norm and activation, alone and with the cast after them, and their gradients; torch: the composition."""
    scale = torch.tensor(8.0)
    for m in (1, 512):
        x, weight, wide = _noise(m, HIDDEN), _noise(HIDDEN), f"{m} x {HIDDEN}"
        norm, gated = (x, weight, 1e-5), (_noise(m, INTERMEDIATE), _noise(m, INTERMEDIATE))
        size, moved = f"{m} x {INTERMEDIATE}", 2.0 * x.numel()
        plain, cast = partial(rms_norm, *norm), partial(_then_cast, rms_norm, scale, *norm)
        yield BenchCase("rms_norm", wide, partial(OPS.rms_norm, *norm), plain, 2 * moved)
        yield BenchCase(
            "rms_norm_quantize", wide, partial(OPS.rms_norm_quantize, *norm, scale, E4M3), cast, 1.5 * moved
        )
        layer = (x, weight, None, 1e-5)
        torch_layer = partial(F.layer_norm, x, (HIDDEN,), weight)
        call = partial(OPS.layer_norm_quantize, *layer, scale, E4M3)
        yield BenchCase("layer_norm_quantize", wide, call, partial(_then_cast, torch_layer, scale), 1.5 * moved)
        call, back = partial(OPS.rms_norm_backward, x, *norm), partial(reference.rms_norm_backward, x, *norm)
        yield BenchCase("rms_norm_backward", wide, call, back, 3 * moved)
        moved = 2.0 * gated[0].numel()
        plain, cast = partial(silu_mul, *gated), partial(_then_cast, silu_mul, scale, *gated)
        yield BenchCase("silu_mul", size, partial(OPS.silu_mul, *gated), plain, 3 * moved)
        yield BenchCase(
            "silu_mul_quantize", size, partial(OPS.silu_mul_quantize, *gated, scale, E4M3), cast, 2.5 * moved
        )
        call = partial(OPS.silu_mul_backward, gated[0], *gated)
        back = partial(reference.silu_mul_backward, gated[0], *gated)
        yield BenchCase("silu_mul_backward", size, call, back, 5 * moved)


def _turned(tokens: int) -> tuple[Tensor, ...]:
    """q, k, v as one projection writes them, cos and sin."""
    row = _noise(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM).view(tokens, -1, HEAD_DIM)
    angle = torch.rand(tokens, 1, HEAD_DIM // 2).repeat(1, 1, 2)
    return *row.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1), angle.cos().to(BF16), angle.sin().to(BF16)


def positions() -> Iterator[BenchCase]:
    """Rotary position and the write into the cache; torch: the composition."""
    for tokens in (1, 512):
        q, k, v, cos, sin = _turned(tokens)
        caches = [torch.zeros(64, BLOCK, KV_HEADS, HEAD_DIM, dtype=BF16) for _ in range(2)]
        slots, size = torch.randperm(1024)[:tokens], f"{tokens} tokens"
        moved, kv = 4.0 * q.numel(), 4.0 * (k.numel() + v.numel())
        plain = partial(reference.rotary, q, cos, sin)
        yield BenchCase("rotary", size, partial(OPS.rotary, q, cos, sin), plain, moved)
        args: tuple[Any, ...] = (q, k, v, cos, sin, *caches, slots, None, None)
        composed = partial(reference.rotary_write_kv, *args)
        yield BenchCase("rotary_write_kv", size, partial(OPS.rotary_write_kv, *args), composed, moved + kv)
        written = partial(_torch_write, (k, v), caches, slots)
        yield BenchCase("write_kv", size, partial(OPS.write_kv, k, v, *caches, slots, None, None), written, kv)


def _torch_write(values: tuple[Tensor, Tensor], caches: list[Tensor], slots: Tensor) -> None:
    for x, cache in zip(values, caches, strict=True):
        cache.view(-1, *x.shape[1:])[slots] = x


def attention() -> Iterator[BenchCase]:
    """The last tokens of a context over a paged cache; torch: scaled_dot_product_attention over a plain one."""
    for cache, name in ((BF16, "BF16"), (E4M3, "E4M3")):
        for tokens, context in ((1, 1024), (256, 256), (1024, 1024)):
            blocks, scale = context // BLOCK, torch.ones(()) if cache == E4M3 else None
            k, v = (_noise(blocks, BLOCK, KV_HEADS, HEAD_DIM).to(cache) for _ in range(2))
            q, order = _noise(tokens, HEADS, HEAD_DIM), torch.randperm(blocks).int().unsqueeze(0)
            where = order, torch.tensor([context]).int(), torch.tensor([0, tokens]).int()
            call = partial(OPS.paged_attention, q, k, v, *where, scale, scale, HEAD_DIM**-0.5)
            keys, values = (t.to(BF16).view(1, context, KV_HEADS, HEAD_DIM).transpose(1, 2) for t in (k, v))
            heads_first = q[None].transpose(1, 2)
            attend = partial(F.scaled_dot_product_attention, is_causal=tokens > 1, enable_gqa=True)
            plain = partial(attend, heads_first, keys, values)
            flops = 4.0 * HEADS * HEAD_DIM * tokens * (context - (tokens - 1) / 2)
            moved = float(2 * k.nbytes + 2 * q.nbytes)
            yield BenchCase("paged_attention", f"{tokens} over {context}, {name} cache", call, plain, moved, flops)


def draws() -> Iterator[BenchCase]:
    """A token for each of 8 rows, without filters and with all of them; torch: the reference, which sorts."""
    rows = 8
    for vocab in (VOCAB, 4 * VOCAB):
        logits, one = 3 * torch.randn(rows, vocab), torch.ones(rows, dtype=torch.float64)
        plain = logits, 0.8 * one, 0 * one.long(), one, 0 * one, 0.5 * one
        filters = logits, 0.8 * one, 50 * one.long(), 0.9 * one, 0.02 * one, 0.5 * one
        for name, args in {"temperature": plain, "top_k, top_p, min_p": filters}.items():
            call, sorting = partial(OPS.sample, *args), partial(reference.sample, *args)
            yield BenchCase("sample", f"{rows} x {vocab}, {name}", call, sorting, 4.0 * logits.numel())


def updates() -> Iterator[BenchCase]:
    """The scales of 400 tensors with histories of 1024: a training step's book-keeping. Torch has nothing like it."""
    count, length = 400, 1024
    states = [torch.ones(()) for _ in range(count)], [torch.rand(length) for _ in range(count)]
    counters = [[torch.zeros((), dtype=torch.int64) for _ in range(count)] for _ in range(2)]
    call = partial(OPS.delayed_update, *states, *counters, [448.0] * count, 0, 1, "max")
    yield BenchCase("delayed_update", f"{count} histories of {length}", call, None, 8.0 * count * length)


def _num_bytes(values: Any) -> int:
    """Of all tensors among an op's arguments or results."""
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(map(_num_bytes, values)) if isinstance(values, tuple | list) else 0


def others(measured: Set[str]) -> Iterator[BenchCase]:
    """Every op that none of the makers has `measured`, at the largest of its cases; torch: nothing."""
    for name in REGISTERED:
        if name not in measured:
            case = max(cases(name), key=lambda case: _num_bytes(case.make()))
            args, op = case.make(), getattr(OPS, name)
            yield BenchCase(name, case.name, partial(op, *args), None, float(_num_bytes(args) + _num_bytes(op(*args))))


MAKERS = (casts, linears, products, packing, heads, between, positions, attention, draws, updates)


@dataclass(frozen=True)
class Peaks:
    """The measured peaks of this machine."""

    bytes_per_second: float
    flops_per_second: float


def measure_peaks(seconds: float) -> Peaks:
    """Reading 512 MB, and torch's product of 2048 x 2048 matrices: in BF16, or FP32 on a CPU without BF16 units."""
    dtype = torch.bfloat16 if {*instruction_sets()} & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32
    large, square = torch.ones(2**27), torch.randn(2048, 2048).to(dtype)
    result = fastest({"read": large.sum, "product": lambda: square @ square}, seconds)
    return Peaks(large.nbytes / result["read"], 2 * 2048**3 / result["product"])


def measure(
    seconds: float, report: Callable[[str, int, int], None], only: str | None = None, goals: bool = False
) -> dict[str, Any]:
    """Figures of every entry, about `seconds` each.

    `only`: ops whose name contains it; `goals`: only entries with a goal.
    """
    before, rows = measure_peaks(max(seconds, 0.5)), []
    measured: set[str] = set()
    makers = {maker.__name__: maker for maker in MAKERS} | {"others": partial(others, measured)}
    for index, (name, maker) in enumerate(makers.items()):
        report(name, index, len(makers))
        for entry in maker():
            measured.update(entry.op.split(" + "))
            if (only is None or only in entry.op) and (entry.goal is not None or not goals):
                rows.append(_figures(entry, seconds))
    after = measure_peaks(max(seconds, 0.5))  # the machine may have been busier at one of the two
    peaks = Peaks(
        max(before.bytes_per_second, after.bytes_per_second), max(before.flops_per_second, after.flops_per_second)
    )
    for row in rows:
        row["share_of_peak"] = _share(row, peaks)
    return {
        "peaks": {"gb_per_s": peaks.bytes_per_second / 1e9, "gflop_per_s": peaks.flops_per_second / 1e9},
        "backends": ops.backends(),
        "ops": rows,
    }


def _share(row: dict[str, Any], peaks: Peaks) -> float:
    of_bytes = 1e9 * row["gb_per_s"] / peaks.bytes_per_second
    return float(max(of_bytes, 1e9 * row["gflop_per_s"] / peaks.flops_per_second))


def _figures(entry: BenchCase, seconds: float) -> dict[str, Any]:
    candidates = {"ours": entry.call} | ({"torch": entry.torch_bf16} if entry.torch_bf16 else {})
    result = fastest(candidates, seconds)
    ours, theirs = result["ours"], result.get("torch")
    return {
        "op": entry.op,
        "size": entry.size,
        "us": 1e6 * ours,
        "gb_per_s": entry.num_bytes / ours / 1e9,
        "gflop_per_s": entry.flops / ours / 1e9,
        "torch_bf16_us": None if theirs is None else 1e6 * theirs,
        "times_torch_bf16": None if theirs is None else theirs / ours,
        "goal": entry.goal,
        "reached": None if theirs is None or entry.goal is None else theirs / ours >= entry.goal,
    }
