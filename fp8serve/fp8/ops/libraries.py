"""Loads the libraries of compiled kernels. `backends()` reports which kernel runs each op, so no fallback is silent.

The libraries are shared objects next to the package (`libfp8serve_cpu.so`, `libfp8serve_cuda.so`). They are searched
along the package's `__path__`, because an editable install has two directories.
"""

import json
import platform
from pathlib import Path
from typing import Any, cast

import torch

from fp8serve.fp8.cuda_support import library_path
from fp8serve.fp8.ops.registry import OPS, declare, replaced_ops
from fp8serve.fp8.torch_private import has_kernel

ON_ARM = platform.machine() in {"aarch64", "arm64"}
LEVELS = ("portable", "neon", "neonfhm", "neonbf16") if ON_ARM else ("portable", "avx2", "avx512", "avx512bf16")
"""Names of sets of processor features, each a subset of the next."""

# Returns the level of the CPU library after limiting it to `cap`: one of LEVELS, alone or with single features as in
# "avx512+avx512vbmi", or "best" for no limit. "" does not change the limit. "amx" also switches on products for AMX,
# and "emulated_amx" the same with emulated instructions, for tests; "best" includes neither.
declare("cpu_isa(str cap) -> str")
declare("cpu_kernels() -> str")  # JSON: {op: {"variant": ..., "numerics": ...}}
declare("reads_packed() -> bool")  # whether packed_mm reads packed weights directly instead of unpacking them


def _load(stem: str) -> Path | None:
    path = library_path(stem)
    if path is not None:
        cast(Any, torch.ops).load_library(str(path))
    return path


# A torch that was built without CUDA cannot load the CUDA library.
LIBRARIES = {"cpu": _load("fp8serve_cpu"), "cuda": _load("fp8serve_cuda") if torch.version.cuda else None}


def _has_kernel(op: str, key: str) -> bool:
    return has_kernel(f"fp8serve::{op}", key)


def _has_default(op: str) -> bool:
    """Returns whether an op that only the CPU library implements has a kernel."""
    return _has_kernel(op, "CompositeExplicitAutograd")


def cpu_isa() -> str | None:
    """Returns the highest of LEVELS whose instructions are all used, or None without the CPU library."""
    return cast(str, torch.ops.fp8serve.cpu_isa("")) if _has_default("cpu_isa") else None


def reads_packed() -> bool:
    """Returns whether the CPU's `packed_mm` reads packed weights directly; otherwise packing has no benefit."""
    return _has_default("reads_packed") and cast(bool, torch.ops.fp8serve.reads_packed())


def cpu_kernels() -> dict[str, dict[str, str]]:
    """Returns the `variant` and the `numerics` class (docs/numerics.md) of each op with a kernel for this processor.

    If the variant depends on the types, it is the one for FP8 in products that take it, and else for BF16.
    """
    listing = torch.ops.fp8serve.cpu_kernels() if _has_default("cpu_kernels") else "{}"
    return cast(dict[str, dict[str, str]], json.loads(listing))


INVARIANT_SWITCH = "by_rows"
"""A switch that is no kernel: if it is off, the number of rows chooses no kernel (csrc/cuda/gemm_switches.h)."""
OFF_BY_DEFAULT = "normed"
"""The kernel that must be switched on to run (csrc/cuda/gemm_switches.h)."""


def backends(device: str = "cpu") -> dict[str, str]:
    """Returns which kernel runs each op on a device, such as "cpu kernel (avx512bf16)", "cuda kernel" or "reference".

    "composed" is an op that runs as a sequence of other ops. The text of an op says so if the self-check
    (fp8/selfcheck) disabled its kernel or a part of it.
    """
    default = {name: "composed" if op.is_composed else "reference" for name, op in OPS.items()}
    if device == "cpu":
        compiled = {op: f"cpu kernel ({kernel['variant']})" for op, kernel in cpu_kernels().items()}
    else:
        compiled = {op: f"{device} kernel" for op in default if _has_kernel(op, device.upper())}
    disabled = {op: f"{default[op]}; its {device} kernel is switched off" for op in replaced_ops(device)}
    variants = disabled_gemm_kernels() if device == "cuda" else []
    for op in ("scaled_mm", "mm", "paged_attention") if INVARIANT_SWITCH in variants else ():
        compiled[op] += ", invariant"
    variants = [name for name in variants if name != INVARIANT_SWITCH]
    for op, names in (
        ("scaled_mm", [name for name in variants if not name.startswith("attention_")]),
        ("paged_attention", [name.removeprefix("attention_") for name in variants if name.startswith("attention_")]),
    ):
        if names:
            compiled[op] += f", without {', '.join(names)}"
    return default | compiled | disabled


def disabled_gemm_kernels() -> list[str]:
    """Returns the names of the GPU kernels for GEMM and for attention on tensor cores that were disabled."""
    if LIBRARIES["cuda"] is None or not torch.cuda.is_available():
        return []
    names = cast(str, torch.ops.fp8serve.gemm_kernels(torch.empty(1, device="cuda"), ""))
    return [name for name in names.split("+") if name not in {"", OFF_BY_DEFAULT}]
