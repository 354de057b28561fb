"""How a report was made: the command to repeat it, the time, and the machine."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .result import Made


def made(command: str) -> Made:
    """Now and here."""
    machine = f"{platform.system()} on {_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return Made(command, datetime.now(UTC).isoformat(timespec="seconds"), machine)


def call(function: str, model: Path, **arguments: Any) -> str:
    """A call of one of this package's functions, with the arguments that differ from their defaults."""
    said = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
    given = ", ".join(f"{name}={value!r}" for name, value in said.items() if value is not None)
    return f"fp8serve.{function}({', '.join(filter(None, (repr(str(model)), given)))})"


def _processor() -> str:
    """The processor's name where the system has it (Linux), else its kind."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
