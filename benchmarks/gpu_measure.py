"""Measures one group of kernels, for gpu.py: python -m benchmarks.gpu_measure GROUP --out OUT.json [--dry-run]

    casts  skinny  attention  gemm  experts  linear  decode
    tiles --tune [--kinds mixed,tensor]      writes these lines of the table in csrc/cuda/gemm_tiles.h

Times are medians of CUDA events around replays of a CUDA graph, which holds a call for each of several inputs that are
together larger than the caches; so times exclude the host's time to launch. Work that cannot be captured is timed call
by call, and so are a decoding step, which replays its own graph, and a layer's training. Each time has a reference
beside it: for ops that move bytes, the share of the device's measured copy bandwidth; for products, TFLOP/s beside
those of cuBLASLt (torch.nn.functional.scaled_mm) on the same operands in the same run; for a layer, the BF16 layer. In
some rows "goal" is the least value that we promise, and "predicted" the value that we expected before the first
measurement. OUT is written after every part, so a hanging kernel loses only its own part. `--dry-run` does everything
on the CPU with small sizes and wall-clock time; it only shows that the script works.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks import gpu_experts, gpu_tiles
from benchmarks.gpu_switches import including, without
from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from fp8serve.fp8 import ops
from fp8serve.fp8.ops import reference
from fp8serve.fp8.ops.libraries import INVARIANT_SWITCH

OPS = torch.ops.fp8serve
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Row = dict[str, Any]
Work = Callable[[int], Any]
GEMMS = {  # (M, N, K): the predicted speed of ours over cuBLASLt's
    (4096, 4096, 4096): 0.85,
    (8192, 8192, 8192): 0.9,
    (8192, 8192, 28672): 0.9,
}
PREFILL = {BF16: (250.0, 330.0), E4M3: (220.0, 300.0)}  # cache: (TFLOP/s promised, predicted)
OTHER_GEMMS = [(256, 4096, 4096), (8192, 28672, 8192)]
SKINNY = [(1, 4096, 4096), (1, 28672, 8192), (16, 28672, 8192), (16, 8192, 28672), (64, 28672, 8192)]
DECODE_SWITCHES = ("overlap", "early_weights", "gated", "rotary")  # of gemm_switches.h, each measured by itself
LINEARS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # of a layer of Llama 8B: out, in features


@dataclass(frozen=True)
class Bench:
    """The device and the sizes of the measurements."""

    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def size(self, full: int) -> int:
        return max(16, full // 256) if self.dry and full > 64 else full

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=BF16)

    def seconds(self, work: Work, sets: int, repeats: int = 30, replayed: bool = True) -> float:
        """Returns the median time of one call; calls rotate over `sets` inputs so that no cache serves them twice."""
        for i in range(1 if self.dry else 3):
            work(i % sets)
        if self.dry:
            times = wall_times(work, sets)
        else:
            times = (replayed and replay_times(work, sets, repeats)) or event_times(work, sets, repeats)
        return sorted(times)[len(times) // 2]

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a large copy on the device."""
        source = torch.randn(1 << (14 if self.dry else 28), device=self.device)
        target = torch.empty_like(source)
        # not in a graph: there a copy is the copy engine's, which is slower (2.8 of 4.3 TB/s on an H200)
        return 2 * source.nbytes / self.seconds(lambda _: target.copy_(source), 1, 10, replayed=False)


def wall_times(work: Work, sets: int) -> list[float]:
    times = []
    for i in range(2):
        begin = time.perf_counter()
        work(i % sets)
        times.append(time.perf_counter() - begin)
    return times


def replay_times(work: Work, sets: int, repeats: int) -> list[float] | None:
    """Seconds of one call, by replays of a graph that holds one for each input; None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(sets):
                work(i)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    graph.replay()
    return [took / sets for took in event_times(lambda _: graph.replay(), 1, max(3, repeats // sets))]


def event_times(work: Work, sets: int, repeats: int) -> list[float]:
    events = [[cast(Any, torch.cuda.Event)(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for i, (begin, end) in enumerate(events):
        begin.record()
        work(i % sets)
        end.record()
    torch.cuda.synchronize()
    return [float(begin.elapsed_time(end)) / 1e3 for begin, end in events]


def goal(what: str, at_least: float, predicted: float, measured: float) -> Row:
    return {"what": what, "goal": at_least, "predicted": predicted, "measured": measured}


# --- casts ----------------------------------------------------------------------------------------------------------


def quantizing(bench: Bench, rows: int, columns: int) -> Iterator[Row]:
    copy, sets = bench.copy_bandwidth(), 4 if rows > 1000 else 64
    x = [bench.noise(bench.size(rows), bench.size(columns)) for _ in range(sets)]
    one = torch.ones((), device=bench.device)
    kinds: dict[str, Work] = {
        "given scale": lambda i: OPS.quantize(x[i], one, E4M3),
        "given scale, transposed": lambda i: OPS.quantize_transpose(x[i], one, E4M3),
        "current": lambda i: OPS.quantize_current(x[i], E4M3, False),
        "row": lambda i: OPS.quantize_rowwise(x[i], E4M3, False),
        "block 1x128": lambda i: OPS.quantize_block(x[i], E4M3, 1, False),
        "block 128x128": lambda i: OPS.quantize_block(x[i], E4M3, 128, False),
    }
    for kind, work in kinds.items():
        took = bench.seconds(work, sets)
        rate = (4 if "transposed" in kind else 3) * x[0].numel() / took  # 2 bytes read, 1 or 2 written
        what = f"quantize {kind} {rows}x{columns}"
        yield {"what": what, "us": took * 1e6, "GB/s": rate / 1e9, "of copy": rate / copy}
        if kind == "given scale" and rows == 8192:
            yield goal("quantize with amax 8192x8192, of copy bandwidth", 0.85, 0.9, rate / copy)


def updating(bench: Bench) -> Iterator[Row]:
    """672 states (224 linears) of 1024 entries."""
    count = bench.size(672)
    states: list[Any] = [[torch.ones((), device=bench.device) for _ in range(count)]]
    states += [[torch.ones(1024, device=bench.device) for _ in range(count)]]
    states += [[torch.zeros((), device=bench.device, dtype=torch.int64) for _ in range(count)] for _ in range(2)]
    took = bench.seconds(lambda _: OPS.delayed_update(*states, [448.0] * count, 0, 1, "max"), 1)
    yield {"what": "delayed_update 672 states of 1024", "us": took * 1e6}


def drawing(bench: Bench, rows: int) -> Iterator[Row]:
    """A token for each row of the vocabulary of Llama 3: without filters, with all, and the most likely one of logits
    in BF16, beside torch's ops for that."""
    logits = [3 * torch.randn(rows, bench.size(128256), device=bench.device) for _ in range(8)]
    in_bf16 = [x.bfloat16() for x in logits]
    one = torch.ones(rows, device=bench.device, dtype=torch.float64)
    plain = 0.8 * one, 0 * one.long(), one, 0 * one, 0.5 * one
    filters = 0.8 * one, 50 * one.long(), 0.9 * one, 0.02 * one, 0.5 * one
    kinds: dict[str, Work] = {
        "temperature": lambda i: OPS.sample(logits[i], *plain),
        "top_k, top_p, min_p": lambda i: OPS.sample(logits[i], *filters),
        "greedy": lambda i: OPS.greedy_tokens(in_bf16[i]),
        "greedy by torch": lambda i: reference.greedy_tokens(in_bf16[i].float()),
    }
    for kind, work in kinds.items():
        took = bench.seconds(work, len(logits))
        yield {"what": f"sample {kind} {rows}x128256", "us": took * 1e6, "GB/s": logits[0].nbytes / took / 1e9}


# --- multiplications ------------------------------------------------------------------------------------------------


def operands(bench: Bench, m: int, n: int, k: int, scales: str) -> tuple[Tensor, ...]:
    """Returns a [m, k], b [n, k] and their scales. `scales`: a kind of csrc/cuda/tile_choice.h other than "block";
    "mixed" means one scale for a, and one for each row of b."""
    ops_of_kind = {"tensor": OPS.quantize_current, "row": OPS.quantize_rowwise}
    quantize_b = ops_of_kind["tensor" if scales == "tensor" else "row"]
    quantize_a = ops_of_kind["row" if scales == "row" else "tensor"]
    a, a_scale = quantize_a(bench.noise(m, k), E4M3, False)
    b, b_scale = quantize_b(bench.noise(n, k), E4M3, False)
    return a, b, a_scale, b_scale


def ours(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Any:
    return OPS.scaled_mm(a, b, a_scale, b_scale, None, BF16)


def by_tile(choice: gpu_tiles.TileChoice, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Any:
    return OPS.scaled_mm_by(a, b, a_scale, b_scale, None, BF16, choice.tile, choice.swizzle)


def rehearsed_tile(choice: gpu_tiles.TileChoice, *arguments: Tensor) -> Any:
    """Stands for `by_tile` on a CPU, which has no tiles."""
    return ours(*arguments)


def fp8_out(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Any:
    return OPS.scaled_mm_quantize(a, b, a_scale, b_scale, None, a_scale.flatten()[0], E4M3)


def cublas(fast: bool, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Any:
    kinds = cast(Any, torch.nn.functional).ScalingType
    kind = kinds.RowWise if a_scale.dim() else kinds.TensorWise
    b_scale = b_scale.t() if b_scale.dim() else b_scale
    multiply = cast(Any, torch.nn.functional).scaled_mm
    return multiply(a, b.t(), a_scale, kind, b_scale, kind, output_dtype=BF16, use_fast_accum=fast)


def timed(bench: Bench, multiply: Callable[..., Any], inputs: list[tuple[Tensor, ...]], repeats: int = 30) -> float:
    return bench.seconds(lambda i: multiply(*inputs[i]), len(inputs), repeats)


def choices(bench: Bench) -> list[gpu_tiles.TileChoice]:
    return gpu_tiles.candidates(chip(bench), "tensor")


def chip(bench: Bench) -> gpu_tiles.Chip:
    """Raises KeyError on a chip that CUTLASS does not serve."""
    return gpu_tiles.CHIPS[90 if bench.dry else capability()]


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def attempts(bench: Bench, by_row: bool) -> dict[str, Callable[..., Any]]:
    results: dict[str, Callable[..., Any]] = {
        "fp8serve": ours,
        "cuBLASLt": partial(cublas, False),
        "cuBLASLt fast": partial(cublas, True),
        "fp8serve, FP8 out": fp8_out,
    }
    if not by_row and (bench.dry or capability() in gpu_tiles.CHIPS):
        results |= {f"fp8serve {c.tile}/{c.swizzle}": partial(by_tile, c) for c in choices(bench)}
    return results


def multiplying(bench: Bench, shape: tuple[int, int, int], by_row: bool) -> Iterator[Row]:
    """Ours against cuBLASLt through torch, accurate and fast, on the same operands; then every tile."""
    m, n, k = map(bench.size, shape)
    what = f"gemm {'x'.join(map(str, shape))} {'row' if by_row else 'tensor'}"
    scales = "row" if by_row else "tensor"
    x = [operands(bench, m, n, k, scales) for _ in range(max(2, min(16, (1 << 29) // (m * k + n * k))))]
    times: dict[str, float] = {}
    for kind, multiply in attempts(bench, by_row).items():
        try:
            times[kind] = took = timed(bench, multiply, x, 12 if "/" in kind else 30)
            yield {"what": what, "by": kind, "us": took * 1e6, "TFLOP/s": 2 * m * n * k / took / 1e12}
        except RuntimeError as refused:
            yield {"what": what, "by": kind, "refused": str(refused)[:200]}
    if shape in GEMMS and not by_row and {"fp8serve", "cuBLASLt"} <= set(times):
        yield goal(f"{what}, over cuBLASLt", 1.0, GEMMS[shape], times["cuBLASLt"] / times["fp8serve"])
    if shape == (8192, 8192, 8192) and not by_row and "fp8serve" in times:
        yield goal(f"{what}, TFLOP/s", 1400.0, 1150.0, 2 * m * n * k / times["fp8serve"] / 1e12)


def multiplying_blocks(bench: Bench, shape: tuple[int, int, int]) -> Iterator[Row]:
    m, n, k = map(bench.size, shape)
    a, a_scale = OPS.quantize_block(bench.noise(m, k), E4M3, 1, False)
    b, b_scale = OPS.quantize_block(bench.noise(n, k), E4M3, 128, False)
    took = timed(bench, ours, [(a, b, a_scale, b_scale)])
    yield {"what": f"gemm {shape} 1x128 128x128", "us": took * 1e6, "TFLOP/s": 2 * m * n * k / took / 1e12}


def decoding_gemm(bench: Bench, shape: tuple[int, int, int], by_row: bool) -> Iterator[Row]:
    copy = bench.copy_bandwidth()
    m, n, k = map(bench.size, shape)
    what = f"gemm {'x'.join(map(str, shape))} {'row' if by_row else 'tensor'}"
    scales = "row" if by_row else "tensor"
    x = [operands(bench, m, n, k, scales) for _ in range(max(2, min(16, (1 << 29) // (n * k))))]
    took = timed(bench, ours, x)
    yield {"what": what, "us": took * 1e6, "of copy": n * k / took / copy}
    if m == 16 and not by_row:
        yield goal(f"{what}, weight bytes over copy bandwidth", 0.8, 0.7, n * k / took / copy)
    try:
        yield {"what": what, "by": "cuBLASLt", "us": timed(bench, partial(cublas, False), x) * 1e6}
    except RuntimeError as refused:
        yield {"what": what, "by": "cuBLASLt", "refused": str(refused)[:200]}


# --- layers ---------------------------------------------------------------------------------------------------------

RECIPES = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "rowwise": Float8CurrentScaling(granularity="row"),
    "block": Float8BlockScaling(),
}


def training_seconds(bench: Bench, out: int, inner: int, recipe: Any) -> float:
    """Forward and backward of one linear over 8192 tokens."""
    tokens, out, inner = map(bench.size, (8192, out, inner))
    linear = Linear(inner, out, bias=False, device=bench.device, dtype=BF16)
    x, dy = bench.noise(tokens, inner).requires_grad_(), bench.noise(tokens, out)

    def step(_: int) -> None:
        with autocast(enabled=recipe is not None, recipe=recipe or DelayedScaling()):
            y = linear(x)
        y.backward(dy)
        x.grad = linear.weight.grad = None

    return bench.seconds(step, 1, 20, replayed=False)


def training(bench: Bench) -> Iterator[Row]:
    """Every linear of a layer of Llama 8B; the goals are for the sums of their times."""
    sums = dict.fromkeys(RECIPES, 0.0)
    for out, inner in LINEARS:
        times = {name: training_seconds(bench, out, inner, recipe) for name, recipe in RECIPES.items()}
        for name, took in times.items():
            sums[name] += took
            what = f"linear 8192x{inner}x{out} forward+backward {name}"
            yield {"what": what, "us": took * 1e6, "of bf16": times["bf16"] / took}
    yield goal("linears of Llama 8B, delayed over BF16", 1.6, 1.5, sums["bf16"] / sums["delayed"])
    yield goal("linears of Llama 8B, delayed over current", 1.05, 1.08, sums["current"] / sums["delayed"])


def attending(bench: Bench, dtype: torch.dtype) -> Iterator[Row]:
    """Decoding: 16 sequences of 4096 tokens, 32 heads over 8, head_dim 128."""
    length, heads, kv_heads = (64, 4, 1) if bench.dry else (4096, 32, 8)
    blocks = length // 16
    tables = torch.randperm(16 * blocks, device=bench.device).int().view(16, blocks)
    lengths = torch.full((16,), length, device=bench.device).int()
    starts = torch.arange(17, device=bench.device).int()
    k, v = (bench.noise(16 * blocks, 16, kv_heads, 128).to(dtype) for _ in range(2))
    one = torch.ones((), device=bench.device) if dtype == E4M3 else None
    args = (bench.noise(16, heads, 128), k, v, tables, lengths, starts, one, one, 128**-0.5)
    copy, took = bench.copy_bandwidth(), bench.seconds(lambda _: OPS.paged_attention(*args), 1)
    rate = 2 * k.nbytes / took
    yield {"what": f"paged decode {dtype}", "us": took * 1e6, "GB/s": rate / 1e9, "of copy": rate / copy}


def prefilling(bench: Bench, dtype: torch.dtype) -> Iterator[Row]:
    """A prompt of 8192 tokens, 32 heads over 8, head_dim 128: on Hopper by warpgroups, and by warps."""
    length, heads, kv_heads = (64, 4, 1) if bench.dry else (8192, 32, 8)
    tables = torch.randperm(length // 16, device=bench.device).int().view(1, -1)
    lengths, starts = (torch.tensor(n, device=bench.device).int() for n in ([length], [0, length]))
    k, v = (bench.noise(length // 16, 16, kv_heads, 128).to(dtype) for _ in range(2))
    one = torch.ones((), device=bench.device) if dtype == E4M3 else None
    args = (bench.noise(length, heads, 128), k, v, tables, lengths, starts, one, one, 128**-0.5)
    work, times = 4 * 128 * heads * length * (length + 1) / 2, {}
    for by in ("warpgroups", "warps") if bench.dry or capability() == 90 else ("warps",):
        with without("attention_wgmma" if by == "warps" else "", bench.device):
            times[by] = bench.seconds(lambda _: OPS.paged_attention(*args), 1)
        rate = work / times[by] / 1e12
        yield {"what": f"paged prefill 8192 {dtype} by {by}", "us": times[by] * 1e6, "TFLOP/s": rate}
    if "warpgroups" in times:
        rate, gain = work / times["warpgroups"] / 1e12, times["warps"] / times["warpgroups"]
        at_least, predicted = PREFILL[dtype]
        yield goal(f"paged prefill 8192 {dtype}, TFLOP/s", at_least, predicted, rate)
        yield goal(f"paged prefill 8192 {dtype}, warpgroups over warps", 1.3, 1.7, gain)


def decode(bench: Bench) -> Iterator[Row]:
    """A decoder of 1.1 billion parameters with random FP8 weights, one sequence, 512 tokens of context."""
    from benchmarks import gpu_decode

    step = gpu_decode.DecodeStep(bench.device, bench.dry)
    copy, took = bench.copy_bandwidth(), bench.seconds(step, 1, 50, replayed=False)
    yield {"what": "decode 1.1B batch 1", "us": took * 1e6, "tokens/s": 1 / took, "weight bytes": step.bytes}
    what = f"decode 1.1B batch 1{step.how}, weight bytes over copy bandwidth"
    yield goal(what, 0.6, 0.5, step.bytes / took / copy)
    del step
    for switch in DECODE_SWITCHES:
        with without(switch, bench.device):
            slower = bench.seconds(gpu_decode.DecodeStep(bench.device, bench.dry), 1, 50, replayed=False)
        yield {"what": f"decode 1.1B batch 1, without {switch}", "us": slower * 1e6, "of all": slower / took}
    with including("normed", bench.device):
        other = bench.seconds(gpu_decode.DecodeStep(bench.device, bench.dry), 1, 50, replayed=False)
    yield {"what": "decode 1.1B batch 1, with normed", "us": other * 1e6, "of all": other / took}


def invariant(bench: Bench) -> Iterator[Row]:
    """What the invariant mode costs, for the widest linear of Llama 8B and a decoding step, and whether its rows are
    independent of the number of rows."""
    from benchmarks import gpu_decode

    n, k = map(bench.size, (28672, 4096))
    one, scales = torch.ones((), device=bench.device), torch.ones(n, 1, device=bench.device)
    weight = bench.noise(n, k).to(E4M3)
    for m in (1, 16, 32, 64, 128, 1024, 4096):
        a = bench.noise(m, k).to(E4M3)

        def multiply(_: int, a: Tensor = a) -> Tensor:
            return OPS.scaled_mm(a, weight, one, scales, None, BF16)  # type: ignore[no-any-return]

        usual = bench.seconds(multiply, 1)
        with without(INVARIANT_SWITCH, bench.device):
            took, equal = bench.seconds(multiply, 1), torch.equal(multiply(0)[-1:], multiply(0, a[-1:]))
        row = {"us": took * 1e6, "TFLOP/s": 2 * m * n * k / took / 1e12, "of usual": took / usual, "equal": equal}
        yield {"what": f"invariant gemm {m}x{n}x{k} mixed", **row}
    usual = bench.seconds(gpu_decode.DecodeStep(bench.device, bench.dry), 1, 50, replayed=False)
    with without(INVARIANT_SWITCH, bench.device):
        took = bench.seconds(gpu_decode.DecodeStep(bench.device, bench.dry), 1, 50, replayed=False)
    yield {"what": "invariant decode 1.1B batch 1", "us": took * 1e6, "of usual": took / usual}


# --- all of it ------------------------------------------------------------------------------------------------------


def parts(bench: Bench, group: str) -> list[Callable[[], Iterator[Row]]]:
    results: dict[str, list[Callable[[], Iterator[Row]]]] = {
        "casts": [
            *(partial(quantizing, bench, rows, 8192) for rows in (8192, 16)),
            *(partial(drawing, bench, rows) for rows in (1, 32)),
            partial(updating, bench),
        ],
        "skinny": [partial(decoding_gemm, bench, shape, by_row) for shape in SKINNY for by_row in (False, True)],
        "attention": [partial(part, bench, dtype) for part in (attending, prefilling) for dtype in (BF16, E4M3)],
        "gemm": [
            *(partial(multiplying, bench, s, by_row) for s in [*GEMMS, *OTHER_GEMMS] for by_row in (False, True)),
            *(partial(multiplying_blocks, bench, shape) for shape in list(GEMMS)[:2]),
        ],
        "experts": [
            *(partial(gpu_experts.multiplying, bench, n, by) for n in gpu_experts.TOKENS for by in ("row", "block")),
            *(partial(gpu_experts.training, bench, tokens) for tokens in (512, 4096)),
        ],
        "linear": [partial(training, bench)],
        "decode": [partial(decode, bench)],
        "invariant": [partial(invariant, bench)],
    }
    return results[group]


def measurements(bench: Bench, group: str, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns the rows of a group; a part that fails is reported in its place. `save` is called after every row."""
    results: dict[str, Any] = {"backends": ops.backends(bench.device), "rows": []}
    for part in parts(bench, group):
        try:
            for row in part():
                results["rows"].append(row)
                save(results)
        except Exception as failed:  # any error: the other parts still count
            results["rows"].append({"what": "failed", "error": f"{type(failed).__name__}: {failed}"[:300]})
            save(results)
        if not bench.dry:
            torch.cuda.empty_cache()
    return results


def tile_inputs(bench: Bench, scales: str, m: int, n: int, k: int) -> list[tuple[Tensor, ...]]:
    """Returns inputs for at most 32 products, together at least 128 MiB if possible, so that no cache serves them
    twice."""
    m, n, k = map(bench.size, (m, n, k))

    def one() -> tuple[Tensor, ...]:
        if scales != "block":
            return operands(bench, m, n, k, scales)
        a, a_scale = OPS.quantize_block(bench.noise(m, k), E4M3, 1, False)
        b, b_scale = OPS.quantize_block(bench.noise(n, k), E4M3, 128, False)
        return a, b, a_scale, b_scale

    return [one() for _ in range(max(2, min(4 if bench.dry else 32, -(-(1 << 27) // (m * k + n * k)))))]


class TileTimes:
    """Call it for the seconds of one tile on one shape; RuntimeError if the tile refuses the shape. Keeps the inputs of
    the last shape.

    `rows` has the microseconds of every kernel on every shape, and of the kernel that the present table chooses
    ("fp8serve").
    """

    def __init__(self, bench: Bench) -> None:
        self.bench, self.shape = bench, ("", 0, 0, 0)
        self.inputs: list[tuple[Tensor, ...]] = []
        self.rows: list[Row] = []

    def __call__(self, scales: str, m: int, n: int, k: int, choice: gpu_tiles.TileChoice) -> float:
        if self.shape != (scales, m, n, k):
            self.shape, self.inputs = (scales, m, n, k), tile_inputs(self.bench, scales, m, n, k)
            present = timed(self.bench, ours, self.inputs, 10)
            self.rows.append({"what": f"gemm {m}x{n}x{k} {scales}", "us": {"fp8serve": present * 1e6}})
        took = timed(self.bench, partial(rehearsed_tile if self.bench.dry else by_tile, choice), self.inputs, 10)
        self.rows[-1]["us"]["/".join(map(str, choice))] = took * 1e6
        return took


def tuned(bench: Bench, kinds: list[str], header: Path, save: Callable[[dict[str, Any]], None]) -> None:
    """Measures the tables of this machine's chip for these kinds of scales and writes them into the header, kind by
    kind. Saves their lines, and the times of every kernel on every shape."""
    number = 90 if bench.dry else capability()
    name = "a dry run" if bench.dry else torch.cuda.get_device_name()
    origin, times, table = f"measured on {name}, {date.today().isoformat()}", TileTimes(bench), list[str]()
    for scales in kinds:
        measured = gpu_tiles.Table(origin, gpu_tiles.table(chip(bench), times, scales))
        text = header.read_text()
        header.write_text(gpu_tiles.rewritten(text, gpu_tiles.parsed(text) | {(number, scales): measured}))
        table += gpu_tiles.lines(number, scales, measured)
        save({"rows": times.rows, "table": table})


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = ("casts", "skinny", "attention", "gemm", "experts", "linear", "decode", "invariant", "tiles")
    parser.add_argument("group", choices=groups)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--tune", action="store_true", help="with tiles: measure the table and write --header")
    kinds = partial(str.split, sep=",")
    parser.add_argument("--kinds", type=kinds, default=gpu_tiles.SCALES, help="kinds of scales, joined by commas")
    parser.add_argument("--header", type=Path, default=gpu_tiles.HEADER)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(words)
    if unknown := set(options.kinds) - set(gpu_tiles.SCALES):
        parser.error(f"--kinds: {', '.join(sorted(unknown))} must be of {', '.join(gpu_tiles.SCALES)}")
    if options.tune != (options.group == "tiles"):
        parser.error("--tune and the group tiles belong together")
    bench = Bench(options.dry_run)
    save: Callable[[dict[str, Any]], Any] = lambda results: options.out.write_text(json.dumps(results))  # noqa: E731
    if options.tune:
        tuned(bench, options.kinds, options.header, save)
    else:
        measurements(bench, options.group, save)


if __name__ == "__main__":
    main()
