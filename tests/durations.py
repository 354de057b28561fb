"""With `--durations-file FILE`, records how long tests take, and prints the slowest files.

`make durations` runs all tests and writes tests/durations.json. Its "files" are the seconds of every file, which
tests/test_durations.py checks. Its "cases" are the mean seconds of one case, fixtures included, of every slow test
function, which tests/selection.py uses. All seconds depend on the machine and its load: compare files, not machines.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SHOWN = 40
MIN_SECONDS = 0.1  # functions with fewer mean seconds a case are not listed


class Durations:
    """A pytest plugin; under xdist it is registered in the controller only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: Counter[str] = Counter()  # by test function
        self.cases: Counter[str] = Counter()  # by test function

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        function = report.nodeid.partition("[")[0]
        self.seconds[function] += report.duration  # type: ignore[assignment]
        self.cases[function] += report.when == "setup"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files: Counter[str] = Counter()
        for function, seconds in self.seconds.items():
            files[function.partition("::")[0]] += seconds  # type: ignore[assignment]
        total = max(sum(files.values()), 1e-9)
        means = {function: self.seconds[function] / cases for function, cases in sorted(self.cases.items()) if cases}
        record = {
            "files": {file: round(seconds, 1) for file, seconds in sorted(files.items())},
            "cases": {function: round(mean, 2) for function, mean in means.items() if mean >= MIN_SECONDS},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n")
        terminalreporter.section(f"the {SHOWN} slowest of {len(files)} files, of {total:.0f} s")
        for file, seconds in files.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f} s {seconds / total:6.1%}  {file}")


def too_slow(files: dict[str, float], most: float) -> dict[str, float]:
    """Returns the files whose share of the total seconds is above `most`, with their shares."""
    total = sum(files.values())
    return {file: seconds / total for file, seconds in files.items() if seconds > most * total}
