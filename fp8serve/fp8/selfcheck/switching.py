"""Switches kernels off that a check has found wrong, so that the next one takes over.

On a GPU a kernel of products or of attention gives way to the next of its order (csrc/cuda/gemm.cu,
attention_tensor.cu), any other op to its default kernel, and launches that overlap to such that do not. On a CPU every
op goes on with the fewest features less at which none of the wrong variants runs; an op none of whose variants is right
goes on with its default kernel. All of it holds for the whole process.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.registry import OPS, replace_by_default
from fp8serve.fp8.selfcheck.candidates import ATTENTION, CAPS, GEMMS, variants

_GEMM_NAMES = {f"scaled_mm.{name}": name for name in GEMMS}
_GEMM_NAMES |= dict.fromkeys(("grouped_mm.cutlass", "grouped_wgrad.cutlass"), "grouped_cutlass")
_GEMM_NAMES |= {f"paged_{name.replace('_', '.')}": name for name in ATTENTION}
OVERLAP = ("scaled_mm.overlap", "paged_attention.overlap")
_GEMM_NAMES |= dict.fromkeys(OVERLAP, "overlap")


def switch_off(device: torch.device, names: Iterable[str]) -> None:
    """No kernel of these names (candidates.py) runs in this process from now on; unknown names say nothing."""
    if device.type == "cpu":
        _on_cpu(set(names))
        return
    switch_products_off(torch.empty(1, device=device), names)
    for name in names:
        if name in OPS:
            replace_by_default(name, "cuda")


def switch_products_off(here: Tensor, names: Iterable[str], ops: Any = torch.ops.fp8serve) -> None:
    """The part of `switch_off` for kernels with a switch, on the GPU on which `here` lies. `ops`: as `candidates`."""
    off = {_GEMM_NAMES[name] for name in names if name in _GEMM_NAMES}
    off |= set(filter(None, ops.gemm_kernels(here, "").split("+")))
    if off:
        ops.gemm_kernels(here, "+".join(sorted(off)))


def _on_cpu(names: set[str]) -> None:
    running = {cap: variants(cap) for cap in CAPS}
    ladder = {op: {f"{op}.{running[cap][op]}" for cap in CAPS} for op in running["best"]}
    lost = {op for op, every in ladder.items() if every <= names}
    for op in lost:
        replace_by_default(op, "cpu")
    left = names - {name for op in lost for name in ladder[op]}
    best = next(cap for cap in CAPS if not left & {f"{op}.{variant}" for op, variant in running[cap].items()})
    variants(best)
