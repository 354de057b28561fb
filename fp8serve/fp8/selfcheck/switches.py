"""Switches off kernels that failed the self-check.

A bad kernel is switched off for the whole process, and another takes its place. On a GPU the next kernel in the order
of GEMM or attention kernels (csrc/cuda/gemm.cu, attention_tensor.cu) replaces it; any other op runs its default kernel;
overlapping launches run one after the other. On a CPU all ops use the best set of features with which no bad variant
runs; an op whose variants are all bad runs its default kernel.

A process that uses a stored verdict needs these switches, but not the test cases (candidates.py).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.libraries import ON_ARM, cpu_kernels
from fp8serve.fp8.ops.registry import OPS, use_default_kernel

X86_FEATURES = ("avx512+avx512vbmi", "avx512", "avx2")
CPU_FEATURE_CAPS = ("best", *(("neonfhm", "neon") if ON_ARM else X86_FEATURES), "portable")  # best first
TILES = ("large", "medium", "small", "thin128", "thin64", "thin32")
GEMMS = ("skinny", "tall", "mma", *TILES, "cublaslt", "cublaslt_rows")
ATTENTION = ("attention_mma", "attention_wgmma")  # kernels for tensor cores; each replaces the next if that is bad

# The names by which the op `gemm_kernels` switches the candidates off.
_SWITCHES = {f"scaled_mm.{name}": name for name in GEMMS}
_SWITCHES |= dict.fromkeys(("grouped_mm.cutlass", "grouped_wgrad.cutlass"), "grouped_cutlass")
_SWITCHES |= {f"paged_{name.replace('_', '.')}": name for name in ATTENTION}
OVERLAP = ("scaled_mm.overlap", "paged_attention.overlap")
_SWITCHES |= dict.fromkeys(OVERLAP, "overlap")
_SWITCHES["stored_mm.early_weights"] = "early_weights"
_SWITCHES["stored_gated_mm.gated"] = "gated"
_SWITCHES["stored_rotary_mm.rotary"] = "rotary"
NORMED = ("stored_mm.normed", "stored_gated_mm.normed", "stored_rotary_mm.normed")
_SWITCHES |= dict.fromkeys(NORMED, "normed")
SEPARATE = (*OVERLAP, "stored_mm.early_weights", "stored_gated_mm.gated", "stored_rotary_mm.rotary", *NORMED)
"""Candidates that test a switch alone: while other candidates run, these switches are off."""


def switch_off(device: torch.device, names: Iterable[str]) -> None:
    """Switches off the kernels with these candidate names in this process. Unknown names are ignored."""
    if device.type == "cpu":
        _switch_off_on_cpu(set(names))
        return
    switch_off_by_name(torch.empty(1, device=device), names)
    for name in names:
        if name in OPS:
            use_default_kernel(name, "cuda")


def switch_off_by_name(tensor: Tensor, names: Iterable[str], ops: Any = torch.ops.fp8serve) -> None:
    """Switches off, on the tensor's GPU, those of the kernels that the op `gemm_kernels` can switch off."""
    disabled = {_SWITCHES[name] for name in names if name in _SWITCHES} | disabled_kernels(ops, tensor)
    if disabled:
        set_disabled_kernels(ops, tensor, disabled)


def _switch_off_on_cpu(names: set[str]) -> None:
    variants = {cap: cap_cpu_features(cap) for cap in CPU_FEATURE_CAPS}
    op_candidates = {op: {f"{op}.{variants[cap][op]}" for cap in CPU_FEATURE_CAPS} for op in variants["best"]}
    bad_ops = {op for op, op_names in op_candidates.items() if op_names <= names}
    for op in bad_ops:
        use_default_kernel(op, "cpu")
    avoided = names - {name for op in bad_ops for name in op_candidates[op]}
    cap_names = {cap: {f"{op}.{variant}" for op, variant in variants[cap].items()} for cap in CPU_FEATURE_CAPS}
    cap_cpu_features(next(cap for cap in CPU_FEATURE_CAPS if not avoided & cap_names[cap]))


def cap_cpu_features(cap: str) -> dict[str, str]:
    """Limits the CPU features that kernels of this process use. Returns the variant that now runs for each op."""
    torch.ops.fp8serve.cpu_isa(cap)
    return {op: kernel["variant"] for op, kernel in cpu_kernels().items() if op in OPS}


def disabled_kernels(ops: Any, tensor: Tensor) -> set[str]:
    return set(ops.gemm_kernels(tensor, "").split("+")) - {""}


def set_disabled_kernels(ops: Any, tensor: Tensor, names: set[str]) -> None:
    """Switches off these kernels on the tensor's GPU, and all others on."""
    ops.gemm_kernels(tensor, "+".join(sorted(names)) or "none")
