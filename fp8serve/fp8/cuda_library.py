"""What the library of CUDA kernels reports it was built for, and whether a GPU and its driver can run it.

A library has code for single chips ("sm_90a"), for families ("sm_100f": sm_100 and sm_103), and, with sm_89's, PTX that
newer chips compile when they load it: correct, but with the slowest GEMM. A chip that can run none of it would fail in
every op, because dispatch looks at the kind of a device and not at the chip. Code that is given a device therefore
calls `check_gpu` first.
"""

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8serve.errors import MachineError
from fp8serve.fp8 import ops
from fp8serve.fp8.torch_private import cuda_driver_version

_FACTS = re.compile(rb"fp8serve-cuda-(architectures|runtime)=([\w.+]{1,200});")
_JIT = 89  # the chip whose code is also present as PTX, which newer chips compile


@dataclass(frozen=True)
class Built:
    """architectures: ("sm_89", "sm_90a"), empty where the library does not say. runtime: CUDA's (13, 0), or None."""

    architectures: tuple[str, ...] = ()
    runtime: tuple[int, int] | None = None

    def has_code_for(self, capability: int) -> bool:
        """Compiled for the chip (10 * major + minor) or for its family."""
        return any(_covers(name, capability) for name in self.architectures)

    def runs_on(self, capability: int) -> bool:
        compiles = f"sm_{_JIT}" in self.architectures and capability > _JIT
        return not self.architectures or compiles or self.has_code_for(capability)


def _covers(architecture: str, capability: int) -> bool:
    chip = int(re.sub(r"\D", "", architecture))
    if architecture.endswith("f"):
        return capability // 10 == chip // 10 and capability >= chip
    return capability == chip


def built_for(library: Path) -> Built:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        facts = {name.decode(): value.decode() for name, value in _FACTS.findall(content)}
    runtime = re.match(r"(\d+)\.(\d+)", facts.get("runtime", ""))
    names = facts.get("architectures", "")
    return Built(tuple(names.split("+")) if names else (), (int(runtime[1]), int(runtime[2])) if runtime else None)


def refusal(built: Built, gpu: str, capability: int, driver: tuple[int, int] | None) -> str | None:
    """Why the library cannot run on a GPU with a driver for CUDA `driver`, in one sentence; None: it can."""
    if not built.runs_on(capability):
        return (
            f"the CUDA kernels were built for {' '.join(built.architectures)} and not for {gpu} (sm_{capability}); "
            "build fp8serve with -DFP8SERVE_CUDA=OFF to run the slower PyTorch reference there, or use --device cpu."
        )
    if driver is not None and built.runtime is not None and driver[0] < built.runtime[0]:
        return (
            f"the driver of {gpu} is for CUDA {_dotted(driver)} and the CUDA kernels were built with CUDA"
            f" {_dotted(built.runtime)}; update the driver, or build them with an older toolkit."
        )
    return None


def slowness(built: Built, gpu: str, capability: int) -> str | None:
    """One sentence on the loss of a GPU that compiles sm_89's code; None: the library has code for it."""
    if not built.architectures or not built.runs_on(capability) or built.has_code_for(capability):
        return None
    return (
        f"the CUDA kernels have no code for {gpu} (sm_{capability}), which compiles that of sm_{_JIT} and multiplies "
        "with the slowest of them; build them with nvcc 12.9 or newer for its family, if it is one of 100f and 120f."
    )


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver is for; None without a driver, or without a torch that asks it."""
    driver = cuda_driver_version()
    return (driver // 1000, driver % 1000 // 10) if driver else None


def check_gpu(device: torch.device) -> None:
    """MachineError, in one sentence, where the CUDA kernels are loaded and this GPU cannot run them."""
    library = ops.LIBRARIES["cuda"]
    if device.type != "cuda" or library is None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    why = refusal(built_for(library), name, 10 * major + minor, driver_version())
    if why is not None:
        raise MachineError(why[0].upper() + why[1:])


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
