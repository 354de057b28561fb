"""Runs a check in child processes, each with a time limit for every kernel: what hangs or crashes costs the child only.

A child goes through the kernels that nobody has judged yet. When one ends before it is done, the kernel that it was
trying is to blame, and the next child goes on behind it. A child that ends before it has tried any kernel says that no
check is possible here, which is no verdict on kernels.
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

from fp8serve.fp8.selfcheck.verdict import Finding, Machine, Verdict
from fp8serve.processes import module_command, module_path

CHILD = module_command("fp8serve.fp8.selfcheck.child")
KERNEL_SECONDS = 120.0  # for a kernel, and for a child to begin: a chip may have to compile its code first
ALL_SECONDS = 900.0
Progress = Callable[[str], None]


@dataclass
class _State:
    """`findings`: of every kernel tried so far, None of those that take nothing here."""

    findings: dict[str, Finding | None] = field(default_factory=dict)
    trying: str | None = None
    done: bool = False

    @property
    def bad(self) -> list[str]:
        return [name for name, finding in self.findings.items() if finding is not None and finding.state != "agrees"]


def check(device: torch.device, machine: Machine, progress: Progress = lambda name: None) -> Verdict:
    """Tries every kernel of a device. `progress` is told the name of each. Never raises for what a child does."""
    state, end, unfinished = _State(), time.monotonic() + ALL_SECONDS, ""
    while not state.done and not unfinished:
        before = len(state.findings)
        ended = _one_child(device, state, progress, end)
        if not state.done and time.monotonic() >= end:
            unfinished = f"it took longer than {ALL_SECONDS:.0f} s"
        elif not state.done and len(state.findings) == before:
            unfinished = f"its process {ended}"
    kernels = {name: finding for name, finding in state.findings.items() if finding is not None}
    return Verdict(machine, datetime.now(UTC).isoformat(timespec="seconds"), kernels, unfinished)


def _one_child(device: torch.device, state: _State, progress: Progress, end: float) -> str:
    """Runs a child until it ends or has to be ended; returns how that was, in words."""
    task = {"device": str(device), "known": list(state.findings), "off": state.bad}
    state.trying = None
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = _started(errors)
        except OSError as refused:
            return f"cannot be started ({refused.strerror})"
        in_time = False
        try:
            in_time = _listen(process, json.dumps(task), state, progress, end)
        finally:
            ended = _ended(process, grace=10 if in_time else 0)
        if state.trying is not None and not state.done and time.monotonic() < end:
            hung = Finding("hangs", f"no answer within {KERNEL_SECONDS:.0f} s")
            state.findings[state.trying] = Finding("crashes", f"its process {ended}") if in_time else hung
        errors.seek(0)
        last_lines = errors.read()[-4000:].strip().splitlines()
        return f"{ended}{f': {last_lines[-1][:200]}' if last_lines else ''}"


def _started(errors: IO[str]) -> subprocess.Popen[str]:
    """A child that finds our modules where this process has found them. OSError when there can be none."""
    environment = {**os.environ, "PYTHONPATH": module_path()}
    return subprocess.Popen(
        CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def _listen(process: subprocess.Popen[str], task: str, state: _State, progress: Progress, end: float) -> bool:
    """Notes what the child says until it says no more; False when it was silent for too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    with suppress(OSError), process.stdin as task_file:  # OSError: it has ended, which its output will tell
        task_file.write(task)
    while (left := end - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=min(KERNEL_SECONDS, left))
        except queue.Empty:
            return False
        if line is None:
            return True
        _note(line, state, progress)
    return False


def _read(output: IO[str], lines: "queue.Queue[str | None]") -> None:
    with output:
        for line in output:
            lines.put(line)
    lines.put(None)


def _note(line: str, state: _State, progress: Progress) -> None:
    """What a line of the child says; other lines are somebody else's."""
    try:
        message = json.loads(line)
        if "trying" in message:
            state.trying = str(message["trying"])
            progress(state.trying)
        elif "name" in message:
            state.trying = None
            state.findings[str(message["name"])] = (
                Finding(message["state"], message["why"]) if "state" in message else None
            )
        elif "done" in message:
            state.done = True
    except (ValueError, TypeError, KeyError):
        return


def _ended(process: subprocess.Popen[str], grace: float) -> str:
    """How a child has ended, which is made to when it has not after `grace` seconds. A kernel that hangs may keep
    even a killed process for long, so that nobody waits for that."""
    try:
        status = process.wait(timeout=grace)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        return "was silent for too long"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
