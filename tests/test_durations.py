"""No file of tests takes more than 3 % of the whole, as the last `make durations` recorded it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import too_slow

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests/durations.json"
MOST = 0.03


@pytest.mark.skipif(not RECORD.exists(), reason="nothing is recorded yet: make durations")
def test_no_file_takes_more_than_its_share() -> None:
    assert not too_slow(json.loads(RECORD.read_text())["files"], MOST)


def test_a_file_above_the_share_is_named() -> None:
    assert too_slow({"a": 3.1, "b": 2.9, "c": 94.0}, 0.03) == {"a": pytest.approx(0.031), "c": pytest.approx(0.94)}


def test_durations_are_recorded_in_several_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(
            "import time, pytest\n"
            "@pytest.mark.parametrize('n', [0, 1])\n"
            "def test_long(n): time.sleep(0.2)\n"
            "def test_short(): pass\n"
        )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-n", "2"]
    done = subprocess.run(
        [*command, "--durations-file", str(tmp_path / "record.json"), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["files"]) == ["test_a.py", "test_b.py"]
    assert [name for name, mean in record["cases"].items() if mean >= 0.2] == [
        "test_a.py::test_long", "test_b.py::test_long",
    ]  # fmt: skip
    assert "the 40 slowest of 2 files" in done.stdout
