"""How fast the CPU kernels are, beside torch in the same run: `python benchmarks/cpu_ops.py [--threads N]`.

The best of many calls, because a shared machine only ever makes a call slower. Prints machine, versions and commit.
"""

import argparse
import platform
import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fp8serve.fp8 import ops

OPS = torch.ops.fp8serve
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
LINEAR = [(1, 4096, 4096), (1, 14336, 4096), (8, 4096, 4096), (8, 14336, 4096), (512, 4096, 4096), (2048, 768, 256)]


def best(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Milliseconds of the fastest call."""
    call()
    fastest, began, calls = float("inf"), time.perf_counter(), 0
    while time.perf_counter() - began < seconds or calls < 3:
        start = time.perf_counter()
        call()
        fastest, calls = min(fastest, time.perf_counter() - start), calls + 1
    return 1e3 * fastest


def linear(m: int, n: int, k: int) -> None:
    """x [m, k] in BF16 through a weight [n, k]: torch in BF16; ours quantizes x and multiplies in FP8."""
    x, weight = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16)
    w_q, w_scale_inv = OPS.quantize_current(weight, E4M3, False)
    scale_inv = OPS.quantize_current(x, E4M3, False)[1]
    scale = scale_inv.reciprocal()

    def ours() -> Tensor:
        q, _ = OPS.quantize(x, scale, E4M3)
        return OPS.scaled_mm(q, w_q, scale_inv, w_scale_inv, None, BF16)

    theirs, mine = best(lambda: torch.nn.functional.linear(x, weight)), best(ours)
    speed, bandwidth = 2 * m * n * k / mine / 1e6, n * k / mine / 1e6
    print(f"linear {m} x {n} x {k}: torch BF16 {theirs:.3f} ms, FP8 {mine:.3f} ms ({theirs / mine:.2f} x), ", end="")
    print(f"{speed:.0f} GFLOP/s, weights at {bandwidth:.0f} GB/s", flush=True)


def casts(size: int) -> None:
    """A BF16 matrix to E4M3 with its amax."""
    x, scale = torch.randn(size, size).to(BF16), torch.tensor(1.5)
    theirs = best(lambda: (x.abs().max(), (x * scale).to(E4M3)))
    for name, call in {
        "given scale, with amax": lambda: OPS.quantize(x, scale, E4M3),
        "per tensor": lambda: OPS.quantize_current(x, E4M3, False),
        "per row": lambda: OPS.quantize_rowwise(x, E4M3, False),
        "1x128": lambda: OPS.quantize_block(x, E4M3, 1, False),
        "128x128": lambda: OPS.quantize_block(x, E4M3, 128, False),
        "with its transpose": lambda: OPS.quantize_transpose(x, scale, E4M3),
    }.items():
        mine = best(call)
        print(f"quantize {size} x {size}, {name}: {mine:.2f} ms; torch's abs-max, scale and cast {theirs / mine:.1f} x")


def attention(tokens: int, context: int, cache: torch.dtype) -> None:
    """32 heads over 4 kv heads of 64: the last `tokens` of a context."""
    blocks = -(-context // 16)
    k, v = (torch.randn(blocks, 16, 4, 64).to(cache) for _ in range(2))
    tables = torch.randperm(blocks).int().unsqueeze(0)
    lengths, starts = torch.tensor([context]).int(), torch.tensor([0, tokens]).int()
    q, scale = torch.randn(tokens, 32, 64).to(BF16), torch.tensor(1.0) if cache == E4M3 else None
    mine = best(lambda: OPS.paged_attention(q, k, v, tables, lengths, starts, scale, scale, 0.125))
    work = 4 * 32 * 64 * tokens * (context - tokens / 2) / mine / 1e6
    print(f"attention of {tokens} tokens over {context}, {cache}: {1e3 * mine:.0f} us, {work:.0f} GFLOP/s", flush=True)


def main() -> None:
    """Everything, once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, {ops.cpu_isa()}", end="; ")
    print(f"torch {torch.__version__}, commit {commit}")
    for shape in LINEAR:
        linear(*shape)
    casts(4096)
    for cache in (BF16, E4M3):
        for tokens, context in ((1, 1024), (256, 256), (1024, 1024)):
            attention(tokens, context, cache)


if __name__ == "__main__":
    main()
