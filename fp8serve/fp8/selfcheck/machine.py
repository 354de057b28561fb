"""What a verdict on kernels holds for: the processor, its driver, the library of kernels, and torch."""

import hashlib
import json
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fp8serve.fp8 import ops
from fp8serve.fp8.cuda_library import driver_version


@dataclass(frozen=True)
class Machine:
    """`kind`: "cpu" or "cuda". `driver`: of a CPU its features. `library`: the SHA-256 of the library of kernels.
    `torch`: its version, because its kernels are checked, too."""

    kind: str
    name: str
    driver: str
    library: str
    torch: str

    @property
    def key(self) -> str:
        """Names its verdict's file."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:24]


def machine_of(device: torch.device) -> Machine | None:
    """None where there is no library of kernels for this kind of device."""
    library = ops.LIBRARIES.get(device.type)
    if library is None:
        return None
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else _cpu_name()
    driver = _gpu_driver() if on_gpu else _cpu_features()
    return Machine(device.type, name, driver, _hash_of(library), torch.__version__)


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _gpu_driver() -> str:
    """ "580.65.06", or the CUDA version that it is for."""
    match = re.search(r"Kernel Module\D*(\d+\.[\d.]+)", _read("/proc/driver/nvidia/version"))
    return match[1] if match else f"CUDA {'.'.join(map(str, driver_version() or ('?',)))}"


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cpu_features() -> str:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return f"features {hashlib.sha256(match[1].encode()).hexdigest()[:8]}" if match else ""
