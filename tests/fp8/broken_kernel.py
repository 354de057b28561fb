"""The child process of a kernel check, with a kernel that is broken on purpose.

Usage: python -m tests.fp8.broken_kernel HOW WHERE. HOW is "disagrees", "throws", "hangs" or "crashes". WHERE is the
instruction set on which the kernel "silu_mul" is broken, or "everywhere". On other instruction sets, and for all other
ops, the reference computes, so that the check is short.
"""

import os
import signal
import sys
import time
from typing import Any

import torch

from fp8serve.fp8 import ops
from fp8serve.fp8.ops import reference, registry
from fp8serve.fp8.selfcheck import candidates, child

OP, OTHERS = "silu_mul", ("silu_mul_backward", "rms_norm")


def broken(how: str, where: str) -> Any:
    """Returns a kernel for silu_mul that is broken in the given way."""

    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        expected = reference.silu_mul(gate, up)
        if where not in ("everywhere", ops.cpu_isa()):
            return expected
        if how == "throws":
            raise RuntimeError("an illegal memory access was encountered")
        if how == "crashes":
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "hangs":
            time.sleep(1)
        return expected + (torch.arange(expected.numel()) == expected.numel() - 1).view(expected.shape).to(
            expected.dtype
        )

    return silu_mul


def register(how: str, where: str) -> Any:
    """Replaces the library's kernel by the broken one while the returned object exists."""
    return registry.override_kernel(OP, broken(how, where), "cpu")


if __name__ == "__main__":
    override = register(*sys.argv[1:])
    every = candidates.candidates
    child.candidates = lambda device: (c for c in every(device) if c.op in (OP, *OTHERS))  # type: ignore[assignment]
    with torch.no_grad():
        child.main()
