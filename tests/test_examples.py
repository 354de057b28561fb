"""Every example runs as it is, in a directory of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SAMPLE = "train_in_fp8"


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=pytest.mark.smoke if path.stem == SAMPLE else (), id=path.stem)
        for path in sorted(EXAMPLES.rglob("*.py"))
    ],
)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(example)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout
