"""The data directory of one server: locked while the server lives, and removed again if its model never loaded.

Someone who mistypes an option or names a damaged model starts several times; each start would leave a directory with an
empty job table. Only what this server itself created is removed: parents that it made, if nothing else is in them, and
names that were not in the directory before. A directory in which a client has stored something meanwhile stays.
"""

import fcntl
import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from fp8serve.errors import MachineError
from fp8serve.model.storage.files import make_private
from fp8serve.server.settings import Settings

JOB_TABLE = "jobs.sqlite3"
"""A file of the data directory."""


def data_home() -> Path:
    """The user's directory that holds one data directory per model."""
    return Path.home() / ".local" / "share" / "fp8serve"


def default_data_dir(model: Path) -> Path:
    """Where jobs, uploads and checkpoints live unless told otherwise: a place of its own for each model."""
    path = model.resolve()
    mark = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return data_home() / f"{path.name}-{mark}"


class DataDirectory:
    """MachineError: it cannot be written, or another server uses it."""

    def __init__(self, settings: Settings) -> None:
        directory = settings.data_dir or default_data_dir(settings.model)
        self.path = path = directory.absolute()  # as `safe_text` knows paths of ours
        self._created = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            _prepare(path)
            self._before = set(os.listdir(path))
            self._lock = _lock(path)
        except BaseException:
            self._remove_folders()
            raise

    def close(self) -> None:
        """Another server may use the directory now."""
        self._lock.close()

    def discard(self) -> None:
        """As `close`, for a server that never served: removes what it created."""
        with suppress(OSError):
            for name in set(os.listdir(self.path)) - self._before:
                path = self.path / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        self._lock.close()
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Those that this server created, innermost first, as far as they are empty."""
        with suppress(OSError):
            for folder in self._created:
                Path(folder).rmdir()


def _prepare(path: Path) -> None:
    """Makes the data directory, private to this user.

    A directory that exists and holds anything but an earlier server's files may serve others, too, and keeps its mode;
    what the server puts there is private in any case.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (path / JOB_TABLE).exists() or not any(path.iterdir()):
            make_private(path)
    except OSError as error:
        raise MachineError(
            f"Cannot make the data directory {path} ({error.strerror}); choose another with --data-dir."
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise MachineError(f"The data directory {path} is not writable; choose another with --data-dir.")


def _lock(path: Path) -> IO[str]:
    """Held while a server lives: two servers would run each other's jobs."""
    try:
        make_private(path / "jobs")
        lock = (path / "server.lock").open("a+")
        os.fchmod(lock.fileno(), 0o600)
    except OSError as error:
        raise MachineError(f"The data directory {path} cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise MachineError(
            f"Another server uses the data directory {path}; stop it, or give this one its own with --data-dir."
        ) from None
    return lock
