"""A file lock that is released when its process ends: a process that gets it knows that no other one is at work."""

import fcntl
from pathlib import Path
from typing import IO

from fp8serve.errors import Fp8ServeError, JobError, MachineError


def take_lock(path: Path, refusal: str, error: type[Fp8ServeError] = JobError) -> IO[str]:
    """The locked file; closing it releases the lock.

    Raises error(`refusal`) when another process, or this one, holds it, MachineError where locks do not work.
    """
    lock = None
    try:
        lock = path.open("a+", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _close(lock)
        raise error(refusal) from None
    except OSError as e:
        _close(lock)
        raise MachineError(f"{path} cannot be locked: {e.strerror}; choose a directory on a local disk.") from None
    return lock


def _close(lock: IO[str] | None) -> None:
    if lock is not None:
        lock.close()
