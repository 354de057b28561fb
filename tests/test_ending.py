"""A worker's end: what it printed is out, its status is right, and nothing is taken apart first."""

import subprocess
import sys
from pathlib import Path

import pytest

import fp8serve
from tests.patience import PATIENCE

PROGRAM = """
import atexit
from fp8serve.ending import end_process
atexit.register(print, "taken apart")
print("printed", end="")
end_process(3)
"""


def test_a_process_ends_at_once_with_its_status_and_its_output() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed", "")


@pytest.mark.parametrize("worker", ["engine/worker.py", "train/job_process.py"])
def test_workers_end_so(worker: str) -> None:
    """Their owners wait for them while the server goes down."""
    lines = (Path(fp8serve.__file__).parent / worker).read_text().rstrip().splitlines()
    assert lines[-1].startswith("    end_process(main(")
