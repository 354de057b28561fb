"""How long each file of tests takes: `--file-durations FILE` writes it, and prints the slowest files.

`make durations` runs everything and writes tests/durations.json, which tests/test_durations.py reads. Seconds are those
that tests and their fixtures waited, whatever else the machine did meanwhile: compare files, not machines.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SHOWN = 40


class FileDurations:
    """A plugin of pytest, registered in the process that reports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total = max(sum(self.seconds.values()), 1e-9)
        record = {file: round(seconds, 1) for file, seconds in sorted(self.seconds.items())}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n")
        terminalreporter.section(f"the {SHOWN} slowest of {len(record)} files, of {total:.0f} s")
        for file, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f} s {seconds / total:6.1%}  {file}")


def too_slow(record: dict[str, float], most: float) -> dict[str, float]:
    """Files that take more than the share `most` of the whole, with their shares."""
    total = sum(record.values())
    return {file: seconds / total for file, seconds in record.items() if seconds > most * total}
