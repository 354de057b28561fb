"""The child of a check with a kernel that is broken on purpose: python -m tests.fp8.broken_kernel HOW WHERE.

HOW: disagrees, throws, hangs or crashes. WHERE: the kernel "silu_mul" is broken only at that level of the processor's
features, or "everywhere". Elsewhere, and as the other kernels, the reference answers, so that a check is short.
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
    """silu_mul as a kernel that is wrong in this way."""

    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        right = reference.silu_mul(gate, up)
        if where not in ("everywhere", ops.cpu_isa()):
            return right
        if how == "throws":
            raise RuntimeError("an illegal memory access was encountered")
        if how == "crashes":
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "hangs":
            time.sleep(1)
        return right + (torch.arange(right.numel()) == right.numel() - 1).view(right.shape).to(right.dtype)

    return silu_mul


def register(how: str, where: str) -> Any:
    """Replaces the library's kernel by the broken one, for as long as the result is held."""
    return registry.override_kernel(OP, broken(how, where), "cpu")


if __name__ == "__main__":
    held = register(*sys.argv[1:])
    every = candidates.candidates
    child.candidates = lambda device: (c for c in every(device) if c.op in (OP, *OTHERS))  # type: ignore[assignment]
    with torch.no_grad():
        child.main()
