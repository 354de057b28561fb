"""The torchrun example, as its docstring runs it: two gloo processes."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_fsdp2.py"


def test_two_processes_learn() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    options = ["--steps", "12", "--recipe", "delayed"]
    done = subprocess.run([sys.executable, *command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"delayed on 2 ranks: loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) < 0.9 * float(found[1])
