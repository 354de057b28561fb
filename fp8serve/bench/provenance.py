"""The origin of figures: the command, the date, the machine, the versions and the commit; part of every result."""

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import fp8serve
from fp8serve.doctor import examine


def provenance(command: str) -> dict[str, Any]:
    """Everything that a reader needs to repeat or to question a figure. `commit` is null outside a git checkout."""
    found = examine()
    cpu, torch = found["cpu"], found["torch"]
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(fp8serve.__file__).resolve().parent),
        "fp8serve": found["fp8serve"],
        "python": found["python"],
        "torch": torch["version"],
        "threads": torch["threads"],
        "platform": platform.platform(),
        "cpu": cpu["name"],
        "cores": cpu["cores"],
        "instruction_sets": cpu["instruction_sets"],
        "gpus": [gpu["name"] for gpu in found["gpus"]],
        "kernels": found["kernels"],
    }


def commit(folder: Path) -> str | None:
    """The commit that `folder` is checked out at, with "+" when files differ from it; None when it is not a
    checkout."""
    described = _git(folder, "rev-parse", "--short=12", "HEAD")
    if described is None:
        return None
    return described + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def one_line(found: dict[str, Any]) -> str:
    """Readable text for the head of every table."""
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads; Python {found['python']}, torch "
        f"{found['torch']}, fp8serve {found['fp8serve']} at {found['commit'] or 'no commit'}; {found['date']}"
    )
