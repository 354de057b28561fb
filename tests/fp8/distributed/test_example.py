"""The torchrun example on two gloo processes, started as in its docstring."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[3]


def test_the_loss_of_two_processes_falls() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/train_fsdp2.py"]
    options = ["--steps", "12", "--recipe", "delayed"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(
        [sys.executable, *command, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, process.stderr
    match = re.search(r"delayed on 2 ranks: loss ([\d.]+) -> ([\d.]+)", process.stdout)
    assert match is not None, process.stdout
    assert float(match[2]) < 0.9 * float(match[1])
