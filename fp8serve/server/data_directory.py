"""The data directory of one server. It is locked while the server runs.

If a server cannot load its model, `discard` removes what this server has created: new files, and new directories if
they are empty. Otherwise each failed start, for example with a mistyped option, would leave a directory with an empty
job database. `discard` keeps a directory in which a client has stored a job or a file.

Servers that share a PostgreSQL database may share the data directory, too, for example on a network file system. They
hold the lock together, and `discard` leaves their files alone. Each PostgreSQL database that was used with the
directory has an empty file there, as an SQLite file is there. So a server knows whether a file that its database does
not list may belong to another one.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import parse_qs, urlsplit

from fp8serve.errors import MachineError
from fp8serve.model.storage.files import acquire_lock, make_private
from fp8serve.server.settings import Settings

JOB_DATABASE, SERVER_LOCK = "jobs.sqlite3", "server.lock"  # files in the data directory
POSTGRES = "postgresql-"  # the beginning of the name of an empty file in it, for each PostgreSQL database


def data_home() -> Path:
    """Returns the user's directory with one data directory per model."""
    return Path.home() / ".local" / "share" / "fp8serve"


def default_data_dir(model: Path) -> Path:
    """Returns the default directory for the jobs, uploads and checkpoints of a model."""
    path = model.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return data_home() / f"{path.name}-{digest}"


class DataDirectory:
    """The locked data directory. Raises MachineError if it cannot be written or another server uses it."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.database
        self._is_shared = self._url is not None
        directory = settings.data_dir or default_data_dir(settings.model)
        self.path = path = directory.absolute()  # `safe_text` removes only absolute paths from messages
        self._new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            _prepare(path)
            self._existing_names = set(os.listdir(path))
            if not self._is_shared:
                _refuse_files_of_postgres(path)
            self._lock = _lock(path, self._is_shared)
        except BaseException:
            self._remove_new_folders()
            raise

    def has_one_database(self) -> bool:
        """Whether the database of this server, which is open, is the only one that was used with the directory."""
        if self._url is not None:
            (self.path / _marker(self._url)).touch(mode=0o600)
        return len([*self.path.glob(JOB_DATABASE), *self.path.glob(f"{POSTGRES}*")]) == 1

    def close(self) -> None:
        """Releases the lock."""
        self._lock.close()

    def discard(self) -> None:
        """Removes what this server created, and releases the lock."""
        if self._is_shared:
            self.close()
            return
        with suppress(OSError):
            for name in set(os.listdir(self.path)) - self._existing_names:
                path = self.path / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        self._lock.close()
        self._remove_new_folders()

    def _remove_new_folders(self) -> None:
        """Removes the empty directories that this server created, innermost first."""
        with suppress(OSError):
            for folder in self._new_folders:
                Path(folder).rmdir()


def _prepare(path: Path) -> None:
    """Creates the data directory with access for this user only.

    An existing directory with other files keeps its mode, because other programs may use it. The files that the server
    creates in it are private in any case.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (path / JOB_DATABASE).exists() or not any(path.iterdir()):
            make_private(path)
    except OSError as error:
        raise MachineError(
            f"The data directory {path} cannot be created ({error.strerror}); choose another with --data-dir."
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise MachineError(f"The data directory {path} is not writable; choose another with --data-dir.")


def _marker(url: str) -> str:
    """Returns the file name for a PostgreSQL database: of its address and name, without the user and password."""
    parts = urlsplit(url)
    address = [parts.netloc.rpartition("@")[2], parts.path, *parse_qs(parts.query).get("host", [])]
    return POSTGRES + hashlib.sha256("\n".join(address).encode()).hexdigest()[:16]


def _refuse_files_of_postgres(path: Path) -> None:
    """Raises MachineError for a directory with files of a PostgreSQL database and without an SQLite file."""
    is_of_postgres = any(path.glob(f"{POSTGRES}*")) and not (path / JOB_DATABASE).exists()
    if is_of_postgres and any(file for folder in ("jobs", "files") for file in path.glob(f"{folder}/*")):
        raise MachineError(
            f"The data directory {path} has the files of a PostgreSQL database; give --database, or another --data-dir."
        )


def _lock(path: Path, is_shared: bool) -> IO[str]:
    """Locks the directory, because two servers with an SQLite file would run each other's jobs. The lock is held while
    the file is open."""
    try:
        make_private(path / "jobs")
    except OSError as error:
        raise MachineError(f"The data directory {path} cannot be written: {error.strerror}.") from None
    refusal = f"Another server uses the data directory {path}; stop it, or give this one its own with --data-dir."
    lock = acquire_lock(path / SERVER_LOCK, refusal, MachineError, is_shared)
    os.fchmod(lock.fileno(), 0o600)
    return lock
