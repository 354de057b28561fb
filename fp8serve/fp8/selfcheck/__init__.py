"""The self-check: compares the kernels on this machine with the reference and switches off wrong ones.

Code that computes on a device first calls `prepare_device(device)`. If there is no verdict for the GPU with its present
driver and kernel library, it runs the check and stores the verdict (verdict.py). Then wrong kernels are switched off
(switches.py) with one warning. On a CPU only `fp8serve doctor --check` runs the check, and later
processes use its verdict. If the check cannot run, a warning is logged and all kernels are used.

The check runs in child processes (child.py): a kernel that hangs or crashes ends only its child process. Each kernel
has a time limit. A child process checks all kernels that have no result yet. If it ends before it is done, the kernel
that it was running failed, and a new child process continues with the next kernel. If a child process ends before it
has run any kernel, the check is not possible on this machine, and the verdict is unfinished.
"""

import fcntl
import json
import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO

import torch

from fp8serve.errors import one_line
from fp8serve.fp8.cuda_support import check_gpu
from fp8serve.fp8.selfcheck.switches import switch_off
from fp8serve.fp8.selfcheck.verdict import (
    KernelResult,
    Machine,
    Verdict,
    VerdictError,
    load,
    machine_of,
    path_of,
    save,
    verdict_directory,
)
from fp8serve.processes import module_command, module_path

__all__ = [
    "KernelResult",
    "Machine",
    "Verdict",
    "VerdictError",
    "check_and_store",
    "machine_of",
    "prepare_device",
    "stored_verdict",
    "switch_off",
    "switch_off_bad_kernels",
    "warning_text",
]

CHILD_COMMAND = module_command("fp8serve.fp8.selfcheck.child")
MAX_KERNEL_SECONDS = 120.0  # also for the start of a child process; a GPU may have to compile the kernel's code first
MAX_CHECK_SECONDS = 900.0
KILL_WAIT_SECONDS = 10.0
KernelCallback = Callable[[str], None]  # called with the name of a kernel
log = logging.getLogger("fp8serve.kernels")
_prepared: set[str] = set()
_lock = threading.Lock()


def prepare_device(device: torch.device) -> None:
    """Switches off, in this process, every kernel that failed the check on `device`.

    Raises MachineError if the CUDA kernels cannot run on `device`.
    """
    check_gpu(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if str(device) not in _prepared:
            _prepared.add(str(device))
            try:
                _prepare(device)
            except Exception as error:  # a check that cannot run must not stop the process
                log.warning(
                    "The kernels on %s could not be checked (%s); all of them are used.", device, one_line(error)
                )


def _prepare(device: torch.device) -> None:
    machine = machine_of(device)
    if machine is None:
        return
    verdict = stored_verdict(machine)
    if verdict is None and device.type == "cuda":
        with _check_lock(machine):
            verdict = stored_verdict(machine) or check_and_store(device, machine)
    switch_off_bad_kernels(device, verdict)


def switch_off_bad_kernels(device: torch.device, verdict: Verdict | None) -> None:
    """Switches off the bad kernels of a verdict in this process and logs a warning."""
    if verdict is not None and verdict.bad:
        switch_off(device, verdict.bad)
        log.warning("%s", warning_text(verdict))


def stored_verdict(machine: Machine) -> Verdict | None:
    """Returns the stored verdict for a machine, or None. Logs a warning if the file cannot be read."""
    try:
        return load(machine)
    except VerdictError as error:
        log.warning("%s", error)
    except (OSError, RuntimeError) as error:
        log.warning("The verdict of an earlier check of kernels cannot be read (%s).", one_line(error))
    return None


def check_and_store(device: torch.device, machine: Machine, on_kernel: KernelCallback = lambda name: None) -> Verdict:
    """Checks every kernel of a device and stores the verdict.

    Logs a warning if the check does not finish or the verdict cannot be stored.
    """
    if device.type == "cuda":
        log.info("Checking the kernels on %s, once for this GPU, driver and library...", machine.name)
    verdict = run_check(device, machine, on_kernel)
    if verdict.unfinished:
        log.warning(
            "The check of the kernels on %s did not finish: %s; kernels that it has not tried are used.",
            machine.name,
            verdict.unfinished,
        )
        return verdict
    try:
        save(verdict)
    except (OSError, RuntimeError) as error:
        log.warning(
            "The verdict on the kernels of %s cannot be stored (%s); it holds for this process.",
            machine.name,
            one_line(error),
        )
    return verdict


def warning_text(verdict: Verdict) -> str:
    """Returns the warning about the bad kernels of a verdict."""
    names = ", ".join(f"{name} ({result.state})" for name, result in sorted(verdict.bad.items()))
    count, day = len(verdict.bad), verdict.date[:10]
    are, them = ("kernel is", "it") if count == 1 else ("kernels are", "them")
    return (
        f"{count} {are} switched off, because the check of {day} on {verdict.machine.name} found {them} wrong, and"
        f" others take over: {names}; see `fp8serve doctor`."
    )


@contextmanager
def _check_lock(machine: Machine) -> Iterator[None]:
    """Locks the check of a machine against other processes, if files can be locked.

    It waits for the lock at most as long as a check may take.
    """
    with ExitStack() as stack:
        with suppress(OSError, RuntimeError):
            verdict_directory().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path_of(machine).with_suffix(".lock").open("w"))
            _wait_for_lock(file.fileno())
        yield


def _wait_for_lock(file: int) -> None:
    deadline = time.monotonic() + MAX_CHECK_SECONDS
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.2)


# -- the check, in child processes -------------------------------------------------------------------------------------


@dataclass
class _Progress:
    """The results of all kernels so far, None for a kernel that supports no case here, and the running kernel."""

    results: dict[str, KernelResult | None] = field(default_factory=dict)
    running: str | None = None
    is_done: bool = False

    @property
    def bad(self) -> list[str]:
        return [name for name, result in self.results.items() if result is not None and result.state != "agrees"]


def run_check(device: torch.device, machine: Machine, on_kernel: KernelCallback = lambda name: None) -> Verdict:
    """Checks every kernel of a device and returns the verdict. `on_kernel` is called with the name of each kernel.

    A failure of a child process raises no exception.
    """
    progress, deadline, unfinished = _Progress(), time.monotonic() + MAX_CHECK_SECONDS, ""
    while not progress.is_done and not unfinished:
        previous_count = len(progress.results)
        exit_text = _run_child(device, progress, on_kernel, deadline)
        if not progress.is_done and time.monotonic() >= deadline:
            unfinished = f"it took longer than {MAX_CHECK_SECONDS:.0f} s"
        elif not progress.is_done and len(progress.results) == previous_count:
            unfinished = f"its process {exit_text}"
    kernels = {name: result for name, result in progress.results.items() if result is not None}
    return Verdict(machine, datetime.now(UTC).isoformat(timespec="seconds"), kernels, unfinished)


def _run_child(device: torch.device, progress: _Progress, on_kernel: KernelCallback, deadline: float) -> str:
    """Runs a child process until it ends or is killed. Returns how it ended, as the end of a sentence."""
    task = {"device": str(device), "known": list(progress.results), "off": progress.bad}
    progress.running = None
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = _start_child(errors)
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        has_answered = False
        try:
            has_answered = _read_messages(process, json.dumps(task), progress, on_kernel, deadline)
        finally:
            exit_text = _end_child(process, KILL_WAIT_SECONDS if has_answered else 0)
        if progress.running is not None and not progress.is_done and time.monotonic() < deadline:
            hang = KernelResult("hangs", f"no answer within {MAX_KERNEL_SECONDS:.0f} s")
            crash = KernelResult("crashes", f"its process {exit_text}")
            progress.results[progress.running] = crash if has_answered else hang
        errors.seek(0)
        last_lines = errors.read()[-4000:].strip().splitlines()
        return f"{exit_text}{f': {last_lines[-1][:200]}' if last_lines else ''}"


def _start_child(errors: IO[str]) -> subprocess.Popen[str]:
    """Starts a child process with this process's module path. Raises OSError if it cannot be started."""
    environment = {**os.environ, "PYTHONPATH": module_path()}
    return subprocess.Popen(
        CHILD_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def _read_messages(
    process: subprocess.Popen[str], task: str, progress: _Progress, on_kernel: KernelCallback, deadline: float
) -> bool:
    """Sends the task to the child process and reads its messages to their end. Returns False after a timeout."""
    assert process.stdin is not None
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    with suppress(OSError), process.stdin as task_file:  # if the child process has ended, its output ends, too
        task_file.write(task)
    while (seconds := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=min(MAX_KERNEL_SECONDS, seconds))
        except queue.Empty:
            return False
        if line is None:
            return True
        _handle_message(line, progress, on_kernel)
    return False


def _read_lines(output: IO[str], lines: "queue.Queue[str | None]") -> None:
    with output:
        for line in output:
            lines.put(line)
    lines.put(None)


def _handle_message(line: str, progress: _Progress, on_kernel: KernelCallback) -> None:
    """Handles a message of the child process. Other lines of its output are ignored."""
    try:
        message = json.loads(line)
        if "trying" in message:
            progress.running = str(message["trying"])
            on_kernel(progress.running)
        elif "name" in message:
            progress.running = None
            result = KernelResult(message["state"], message["why"]) if "state" in message else None
            progress.results[str(message["name"])] = result
        elif "done" in message:
            progress.is_done = True
    except (ValueError, TypeError, KeyError):
        return


def _end_child(process: subprocess.Popen[str], seconds: float) -> str:
    """Waits for the child process, kills it after `seconds`, and returns how it ended.

    A hanging GPU kernel can keep even a killed process alive, so the wait for its end is limited.
    """
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILL_WAIT_SECONDS)
        return "was silent for too long"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
