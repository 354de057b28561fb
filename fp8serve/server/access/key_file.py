"""The keys in force: read again when the file changes, so a key that is removed is refused from then on.

Each request checks the file's date and size, which takes some microseconds. A file that has become invalid changes
nothing: the previous keys stay in force, and the log says once what is wrong with it.
"""

import logging
import os
from pathlib import Path

from fp8serve.errors import MachineError
from fp8serve.server.access.keys import Keys, read_keys, single

log = logging.getLogger("fp8serve.server")
Mark = tuple[int, ...] | None


class KeyFile:
    """The keys of `path`, and the single `key`. Raises MachineError when the file cannot be used at the start."""

    def __init__(self, path: Path | None, key: str | None) -> None:
        self.path = path
        self._always = single(key).digests if key is not None else {}
        self._mark = self._look()
        self._keys = self._read()

    @property
    def needed(self) -> bool:
        """Whether a request must carry a key."""
        return self.path is not None or bool(self._always)

    def current(self) -> Keys:
        """The keys that the file has now."""
        if self.path is not None and (mark := self._look()) != self._mark:
            self._mark = mark
            self.reload()
        return self._keys

    def reload(self) -> None:
        """Reads the file whether it has changed or not, as SIGHUP asks."""
        try:
            self._keys = self._read()
        except MachineError as error:
            log.error("%s The keys that were read before stay in force.", error)
        else:
            log.info("read %d keys from %s", len(self._keys.digests) - len(self._always), self.path)

    def _read(self) -> Keys:
        if self.path is None:
            return Keys(self._always)
        return Keys({**read_keys(self.path).digests, **self._always})

    def _look(self) -> Mark:
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
