"""Kernels switched off or on for a while, to measure what they gain."""

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch


@contextmanager
def without(kernel: str, device: str) -> Iterator[None]:
    """Switches off a kernel of csrc/cuda/gemm_switches.h, or several joined by "+", inside the block. "", and any
    device but "cuda", change nothing."""
    with _switched(set(kernel.split("+")), set(), device):
        yield


@contextmanager
def including(kernel: str, device: str) -> Iterator[None]:
    """Switches on a kernel that is off by default inside the block. Any device but "cuda" changes nothing."""
    with _switched(set(), {kernel}, device):
        yield


@contextmanager
def _switched(off: Set[str], on: Set[str], device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    here = torch.empty(1, device=device)
    default = str(torch.ops.fp8serve.gemm_kernels(here, ""))
    disabled = (set(default.split("+")) | off) - on - {""}
    torch.ops.fp8serve.gemm_kernels(here, "+".join(sorted(disabled)) or "none")
    try:
        yield
    finally:
        torch.ops.fp8serve.gemm_kernels(here, default or "none")
