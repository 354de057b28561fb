"""The self-check: compares the kernels on this machine with the reference and switches off wrong ones.

Code that computes on a device first calls `prepare_device(device)`. If there is no verdict for the GPU with its present
driver and kernel library, it runs the check (check_runner.py) and stores the verdict (verdict.py). Then wrong kernels
are switched off (switches.py) with one warning. On a CPU only `fp8serve doctor --check` runs the check, and later
processes use its verdict. If the check cannot run, a warning is logged and all kernels are used.
"""

import fcntl
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from fp8serve.errors import one_line
from fp8serve.fp8.cuda_support import check_gpu
from fp8serve.fp8.selfcheck import check_runner
from fp8serve.fp8.selfcheck.check_runner import KernelCallback
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
    verdict = check_runner.check(device, machine, on_kernel)
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
    deadline = time.monotonic() + check_runner.MAX_CHECK_SECONDS
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.2)
