"""The memory of a server's processes over the time of a run, and how much it grew.

It judges anonymous memory (`RssAnon`), because leaks appear there. The system loads and drops pages of mapped weights
as it needs; they are recorded as part of the whole (`VmRSS`). Needs /proc, thus Linux.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Sample = dict[str, Any]


def resident(pid: int) -> dict[str, float]:
    """MB of a process: {"resident", "anonymous"}."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {name: int(fields[key].split()[0]) / 1024 for name, key in (("resident", "VmRSS"), ("anonymous", "RssAnon"))}


def children(pid: int) -> list[int]:
    """Processes that this one started and that are alive."""
    return [int(c) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for c in tasks.read_text().split()]


def watch(pids: dict[str, int], every: float, ended: threading.Event) -> list[Sample]:
    """Samples of every process, one every `every` seconds until `ended`; at least one."""
    began, samples = time.monotonic(), list[Sample]()
    while not samples or not ended.wait(every):
        now = round(time.monotonic() - began, 2)
        samples.append({"seconds": now} | {name: resident(pid) for name, pid in pids.items()})
    return samples


def growth(samples: Sequence[Sample], warm_up: float, process: str) -> float:
    """The growth of anonymous memory from the first to the last quarter after the warm-up, in MB; 0 if there are no
    samples after the warm-up."""
    values = [sample[process]["anonymous"] for sample in samples if sample["seconds"] >= warm_up]
    if not values:
        return 0.0
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[:quarter])


def too_much(samples: Sequence[Sample], warm_up: float, allow: float) -> tuple[dict[str, float], list[str]]:
    """Returns the growth of each process in MB, and a sentence for each that grew by more than `allow`."""
    grown = {name: growth(samples, warm_up, name) for name in samples[0] if name != "seconds"}
    return grown, [
        f"The {name} grew by {mb:.1f} MB after the warm-up; {allow:g} are allowed."
        for name, mb in grown.items()
        if mb > allow
    ]
