"""Runs rotary on an emulated GPU whose compiler contracts products and sums to FMA, as nvcc does (test_contraction.py).

    python -m tests.cuda.contraction_run careful | careless

Prints how many of the FP32 cases differ from the reference, and the number of cases. `careless` compiles the kernel
without the intrinsics that round products separately.
"""

import sys
from pathlib import Path

import torch

from fp8serve.fp8.ops import cases, reference
from tests.cuda import emulated

FLAGS = ["-O2", "-mfma", "-ffp-contract=fast"]
SOURCES = [emulated.ROOT / "csrc/cuda/activations.cu", *sorted(emulated.EMULATOR.glob("*.cpp"))]
BUILDS = {
    "careful": emulated.Build("emulator-contracted", FLAGS, SOURCES),
    "careless": emulated.Build("emulator-careless", [*FLAGS, "-DFP8SERVE_CARELESS"], SOURCES),
}


def differing(library: Path) -> tuple[int, int]:
    """Returns the number of FP32 cases that differ from the reference, and the number of all FP32 cases."""
    gpu = emulated.Emulator(library)
    arguments = [case.make() for case in cases("rotary")]
    single = [args for args in arguments if args[0].dtype is torch.float32 and args[0].numel()]
    return sum(not torch.equal(gpu.ops.rotary(*args), reference.rotary(*args)) for args in single), len(single)


if __name__ == "__main__":
    print(*differing(emulated.build(BUILDS[sys.argv[1]])))
