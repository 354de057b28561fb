"""A worker's end: what it printed is out, its status is right, and nothing is taken apart first. A server's, before it
has begun: quiet."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fp8serve
from tests.patience import PATIENCE

PROGRAM = """
import atexit
from fp8serve.processes import end_process
atexit.register(print, "taken apart")
print("printed", end="")
end_process(3)
"""


def test_a_process_ends_at_once_with_its_status_and_its_output() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed", "")


ASKED = """
import signal, sys
from fp8serve.processes import ends_at_signals
before = signal.getsignal(signal.SIGINT)
with ends_at_signals():
    pass
assert signal.getsignal(signal.SIGINT) is before
with ends_at_signals():
    try:
        signal.raise_signal(int(sys.argv[1]))
    finally:
        print("went on")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_has_nothing_to_finish_ends_at_once_when_it_is_asked_to(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(int(number))], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


INTERRUPTED = """
import signal
signal.raise_signal(signal.SIGTERM)
print("went on")
"""


def test_a_command_that_is_still_imported_ends_by_the_signal_itself(tmp_path: Path) -> None:
    """Nothing has begun, so that whoever sent SIGTERM sees the usual status, and no word."""
    (tmp_path / "typer.py").write_text(INTERRUPTED)  # found before the package that the command line imports
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(fp8serve.__file__).parents[1]}"}
    command = [sys.executable, "-m", "fp8serve", "serve", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


SPARED = """
import subprocess, sys
from fp8serve.processes import without_interrupts
raised = "import signal; signal.raise_signal(signal.SIGINT); print('went on', flush=True)"
with without_interrupts():
    subprocess.run([sys.executable, "-c", raised])
subprocess.run([sys.executable, "-c", raised], stderr=subprocess.DEVNULL)
"""


def test_processes_that_begin_are_spared_interrupts_and_others_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", SPARED], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.stdout, done.stderr) == ("went on\n", "")


@pytest.mark.parametrize("worker", ["engine/worker.py", "train/job_process.py"])
def test_workers_end_so(worker: str) -> None:
    """Their owners wait for them while the server goes down."""
    lines = (Path(fp8serve.__file__).parent / worker).read_text().rstrip().splitlines()
    assert lines[-1].startswith("    end_process(main(")
