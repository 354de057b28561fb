"""The GPUs of this machine as the CUDA driver describes them, asked through ctypes.

The server's front and the command line choose a device (model/device.py) in processes that do not import torch, which
would take seconds. The driver is initialized, but no context is created, so the process takes no memory of a GPU. The
driver hides GPUs that CUDA_VISIBLE_DEVICES leaves out, as it does for torch.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # values of CUdevice_attribute in cuda.h
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """A GPU. `capability` is 10 * major + minor of its compute capability, `memory` its total memory in bytes."""

    name: str
    capability: int
    memory: int


def driver_version() -> tuple[int, int] | None:
    """Returns the CUDA version that the driver supports, such as (13, 0), or None if there is no driver."""
    driver = _load()
    version = ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def visible_gpus() -> list[Gpu]:
    """Returns the GPUs that this process may use, in the order of torch's indexes."""
    driver = _load()
    count = ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    gpus = (_describe(driver, index) for index in range(count.value))
    return [gpu for gpu in gpus if gpu is not None]


def _load() -> Any:
    """Returns the driver's library, or None if this machine has none."""
    try:
        return ctypes.CDLL(LIBRARY)
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
