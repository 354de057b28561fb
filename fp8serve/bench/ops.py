"""Every op of `fp8serve.fp8.ops` at the sizes of real models, beside torch in BF16 doing the same in the same run.

An entry (`entries.py`) states the minimum that an op must move and compute: the bytes of its inputs and outputs, each
once, and two operations per multiplication and addition. Divided by the time, these give GB/s and GFLOP/s. The larger
of their shares of this machine's measured peaks is the op's `share_of_peak`, its distance from the roofline. The peaks
are a read of a matrix far larger than the caches, which a kernel working from the caches can exceed, and torch's best
matrix product, which a kernel better than torch's can exceed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fp8serve.bench.clock import fastest
from fp8serve.bench.entries import MAKERS, BenchCase, others
from fp8serve.doctor import instruction_sets
from fp8serve.fp8 import ops


@dataclass(frozen=True)
class Peaks:
    """The measured peaks of this machine."""

    bytes_per_second: float
    flops_per_second: float


def measure_peaks(seconds: float) -> Peaks:
    """Reading 512 MB, and torch's product of 2048 x 2048 matrices: in BF16, or FP32 on a CPU without BF16 units."""
    dtype = torch.bfloat16 if {*instruction_sets()} & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32
    large, square = torch.ones(2**27), torch.randn(2048, 2048).to(dtype)
    found = fastest({"read": large.sum, "product": lambda: square @ square}, seconds)
    return Peaks(large.nbytes / found["read"], 2 * 2048**3 / found["product"])


def measure(
    seconds: float, tell: Callable[[str, int, int], None], only: str | None = None, goals: bool = False
) -> dict[str, Any]:
    """Figures of every entry, about `seconds` each.

    `only`: ops whose name contains it; `goals`: only entries with a goal.
    """
    before, rows = measure_peaks(max(seconds, 0.5)), []
    measured: set[str] = set()
    makers = {maker.__name__: maker for maker in MAKERS} | {"others": partial(others, measured)}
    for index, (name, maker) in enumerate(makers.items()):
        tell(name, index, len(makers))
        for entry in maker():
            measured.update(entry.op.split(" + "))
            if _wanted(entry, only, goals):
                rows.append(_figures(entry, seconds))
    peaks = _larger(before, measure_peaks(max(seconds, 0.5)))  # the machine may have been busier at one of the two
    for row in rows:
        row["share_of_peak"] = _share(row, peaks)
    return {
        "peaks": {"gb_per_s": peaks.bytes_per_second / 1e9, "gflop_per_s": peaks.flops_per_second / 1e9},
        "backends": ops.backends(),
        "ops": rows,
    }


def _wanted(entry: BenchCase, only: str | None, goals: bool) -> bool:
    return (only is None or only in entry.op) and (entry.goal is not None or not goals)


def _larger(a: Peaks, b: Peaks) -> Peaks:
    return Peaks(max(a.bytes_per_second, b.bytes_per_second), max(a.flops_per_second, b.flops_per_second))


def _share(row: dict[str, Any], peaks: Peaks) -> float:
    of_bytes = 1e9 * row["gb_per_s"] / peaks.bytes_per_second
    return float(max(of_bytes, 1e9 * row["gflop_per_s"] / peaks.flops_per_second))


def _figures(entry: BenchCase, seconds: float) -> dict[str, Any]:
    candidates = {"ours": entry.call} | ({"torch": entry.torch_bf16} if entry.torch_bf16 else {})
    found = fastest(candidates, seconds)
    ours, theirs = found["ours"], found.get("torch")
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
