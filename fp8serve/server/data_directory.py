"""The data directory of one server: locked while the server lives, and removed again if its model never loaded.

Someone who mistypes an option or names a damaged model starts several times; each start would leave a directory with an
empty job table. Only what this server itself created is removed: parents that it made, if nothing else is in them, and
names that were not in the directory before. A directory in which a client has stored something meanwhile stays.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from fp8serve.server.settings import Settings, default_data_dir, lock_data_dir, prepare_data_dir


class DataDirectory:
    """MachineError: it cannot be written, or another server uses it."""

    def __init__(self, settings: Settings) -> None:
        path = (settings.data_dir or default_data_dir(settings.model)).absolute()
        self._created = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            self.path = prepare_data_dir(settings)
            self._before = set(os.listdir(self.path))
            self._lock = lock_data_dir(self.path)
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
