"""The verdict of a kernel check, the machine for which it is valid, and its file in the user's cache directory.

A machine is a processor with its driver, the library of kernels and the version of torch; a change of any makes another
machine, which has no verdict yet. Each machine has a file of its own. A file is written atomically, and only after a
check that has finished. If two checks run at once, the later one overwrites the file.
"""

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fp8serve.fp8.cuda_support import driver_version
from fp8serve.fp8.ops.libraries import LIBRARIES


@dataclass(frozen=True)
class Machine:
    """Everything on which the results of a kernel check depend.

    Attributes:
        kind: "cpu" or "cuda".
        name: The name of the processor.
        driver: The version of the GPU driver, or the features of a CPU.
        library: The SHA-256 of the library of kernels.
        torch: The version of torch, whose kernels are checked, too.
    """

    kind: str
    name: str
    driver: str
    library: str
    torch: str

    @property
    def key(self) -> str:
        """A hash of all attributes, which is part of the name of the verdict's file."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:24]


def machine_of(device: torch.device) -> Machine | None:
    """Returns the machine of a device, or None if no library of kernels is loaded for this type of device."""
    library = LIBRARIES.get(device.type)
    if library is None:
        return None
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else _cpu_name()
    driver = _gpu_driver() if is_gpu else _cpu_features()
    return Machine(device.type, name, driver, _sha256(library), torch.__version__)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_or_empty(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _gpu_driver() -> str:
    """Returns the driver's version, such as "580.65.06", or if that is unknown the CUDA version that it supports."""
    match = re.search(r"Kernel Module\D*(\d+\.[\d.]+)", _read_or_empty("/proc/driver/nvidia/version"))
    return match[1] if match else f"CUDA {'.'.join(map(str, driver_version() or ('?',)))}"


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read_or_empty("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cpu_features() -> str:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read_or_empty("/proc/cpuinfo"), re.MULTILINE)
    return f"features {hashlib.sha256(match[1].encode()).hexdigest()[:8]}" if match else ""


State = Literal["agrees", "disagrees", "throws", "crashes", "hangs"]
FORMAT, VERSION = "fp8serve.kernel-check", 1
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class KernelResult:
    """The result of a kernel's check. `why` is a phrase that says how a bad kernel has failed."""

    state: State
    why: str = ""

    def text(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


@dataclass(frozen=True)
class Verdict:
    """The results of all kernels. `unfinished` is the reason why some kernels were not checked, or empty."""

    machine: Machine
    date: str
    kernels: Mapping[str, KernelResult]
    unfinished: str = ""

    @property
    def bad(self) -> dict[str, KernelResult]:
        """The results of the kernels that must not run."""
        return {name: result for name, result in self.kernels.items() if result.state != "agrees"}


class VerdictError(Exception):
    """Raised if a file has no valid verdict. The message is a sentence."""


def verdict_directory() -> Path:
    """Returns the directory of verdicts. Raises RuntimeError if the user has no home directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "fp8serve" / "kernels"


def path_of(machine: Machine) -> Path:
    return verdict_directory() / f"{machine.kind}-{machine.key}.json"


def load(machine: Machine) -> Verdict | None:
    """Returns the stored verdict for a machine, or None if there is none.

    Raises VerdictError if the file has no valid verdict, and OSError if it cannot be read.
    """
    path = path_of(machine)
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    try:
        return _parse(json.loads(text), machine)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise VerdictError(f"{path} does not hold the verdict of a kernel check ({error}); it is not used.") from error


def _parse(data: Any, machine: Machine) -> Verdict:
    if (data["format"], data["version"], data["machine"]) != (FORMAT, VERSION, asdict(machine)):
        raise ValueError("of another format, version or machine")
    kernels = {str(name): KernelResult(**entry) for name, entry in data["kernels"].items()}
    if any(entry.state not in get_args(State) for entry in kernels.values()):
        raise ValueError("an unknown state")
    return Verdict(machine, str(data["date"]), kernels)


def save(verdict: Verdict) -> Path:
    """Writes a finished verdict to its file and returns the path. Raises OSError if the file cannot be written."""
    path = path_of(verdict.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "version": VERSION, "machine": asdict(verdict.machine), "date": verdict.date}
    content |= {"kernels": {name: asdict(result) for name, result in verdict.kernels.items()}}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
