"""What gpu.py measures, in a process that loads the freshly built library: python benchmarks/gpu_measure.py OUT.json.

Times are medians of CUDA events over calls that rotate through inputs larger than the caches together. Next to each
time stands what it is worth: of the device's measured copy bandwidth for what moves bytes, TFLOP/s beside cuBLASLt's on
the same operands in the same run for what multiplies, and the BF16 layer for a layer.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from fp8serve import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Linear, autocast
from fp8serve.fp8 import ops

OPS = torch.ops.fp8serve
E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
Row = dict[str, Any]
GEMMS = [(4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 8192), (256, 4096, 4096)]
SKINNY = [(1, 4096, 4096), (1, 28672, 8192), (16, 28672, 8192), (64, 28672, 8192)]


def seconds(work: Callable[[int], Any], sets: int, repeats: int = 30) -> float:
    """The median time of one call; calls rotate over `sets` inputs so that no cache serves them twice."""
    for i in range(3):
        work(i % sets)
    events = [[cast(Any, torch.cuda.Event)(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for i, (begin, end) in enumerate(events):
        begin.record()
        work(i % sets)
        end.record()
    torch.cuda.synchronize()
    return float(sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]) / 1e3


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda _: target.copy_(source), 1, 10)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def measure_quantize(rows: int, columns: int, copy: float) -> list[Row]:
    sets = 4 if rows > 1000 else 64
    x, one = [noise(rows, columns) for _ in range(sets)], torch.ones((), device="cuda")
    kinds: dict[str, Callable[[int], Any]] = {
        "given scale": lambda i: OPS.quantize(x[i], one, E4M3),
        "current": lambda i: OPS.quantize_current(x[i], E4M3, False),
        "row": lambda i: OPS.quantize_rowwise(x[i], E4M3, False),
        "block 1x128": lambda i: OPS.quantize_block(x[i], E4M3, 1, False),
        "block 128x128": lambda i: OPS.quantize_block(x[i], E4M3, 128, False),
    }
    found = []
    for kind, work in kinds.items():
        took = seconds(work, sets)
        rate = 3 * x[0].numel() / took  # 2 bytes read, 1 written
        what = f"quantize {kind} {rows}x{columns}"
        found.append({"what": what, "us": took * 1e6, "GB/s": rate / 1e9, "of copy": rate / copy})
    return found


def operands(m: int, n: int, k: int, by_row: bool) -> tuple[torch.Tensor, ...]:
    quantized = partial(OPS.quantize_rowwise if by_row else OPS.quantize_current, dtype=E4M3, power_2=False)
    (a, a_scale), (b, b_scale) = quantized(noise(m, k)), quantized(noise(n, k))
    return a, b, a_scale, b_scale


def ours(a: Any, b: Any, a_scale: Any, b_scale: Any) -> Any:
    return OPS.scaled_mm(a, b, a_scale, b_scale, None, BF16)


def cublas(fast: bool, a: Any, b: Any, a_scale: Any, b_scale: Any) -> Any:
    scales = {"scale_a": a_scale, "scale_b": b_scale.t() if b_scale.dim() else b_scale}
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=BF16, use_fast_accum=fast)


def _rotated(multiply: Callable[..., Any], inputs: list[tuple[torch.Tensor, ...]], i: int) -> Any:
    return multiply(*inputs[i])


def measure_gemm(m: int, n: int, k: int, by_row: bool, copy: float) -> list[Row]:
    """Ours against cuBLASLt through torch, accurate and fast, on the same operands."""
    sets = max(2, min(16, (1 << 29) // (m * k + n * k)))
    x = [operands(m, n, k, by_row) for _ in range(sets)]
    kinds: dict[str, Callable[..., Any]] = {
        "fp8serve": ours,
        "cuBLASLt": partial(cublas, False),
        "cuBLASLt fast": partial(cublas, True),
    }
    found = []
    for kind, multiply in kinds.items():
        row: Row = {"what": f"gemm {m}x{n}x{k} {'row' if by_row else 'tensor'}", "by": kind}
        try:
            took = seconds(partial(_rotated, multiply, x), sets)
            moved = m * k + n * k + 2 * m * n
            row |= {"us": took * 1e6, "TFLOP/s": 2 * m * n * k / took / 1e12, "of copy": moved / took / copy}
        except RuntimeError as refused:
            row["refused"] = str(refused)[:200]
        found.append(row)
    return found


def measure_block_gemm(m: int, n: int, k: int) -> list[Row]:
    a, a_scale = OPS.quantize_block(noise(m, k), E4M3, 1, False)
    b, b_scale = OPS.quantize_block(noise(n, k), E4M3, 128, False)
    took = seconds(lambda _: ours(a, b, a_scale, b_scale), 1)
    return [{"what": f"gemm {m}x{n}x{k} 1x128 128x128", "us": took * 1e6, "TFLOP/s": 2 * m * n * k / took / 1e12}]


def measure_linear() -> list[Row]:
    """Forward and backward of the largest linear of an 8-billion Llama, 8192 tokens, against BF16."""
    linear = Linear(4096, 14336, bias=False, device="cuda", dtype=BF16)
    x, dy = noise(8192, 4096).requires_grad_(), noise(8192, 14336)

    def step(recipe: Any, _: int) -> None:
        with autocast(enabled=recipe is not None, recipe=recipe or DelayedScaling()):
            y = linear(x)
        y.backward(dy)
        x.grad = linear.weight.grad = None

    recipes = {"bf16": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}
    recipes |= {"rowwise": Float8CurrentScaling(granularity="row"), "block": Float8BlockScaling()}
    took = {name: seconds(partial(step, recipe), 1) for name, recipe in recipes.items()}
    what = "linear 8192x4096x14336 forward+backward"
    return [{"what": f"{what} {name}", "us": t * 1e6, "of bf16": took["bf16"] / t} for name, t in took.items()]


def measure_attention(dtype: torch.dtype, copy: float) -> list[Row]:
    """Decoding: 16 sequences of 4096 tokens, 32 heads over 8, head_dim 128."""
    tables = torch.randperm(16 * 256, device="cuda").int().view(16, 256)
    lengths, starts = torch.full((16,), 4096, device="cuda").int(), torch.arange(17, device="cuda").int()
    k, v = (noise(16 * 256, 16, 8, 128).to(dtype) for _ in range(2))
    args = (noise(16, 32, 128), k, v, tables, lengths, starts, None, None, 128**-0.5)
    took = seconds(lambda _: OPS.paged_attention(*args), 1)
    rate = 2 * k.nbytes / took
    return [{"what": f"paged decode {dtype}", "us": took * 1e6, "GB/s": rate / 1e9, "of copy": rate / copy}]


def measure_update() -> list[Row]:
    """672 states (224 linears) of 1024 entries."""
    states: list[Any] = [[torch.ones((), device="cuda") for _ in range(672)]]
    states += [[torch.ones(1024, device="cuda") for _ in range(672)]]
    states += [[torch.zeros((), device="cuda", dtype=torch.int64) for _ in range(672)] for _ in range(2)]
    took = seconds(lambda _: OPS.delayed_update(*states, [448.0] * 672, 0, 1, "max"), 1)
    return [{"what": "delayed_update 672 states of 1024", "us": took * 1e6}]


def measurements() -> dict[str, Any]:
    """All of them; a failing one is reported in its place."""
    copy = copy_bandwidth()
    parts: list[Callable[[], list[Row]]] = [partial(measure_quantize, rows, 8192, copy) for rows in (8192, 16)]
    parts += [partial(measure_gemm, *size, by_row, copy) for size in GEMMS + SKINNY for by_row in (False, True)]
    parts += [partial(measure_block_gemm, *size) for size in GEMMS[:2]]
    parts += [measure_linear, measure_update]
    parts += [partial(measure_attention, dtype, copy) for dtype in (BF16, E4M3)]
    rows: list[Row] = []
    for part in parts:
        try:
            rows += part()
        except Exception as failed:  # the machine may be lent for minutes: the others still count
            rows.append({"what": "failed", "error": f"{type(failed).__name__}: {failed}"[:300]})
        torch.cuda.empty_cache()
    return {"copy GB/s": copy / 1e9, "backends": ops.backends("cuda"), "rows": rows}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measurements()))
