"""The GPUs of this machine, their driver, and those that the library of CUDA kernels supports.

The server's front and the command line choose a device (model/device.py) in processes that do not import torch, which
would take seconds. So this module does not import torch, but asks the CUDA driver through ctypes. The driver is
initialized, but no context is created, so the process takes no memory of a GPU. The driver hides GPUs that
CUDA_VISIBLE_DEVICES leaves out, as it does for torch.

A library has code for single architectures ("sm_90a") and for families ("sm_100f" runs on sm_100 and sm_103). Code for
sm_89 is also present as PTX, which newer GPUs compile when they load it; it is correct, but has only the slowest GEMM.
On an unsupported GPU every op would fail, because torch dispatches by device type and not by architecture. So code that
uses a device calls `check_gpu` first.
"""

import ctypes
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fp8serve
from fp8serve.errors import MachineError

if TYPE_CHECKING:
    import torch

DRIVER = "libcuda.so.1"
_BUILD_INFO = re.compile(rb"fp8serve-cuda-(architectures|runtime)=([\w.+]{1,200});")
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # values of CUdevice_attribute in cuda.h
_NAME_BYTES = 256
_PTX_CAPABILITY = 89  # the compute capability whose code is also present as PTX


@dataclass(frozen=True)
class Gpu:
    """A GPU. `capability` is 10 * major + minor of its compute capability, `memory` its total memory in bytes."""

    name: str
    capability: int
    memory: int


def driver_version() -> tuple[int, int] | None:
    """Returns the CUDA version that the driver supports, such as (13, 0), or None if there is no driver."""
    driver = _load_driver()
    version = ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def visible_gpus() -> list[Gpu]:
    """Returns the GPUs that this process may use, in the order of torch's indexes."""
    driver = _load_driver()
    count = ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    gpus = (_describe(driver, index) for index in range(count.value))
    return [gpu for gpu in gpus if gpu is not None]


def _load_driver() -> Any:
    """Returns the driver's library, or None if this machine has none."""
    try:
        return ctypes.CDLL(DRIVER)
    except OSError:
        return None


def _describe(driver: Any, index: int) -> Gpu | None:
    """Returns a description of a GPU, or None if the driver cannot describe it."""
    device, major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    results = (
        driver.cuDeviceGetName(name, _NAME_BYTES, device),
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device),
    )
    if any(results):
        return None
    return Gpu(name.value.decode(errors="replace"), 10 * major.value + minor.value, memory.value)


@dataclass(frozen=True)
class CudaBuild:
    """The architectures for which a library was built, and the CUDA runtime with which it was built.

    `architectures` is a tuple such as ("sm_89", "sm_90a"), empty if unknown. `runtime` is a version such as (13, 0), or
    None if unknown.
    """

    architectures: tuple[str, ...] = ()
    runtime: tuple[int, int] | None = None

    def has_code_for(self, capability: int) -> bool:
        """Returns whether the library was compiled for the compute capability (10 * major + minor) or its family."""
        return any(_includes(architecture, capability) for architecture in self.architectures)

    def runs_on(self, capability: int) -> bool:
        """Returns whether a GPU of this compute capability can run the library, or True if that is unknown."""
        can_compile_ptx = f"sm_{_PTX_CAPABILITY}" in self.architectures and capability > _PTX_CAPABILITY
        return not self.architectures or can_compile_ptx or self.has_code_for(capability)


def _includes(architecture: str, capability: int) -> bool:
    own_capability = int(re.sub(r"\D", "", architecture))
    if architecture.endswith("f"):
        return capability // 10 == own_capability // 10 and capability >= own_capability
    return capability == own_capability


def library_path(stem: str) -> Path | None:
    """Returns the path of a library of kernels, "fp8serve_cpu" or "fp8serve_cuda", or None if the file does not
    exist."""
    paths = (Path(folder) / f"lib{stem}.so" for folder in fp8serve.__path__)
    return next((path for path in paths if path.exists()), None)


def read_build(library: Path) -> CudaBuild:
    """Returns the build information that is embedded in the library file."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        info = {name.decode(): value.decode() for name, value in _BUILD_INFO.findall(content)}
    runtime = re.match(r"(\d+)\.(\d+)", info.get("runtime", ""))
    names = info.get("architectures", "")
    return CudaBuild(tuple(names.split("+")) if names else (), (int(runtime[1]), int(runtime[2])) if runtime else None)


def incompatibility(build: CudaBuild, gpu: str, capability: int, driver: tuple[int, int] | None) -> str | None:
    """Returns the reason why the library cannot run on a GPU whose driver supports CUDA `driver`, or None if it can."""
    if not build.runs_on(capability):
        return (
            f"the CUDA kernels were built for {' '.join(build.architectures)} and not for {gpu} (sm_{capability}); "
            "build fp8serve with -DFP8SERVE_CUDA=OFF to run the slower PyTorch reference there, or use --device cpu."
        )
    if driver is not None and build.runtime is not None and driver[0] < build.runtime[0]:
        return (
            f"the driver of {gpu} is for CUDA {_dotted(driver)} and the CUDA kernels were built with CUDA"
            f" {_dotted(build.runtime)}; update the driver, or build them with an older toolkit."
        )
    return None


def slowdown(build: CudaBuild, gpu: str, capability: int) -> str | None:
    """Returns a warning that a GPU runs the library only through PTX, or None if the library has code for the GPU."""
    if not build.architectures or not build.runs_on(capability) or build.has_code_for(capability):
        return None
    return (
        f"the CUDA kernels have no code for {gpu} (sm_{capability}), so the GPU compiles the PTX of "
        f"sm_{_PTX_CAPABILITY} and uses the slowest GEMM; build fp8serve with nvcc 12.9 or newer for the GPU's family, "
        "if that is 100f or 120f."
    )


def check_gpu(device: "torch.device") -> None:
    """Raises MachineError if the CUDA kernels are loaded and this GPU cannot run them."""
    import torch

    from fp8serve.fp8 import ops

    library = ops.LIBRARIES["cuda"]
    if device.type != "cuda" or library is None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    sentence = incompatibility(read_build(library), name, 10 * major + minor, driver_version())
    if sentence is not None:
        raise MachineError(sentence[0].upper() + sentence[1:])


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
