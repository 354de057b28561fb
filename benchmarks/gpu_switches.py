"""Kernels switched off for a while, to measure what they gain."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without(kernel: str, device: str) -> Iterator[None]:
    """Switches off a kernel of csrc/cuda/gemm_switches.h, or several joined by "+", inside the block. "", and any
    device but "cuda", change nothing."""
    if device != "cuda" or not kernel:
        yield
        return
    here = torch.empty(1, device=device)
    off = str(torch.ops.fp8serve.gemm_kernels(here, ""))
    torch.ops.fp8serve.gemm_kernels(here, f"{off}+{kernel}" if off else kernel)
    try:
        yield
    finally:
        torch.ops.fp8serve.gemm_kernels(here, off or "none")
