"""The libraries of compiled kernels, and who serves each op: `backends()`, so that a fallback is never silent.

The libraries are plain shared objects next to the package (`libfp8serve_cpu.so`, `libfp8serve_cuda.so`), looked up
along the package's `__path__` because an editable install has two places.
"""

from pathlib import Path
from typing import Any, cast

import torch

import fp8serve
from fp8serve.fp8.ops.registry import OPS, declare

# The instruction set of the CPU library, which a test may cap ("portable" .. "avx512bf16", "best"); "" only asks.
declare("cpu_isa(str cap) -> str")


def library_path(stem: str) -> Path | None:
    """Where a library of kernels lies, whether it can be loaded here or not."""
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
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"fp8serve::{op}", key))


def cpu_isa() -> str | None:
    """The instruction set of the CPU library ("avx512bf16", "avx512", "avx2", "portable"); None without it."""
    if not _has_kernel("cpu_isa", "CompositeExplicitAutograd"):
        return None
    return cast(str, torch.ops.fp8serve.cpu_isa(""))


def backends(device: str = "cpu") -> dict[str, str]:
    """Which kernel serves each op on a device: "cpu kernel (avx512bf16)", "cuda kernel", "reference" or "composed".

    A composed op runs as a sequence of the other ops.
    """
    detail = f" ({cpu_isa()})" if device == "cpu" and cpu_isa() else ""
    default = {name: "composed" if op.composed else "reference" for name, op in OPS.items()}
    return {op: f"{device} kernel{detail}" if _has_kernel(op, device.upper()) else default[op] for op in default}
