"""The libraries of compiled kernels, and `backends()`, which says what serves each op, so that no fallback is silent.

The libraries are plain shared objects next to the package (`libfp8serve_cpu.so`, `libfp8serve_cuda.so`), looked up
along the package's `__path__` because an editable install has two places.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch

import fp8serve
from fp8serve.fp8.ops.registry import OPS, declare, replaced
from fp8serve.fp8.torch_private import has_kernel

LEVELS = ("portable", "avx2", "avx512", "avx512bf16")  # names for sets of processor features, each a subset of the next

# The level of the CPU library, which a test may cap: one of LEVELS, alone or with single features as in
# "avx512+avx512vbmi", or "best"; "" only asks.
declare("cpu_isa(str cap) -> str")
declare("cpu_kernels() -> str")  # JSON: {op: {"variant": ..., "numerics": ...}}
declare("reads_packed() -> bool")  # whether packed_mm reads packed weights as they are, or unpacks them first


def library_path(stem: str) -> Path | None:
    """The path of a library of kernels, whether or not it can be loaded here."""
    paths = (Path(folder) / f"lib{stem}.so" for folder in fp8serve.__path__)
    return next((path for path in paths if path.exists()), None)


def _load(stem: str) -> Path | None:
    path = library_path(stem)
    if path is not None:
        cast(Any, torch.ops).load_library(str(path))
    return path


# A CUDA library cannot be loaded by a torch that was built without CUDA, so it is not even tried there.
LIBRARIES = {"cpu": _load("fp8serve_cpu"), "cuda": _load("fp8serve_cuda") if torch.version.cuda else None}


def _has_kernel(op: str, key: str) -> bool:
    return has_kernel(f"fp8serve::{op}", key)


def _has_default(op: str) -> bool:
    """Whether the CPU library was loaded, which alone implements such an op."""
    return _has_kernel(op, "CompositeExplicitAutograd")


def cpu_isa() -> str | None:
    """The highest of LEVELS whose features are all in force; None without the CPU library."""
    return cast(str, torch.ops.fp8serve.cpu_isa("")) if _has_default("cpu_isa") else None


def reads_packed() -> bool:
    """Whether the CPU's `packed_mm` reads packed weights as they are; only then packing is worthwhile."""
    return _has_default("reads_packed") and cast(bool, torch.ops.fp8serve.reads_packed())


def cpu_kernels() -> dict[str, dict[str, str]]:
    """For each op with a CPU kernel, the `variant` that this processor runs and its `numerics` class
    (docs/numerics.md). Where the variant depends on the types, it is that for BF16 and FP8."""
    listing = torch.ops.fp8serve.cpu_kernels() if _has_default("cpu_kernels") else "{}"
    return cast(dict[str, dict[str, str]], json.loads(listing))


def backends(device: str = "cpu") -> dict[str, str]:
    """Which kernel serves each op on a device: "cpu kernel (avx512bf16)", with the variant of this op, "cuda kernel",
    "reference" or "composed".

    A composed op runs as a sequence of the other ops. What a check has switched off (fp8/selfcheck) is said behind it.
    """
    default = {op: "composed" if known.composed else "reference" for op, known in OPS.items()}
    if device == "cpu":
        compiled = {op: f"cpu kernel ({kernel['variant']})" for op, kernel in cpu_kernels().items()}
    else:
        compiled = {op: f"{device} kernel" for op in default if _has_kernel(op, device.upper())}
    switched_off = {op: f"{default[op]}; its {device} kernel is switched off" for op in replaced(device)}
    off = gemm_kernels_off() if device == "cuda" else []
    for op, names in (
        ("scaled_mm", [name for name in off if not name.startswith("attention_")]),
        ("paged_attention", [name.removeprefix("attention_") for name in off if name.startswith("attention_")]),
    ):
        if names:
            compiled[op] += f", without {', '.join(names)}"
    return default | compiled | switched_off


def gemm_kernels_off() -> list[str]:
    """The kernels of products, and of attention on tensor cores, that are switched off on GPUs."""
    if LIBRARIES["cuda"] is None or not torch.cuda.is_available():
        return []
    names = cast(str, torch.ops.fp8serve.gemm_kernels(torch.empty(1, device="cuda"), ""))
    return [name for name in names.split("+") if name]
