"""How figures are measured and where they come from: timing, percentiles, and the origin of every result.

The machine is never completely idle: candidates take turns, and the fastest call of each counts. Other work can only
make a call slower, so the minimum is the cost of the code; and because candidates alternate within one process, a slow
minute affects all of them. Where a person waits (latencies), percentiles are given, never the mean.
"""

import datetime
import math
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fp8serve
from fp8serve.doctor import examine

Call = Callable[[], object]


def fastest(candidates: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """Seconds of the fastest call of each, taking turns for about `seconds` in all and at least three rounds."""
    results = dict.fromkeys(candidates, math.inf)
    for call in candidates.values():
        call()
    began, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - began < seconds:
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            results[name] = min(results[name], time.perf_counter() - start)
        rounds += 1
    return results


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed; NaN when there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def latencies(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds at the 50th, 90th and 99th percentile of `values` in seconds."""
    return {f"p{round(100 * share)}_ms": 1e3 * percentile(values, share) for share in (0.5, 0.9, 0.99)}


def provenance(command: str) -> dict[str, Any]:
    """Everything that a reader needs to repeat or to question a figure. `commit` is null outside a git checkout."""
    result = examine()
    cpu, torch = result["cpu"], result["torch"]
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(fp8serve.__file__).resolve().parent),
        "fp8serve": result["fp8serve"],
        "python": result["python"],
        "torch": torch["version"],
        "threads": torch["threads"],
        "platform": platform.platform(),
        "cpu": cpu["name"],
        "cores": cpu["cores"],
        "instruction_sets": cpu["instruction_sets"],
        "gpus": [gpu["name"] for gpu in result["gpus"]],
        "kernels": result["kernels"],
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


def one_line(origin: dict[str, Any]) -> str:
    """Readable text for the head of every table."""
    return (
        f"{origin['cpu']}, {origin['cores']} cores, {origin['threads']} threads; Python {origin['python']}, torch "
        f"{origin['torch']}, fp8serve {origin['fp8serve']} at {origin['commit'] or 'no commit'}; {origin['date']}"
    )
