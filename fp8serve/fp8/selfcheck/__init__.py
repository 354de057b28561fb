"""The kernels of this machine, checked against the reference before they are trusted.

Every module that computes on a device first calls `prepare_device(device)`. On a GPU that was never used with this
driver and library, it runs the check (checking.py) and stores the verdict (verdict.py). Then, and on a CPU on which
`fp8serve doctor --check` has run, wrong kernels are switched off (candidates.py), with one warning. If the check cannot
run, a warning is logged and all kernels are used.
"""

import fcntl
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from fp8serve.errors import one_line
from fp8serve.fp8.cuda_library import check_gpu
from fp8serve.fp8.selfcheck import checking
from fp8serve.fp8.selfcheck.candidates import switch_off
from fp8serve.fp8.selfcheck.checking import Progress
from fp8serve.fp8.selfcheck.verdict import (
    Finding,
    Machine,
    Verdict,
    VerdictError,
    folder,
    load,
    machine_of,
    path_of,
    save,
)

__all__ = [
    "Finding",
    "Machine",
    "Verdict",
    "VerdictError",
    "apply",
    "examine",
    "machine_of",
    "prepare_device",
    "sentence",
    "stored_verdict",
    "switch_off",
]

log = logging.getLogger("fp8serve.kernels")
_prepared: set[str] = set()
_lock = threading.Lock()


def prepare_device(device: torch.device) -> None:
    """Switches off, in this process, every kernel that failed the check on `device`. MachineError as `check_gpu`."""
    check_gpu(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if str(device) not in _prepared:
            _prepared.add(str(device))
            try:
                _prepare(device)
            except Exception as failed:  # whatever it is, computing must go on
                why = one_line(failed)
                log.warning("The kernels on %s could not be checked (%s); all of them are used.", device, why)


def _prepare(device: torch.device) -> None:
    machine = machine_of(device)
    if machine is None:
        return
    verdict = stored_verdict(machine)
    if verdict is None and device.type == "cuda":
        with _alone(machine):
            verdict = stored_verdict(machine) or examine(device, machine)
    apply(device, verdict)


def apply(device: torch.device, verdict: Verdict | None) -> None:
    """Switches off the wrong kernels in this process, with a warning."""
    if verdict is not None and verdict.bad:
        switch_off(device, verdict.bad)
        log.warning("%s", sentence(verdict))


def stored_verdict(machine: Machine) -> Verdict | None:
    """The stored verdict for a machine, or None. Logs a warning if the file cannot be read."""
    try:
        return load(machine)
    except VerdictError as wrong:
        log.warning("%s", wrong)
    except (OSError, RuntimeError) as wrong:
        log.warning("The verdict of an earlier check of kernels cannot be read (%s).", one_line(wrong))
    return None


def examine(device: torch.device, machine: Machine, progress: Progress = lambda name: None) -> Verdict:
    """Checks every kernel of a device and stores the verdict; logs a warning if either is impossible."""
    if device.type == "cuda":
        log.info("Checking the kernels on %s, once for this GPU, driver and library...", machine.name)
    verdict = checking.check(device, machine, progress)
    if verdict.unfinished:
        log.warning(
            "The check of the kernels on %s did not finish: %s; kernels that it has not tried are used.",
            machine.name,
            verdict.unfinished,
        )
        return verdict
    try:
        save(verdict)
    except (OSError, RuntimeError) as wrong:
        log.warning(
            "The verdict on the kernels of %s cannot be stored (%s); it holds for this process.",
            machine.name,
            one_line(wrong),
        )
    return verdict


def sentence(verdict: Verdict) -> str:
    """The warning about kernels that are off."""
    names = ", ".join(f"{name} ({finding.state})" for name, finding in sorted(verdict.bad.items()))
    count, day = len(verdict.bad), verdict.date[:10]
    are, them = ("kernel is", "it") if count == 1 else ("kernels are", "them")
    return (
        f"{count} {are} switched off, because the check of {day} on {verdict.machine.name} found {them} wrong, and"
        f" others take over: {names}; see `fp8serve doctor`."
    )


@contextmanager
def _alone(machine: Machine) -> Iterator[None]:
    """Keeps other processes from checking the same machine meanwhile, where files can be locked; not for longer than a
    check may take."""
    with ExitStack() as held:
        with suppress(OSError, RuntimeError):
            folder().mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path_of(machine).with_suffix(".lock").open("w"))
            _wait_for(file.fileno())
        yield


def _wait_for(file: int) -> None:
    end = time.monotonic() + checking.ALL_SECONDS
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.2)
