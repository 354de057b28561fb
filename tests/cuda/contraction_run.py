"""Rotary on an emulated GPU whose compiler makes one operation of a product and a sum, as nvcc does
(test_contraction.py).

    python -m tests.cuda.contraction_run careful | careless

Prints in how many of the cases in FP32 bits differ from the reference. `careless`: products are not rounded by name.
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
    """Cases that differ, and all cases."""
    gpu = emulated.Emulator(library)
    made = [case.make() for case in cases("rotary")]
    single = [args for args in made if args[0].dtype is torch.float32 and args[0].numel()]
    return sum(not torch.equal(gpu.ops.rotary(*args), reference.rotary(*args)) for args in single), len(single)


if __name__ == "__main__":
    print(*differing(emulated.build(BUILDS[sys.argv[1]])))
