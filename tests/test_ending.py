"""How processes end. A worker flushes its output, returns its status and runs no exit handlers. A command that is
interrupted before it has begun ends without a message."""

import os
import shutil
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
atexit.register(print, "exit handler ran")
print("printed", end="")
end_process(3)
"""


def test_a_process_ends_at_once_with_its_status_and_its_output() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (3, "printed", "")


SIGNAL = """
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
def test_ends_at_signals_exits_at_once_with_status_0(number: int) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SIGNAL, str(int(number))], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


LOST_CLIENT = """
import contextlib, socket, sys, threading
from fp8serve.engine.worker import Connection
listener = socket.socket(socket.AF_UNIX)
listener.bind("socket")
listener.listen()
connection = Connection("socket")
connection.is_loading = sys.argv[1] == "loading"
with contextlib.closing(listener.accept()[0]):
    pass
assert connection.inbox.get() == {"op": "close"}
if connection.is_loading:
    threading.Event().wait()
"""


@pytest.mark.parametrize(("phase", "status"), [("loading", 1), ("loaded", 0)])
def test_an_engine_that_loads_ends_with_its_client(phase: str, status: int, tmp_path: Path) -> None:
    """Once it is loaded, it first ends its requests."""
    command = [sys.executable, "-c", LOST_CLIENT, phase]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (process.returncode, process.stderr) == (status, "")


IMPORT_SIGNAL = """
import signal
signal.raise_signal(signal.SIGTERM)
print("went on")
"""


def test_a_command_that_is_still_importing_dies_by_the_signal(tmp_path: Path) -> None:
    """Nothing has begun yet, so the sender of SIGTERM gets the default exit status and no message."""
    (tmp_path / "typer.py").write_text(IMPORT_SIGNAL)  # found before the package that the command line imports
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(fp8serve.__file__).parents[1]}"}
    command = [sys.executable, "-m", "fp8serve", "serve", "nowhere"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert (process.returncode, process.stdout, process.stderr) == (-signal.SIGTERM, "", "")


COMMAND_SIGNAL = """
import signal, sys
from fp8serve import cli
cli.run = lambda *_: signal.raise_signal(signal.SIGTERM) or 0
sys.exit(cli.main(["merge"]))
"""
NEW_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def test_sigterm_ends_a_command_that_does_not_handle_it() -> None:
    process = subprocess.run([sys.executable, "-c", COMMAND_SIGNAL], timeout=PATIENCE, check=False)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*NEW_NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="this machine makes no process namespaces",
)
def test_sigterm_ends_a_command_that_is_the_first_process_of_a_container() -> None:
    """The kernel ignores signals without a handler there."""
    command = [*NEW_NAMESPACE, sys.executable, "-c", COMMAND_SIGNAL]
    process = subprocess.run(command, timeout=PATIENCE, check=False)
    assert process.returncode == 128 + signal.SIGTERM


SHIELD = """
import subprocess, sys
from fp8serve.processes import without_interrupts
raised = "import signal; signal.raise_signal(signal.SIGINT); print('went on', flush=True)"
with without_interrupts():
    subprocess.run([sys.executable, "-c", raised])
subprocess.run([sys.executable, "-c", raised], stderr=subprocess.DEVNULL)
"""


def test_only_children_started_without_interrupts_ignore_sigint() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SHIELD], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (process.stdout, process.stderr) == ("went on\n", "")


@pytest.mark.parametrize("worker", ["engine/worker.py", "train/job_process.py"])
def test_workers_end_through_end_process(worker: str) -> None:
    """The server waits for its workers while it shuts down, so they must end fast."""
    lines = (Path(fp8serve.__file__).parent / worker).read_text().rstrip().splitlines()
    assert lines[-1].startswith("    end_process(main(")
