"""No test file takes more than 3 % of the total seconds that the last `make durations` recorded, but for EXCEPTIONS."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.durations import Durations, too_slow

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests/durations.json"
MOST = 0.03
# Compiles every CUDA kernel with ThreadSanitizer. It runs only if csrc/cuda or tests/cuda differ from main.
EXCEPTIONS = {"tests/cuda/test_races.py": 0.1}


@pytest.mark.skipif(not RECORD.exists(), reason="nothing is recorded yet: make durations")
def test_no_file_takes_more_than_its_share() -> None:
    shares = too_slow(json.loads(RECORD.read_text())["files"], MOST)
    assert {file: share for file, share in shares.items() if share > EXCEPTIONS.get(file, MOST)} == {}


def test_a_file_above_the_share_is_reported() -> None:
    assert too_slow({"a": 3.1, "b": 2.9, "c": 94.0}, 0.03) == {"a": pytest.approx(0.031), "c": pytest.approx(0.94)}


def test_a_function_is_listed_by_the_mean_of_its_cases(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "record.json")
    cases = {
        "test_a.py::test_one[x]": 0.5,
        "test_a.py::test_one[y]": 0.1,
        "test_a.py::test_two": 0.02,
        "test_b.py::test": 3,
    }
    for nodeid, seconds in cases.items():
        for when, share in (("setup", 0.75), ("call", 0.25), ("teardown", 0.0)):
            report: Any = SimpleNamespace(nodeid=nodeid, when=when, duration=share * seconds)
            durations.pytest_runtest_logreport(report)
    durations.pytest_terminal_summary(Mock())
    assert json.loads((tmp_path / "record.json").read_text()) == {
        "files": {"test_a.py": 0.6, "test_b.py": 3.0},
        "cases": {"test_a.py::test_one": 0.3, "test_b.py::test": 3.0},
    }


def test_durations_are_recorded_in_several_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-n", "2"]
    process = subprocess.run(
        [*command, "--durations-file", str(tmp_path / "record.json"), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert list(json.loads((tmp_path / "record.json").read_text())["files"]) == ["test_a.py", "test_b.py"]
    assert "the 40 slowest of 2 files" in process.stdout
