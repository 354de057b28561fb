"""The verdict of a check of kernels, the machine that it holds for (processor, driver, library of kernels, torch), and
the file that stores it: one for each machine, in the user's cache directory.

A file is written whole or not at all, and only by a check that came to its end; two checks at once leave the file of
one of them. Another GPU, driver, library or torch is another machine, whose kernels nobody has checked yet.
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


State = Literal["agrees", "disagrees", "throws", "crashes", "hangs"]
FORMAT, VERSION = "fp8serve.kernel-check", 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Finding:
    """The outcome of a kernel's check; why: in a few words, why it is wrong."""

    state: State
    why: str = ""

    def text(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


@dataclass(frozen=True)
class Verdict:
    """`kernels`: the outcome for each. `unfinished`: why not all were tried, in a sentence; empty: all were."""

    machine: Machine
    date: str
    kernels: Mapping[str, Finding]
    unfinished: str = ""

    @property
    def bad(self) -> dict[str, Finding]:
        """The kernels that are not to run."""
        return {name: finding for name, finding in self.kernels.items() if finding.state != "agrees"}


class VerdictError(Exception):
    """The file of a verdict is no such file; the message is a sentence."""


def folder() -> Path:
    """The directory of verdicts. RuntimeError where this user has no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "fp8serve" / "kernels"


def path_of(machine: Machine) -> Path:
    return folder() / f"{machine.kind}-{machine.key}.json"


def load(machine: Machine) -> Verdict | None:
    """The stored verdict for this machine, or None. VerdictError when what is there cannot be one; OSError."""
    path = path_of(machine)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    try:
        return _parsed(json.loads(text), machine)
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        raise VerdictError(f"{path} does not hold the verdict of a kernel check ({wrong}); it is not used.") from wrong


def _parsed(data: Any, machine: Machine) -> Verdict:
    if (data["format"], data["version"], data["machine"]) != (FORMAT, VERSION, asdict(machine)):
        raise ValueError("of another format, version or machine")
    kernels = {str(name): Finding(**entry) for name, entry in data["kernels"].items()}
    if any(entry.state not in get_args(State) for entry in kernels.values()):
        raise ValueError("an unknown state")
    return Verdict(machine, str(data["date"]), kernels)


def save(verdict: Verdict) -> Path:
    """Writes the file of a finished verdict. OSError when it cannot be written."""
    path = path_of(verdict.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "version": VERSION, "machine": asdict(verdict.machine), "date": verdict.date}
    content |= {"kernels": {name: asdict(data) for name, data in verdict.kernels.items()}}
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
