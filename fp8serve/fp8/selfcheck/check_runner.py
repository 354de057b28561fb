"""The kernel check, run in child processes: a kernel that hangs or crashes ends only its child process.

Each kernel has a time limit. A child process checks all kernels that have no result yet. If it ends before it is done,
the kernel that it was running failed, and a new child process continues with the next kernel. If a child process ends
before it has run any kernel, the check is not possible on this machine, and the verdict is unfinished.
"""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO

import torch

from fp8serve.fp8.selfcheck.verdict import KernelResult, Machine, Verdict
from fp8serve.processes import module_command, module_path

CHILD_COMMAND = module_command("fp8serve.fp8.selfcheck.child")
MAX_KERNEL_SECONDS = 120.0  # also for the start of a child process; a GPU may have to compile the kernel's code first
MAX_CHECK_SECONDS = 900.0
KILL_WAIT_SECONDS = 10.0
KernelCallback = Callable[[str], None]  # called with the name of a kernel


@dataclass
class _Progress:
    """The results of all kernels so far, None for a kernel that supports no case here, and the running kernel."""

    results: dict[str, KernelResult | None] = field(default_factory=dict)
    running: str | None = None
    is_done: bool = False

    @property
    def bad(self) -> list[str]:
        return [name for name, result in self.results.items() if result is not None and result.state != "agrees"]


def check(device: torch.device, machine: Machine, on_kernel: KernelCallback = lambda name: None) -> Verdict:
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
