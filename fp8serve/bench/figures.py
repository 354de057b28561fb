"""Measures times and percentiles, and records the provenance of results.

Other processes on the machine can only make a call slower. So the fastest call of a candidate is the cost of its code.
Candidates take turns within one process, so that a busy minute affects all of them. For latencies, which users
experience, percentiles are reported and never the mean.
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
    """Returns the seconds of the fastest call of each candidate. The candidates take turns for about `seconds` in all,
    and for at least three rounds."""
    results = dict.fromkeys(candidates, math.inf)
    for call in candidates.values():
        call()
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds:
        for name, call in candidates.items():
            call_start = time.perf_counter()
            call()
            results[name] = min(results[name], time.perf_counter() - call_start)
        rounds += 1
    return results


def percentile(values: Sequence[float], fraction: float) -> float:
    """Returns the nearest-rank percentile, or NaN if there are no values: the smallest value v such that at least
    `fraction` (0 to 1) of the values are at most v."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else math.nan


def latencies(values: Sequence[float]) -> dict[str, float]:
    """Returns the 50th, 90th and 99th percentile, in milliseconds, of values in seconds."""
    return {f"p{round(100 * fraction)}_ms": 1e3 * percentile(values, fraction) for fraction in (0.5, 0.9, 0.99)}


def provenance(command: str) -> dict[str, Any]:
    """Returns the command, versions and hardware of a measurement. `commit` is None outside a git checkout."""
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
    """Returns the commit of the git checkout at `folder`, with "+" if files were modified, or None if `folder`
    is not in a git checkout."""
    commit_id = _git(folder, "rev-parse", "--short=12", "HEAD")
    if commit_id is None:
        return None
    return commit_id + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *args: str) -> str | None:
    command = ["git", "-C", str(folder), *args]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def one_line(origin: dict[str, Any]) -> str:
    """Returns the result of `provenance` as a line of text."""
    return (
        f"{origin['cpu']}, {origin['cores']} cores, {origin['threads']} threads; Python {origin['python']}, torch "
        f"{origin['torch']}, fp8serve {origin['fp8serve']} at {origin['commit'] or 'no commit'}; {origin['date']}"
    )
