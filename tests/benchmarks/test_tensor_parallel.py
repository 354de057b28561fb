"""The program that measures a layer that several processes divide."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
def test_every_mode_is_measured() -> None:
    command = [sys.executable, "benchmarks/tensor_parallel.py", "--rounds", "1", "--sizes", "512,1024"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=True)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()[3:]]
    assert [row[:2] for row in rows] == [["512, 1024", tokens] for tokens in ("1", "16", "128")]
    assert all(float(cell.strip("()")) > 0 for row in rows for cell in (row[2], row[3], row[5]))
