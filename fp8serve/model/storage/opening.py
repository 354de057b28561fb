"""Opens untrusted files: regular files only, and of a model directory only files inside it.

A symbolic link in a downloaded model directory could make a server read any file of its user and return the content,
for example as a chat template. `open_member` therefore opens each path component relative to the descriptor of its
parent folder with O_NOFOLLOW. It resolves links itself, in the same way, and refuses a link that leaves the directory.
Replacing a component by a link between two steps has no effect, and callers read from the open file, never from the
path.

    DIR              may be a link itself, because the user named it
    DIR/name         may be a link to DIR/other or DIR/sub/other
    models--x/snapshots/REV/name
                     in the cache of the Hugging Face hub, which stores files as models--x/blobs/HASH, may be a link to
                     any file below models--x

A file that a user names (training data, a GGUF file, --scales) may be a link to any file; `open_file` and `real_path`
are for such files.

FIFOs, devices and sockets are refused without waiting for them. If a file is truncated while it is mapped
(storage/mapping.py), the process ends with SIGBUS, as for every mapped file.
"""

import os
import stat
from collections import deque
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from fp8serve.errors import Fp8ServeError, TakenError

MAX_LINKS = 40  # links that are resolved to open one file, as in Linux
_HUB_PREFIXES = ("models--", "datasets--")
_FILE_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK opens a FIFO that has no writer
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


class _OutsideError(Exception):
    """Raised if a link, or a path with "..", leaves the directory."""


def open_member(
    path: Path, limit: int | None = None, error: type[Fp8ServeError] = TakenError, root: Path | None = None
) -> BufferedReader:
    """Opens a regular file in the directory `root`, a parent of `path` and by default its folder, for reading.

    Raises `error` if the file is missing, is no regular file, is larger than `limit` bytes, or if a link leaves `root`.
    """
    root = path.parent if root is None else root
    top, start = _allowed_folder(root)
    try:
        descriptor = _open_below(top, [*start, *path.relative_to(root).parts])
    except _OutsideError:
        raise error(
            f"{path} is a link to a file outside {root}, which is not allowed; replace it by the file itself (cp -L "
            "copies the target of a link), or link the whole directory."
        ) from None
    except (OSError, ValueError) as e:
        raise _unreadable(path, e, error) from None
    return _checked_file(descriptor, path, limit, error)


def open_file(path: Path, limit: int | None = None, error: type[Fp8ServeError] = TakenError) -> BufferedReader:
    """Opens a regular file that a user named, which may be a link to any file. Raises `error` as `open_member` does."""
    try:
        descriptor = os.open(path, _FILE_FLAGS)
    except (OSError, ValueError) as e:
        raise _unreadable(path, e, error) from None
    return _checked_file(descriptor, path, limit, error)


def real_path(path: Path | str) -> Path:
    """Resolves the links of a path that a user named, so that `open_member` accepts it."""
    path = Path(path)
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def is_regular_file(path: Path) -> bool:
    """Whether the path is a regular file or a link to one, not a device, socket or directory."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def too_large(path: Path, limit: int, error: type[Fp8ServeError]) -> Fp8ServeError:
    return error(f"{path} is larger than {limit >> 20} MiB, the limit for this file; give a smaller one.")


def _unreadable(path: Path, cause: OSError | ValueError, error: type[Fp8ServeError]) -> Fp8ServeError:
    if isinstance(cause, FileNotFoundError):
        return error(f"{path} {'is a link to a file that does' if path.is_symlink() else 'does'} not exist.")
    # os.open raises ValueError for a name with a null byte
    return error(f"{path} cannot be read: {getattr(cause, 'strerror', None) or cause}.")


def _checked_file(descriptor: int, path: Path, limit: int | None, error: type[Fp8ServeError]) -> BufferedReader:
    """Returns the open file. Closes the descriptor and raises `error` if the file is not regular or is too large."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise error(f"{path} is not a regular file; replace it by a regular file.")
    if limit is not None and status.st_size > limit:
        os.close(descriptor)
        raise too_large(path, limit, error)
    return os.fdopen(descriptor, "rb")


def _allowed_folder(root: Path) -> tuple[Path, list[str]]:
    """Returns the folder that links may not leave, and the path components from there to `root`. That folder is `root`,
    or the model's folder in the cache of the Hugging Face hub."""
    folder = Path(os.path.realpath(root))
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith(_HUB_PREFIXES):
            return repository, list(folder.relative_to(repository).parts)
    return folder, []


def _open_below(top: Path, names: list[str]) -> int:
    """Opens the file with the path components `names` below `top`. Raises _OutsideError if they leave it."""
    folders = [os.open(top, _FOLDER_FLAGS)]
    remaining, links = deque(names), 0
    try:
        while True:
            name = remaining.popleft() if remaining else "."
            if name == "..":
                if len(folders) == 1:
                    raise _OutsideError
                os.close(folders.pop())
                continue
            try:
                descriptor = os.open(
                    name, (_FOLDER_FLAGS if remaining else _FILE_FLAGS) | os.O_NOFOLLOW, dir_fd=folders[-1]
                )
            except OSError as error:
                target = _read_link(name, folders[-1], error)
                links += 1
                if links > MAX_LINKS:
                    raise
                if os.path.isabs(target):
                    target = _relative_target(target, top)
                    while len(folders) > 1:
                        os.close(folders.pop())
                remaining.extendleft(part for part in reversed(target.split("/")) if part not in ("", "."))
                continue
            if not remaining:
                return descriptor
            folders.append(descriptor)
    finally:
        for folder in folders:
            os.close(folder)


def _read_link(name: str, folder: int, error: OSError) -> str:
    """Returns the target of the link `name`. Raises `error`, with which opening it failed, if `name` is no link."""
    with suppress(OSError):
        return os.readlink(name, dir_fd=folder)
    raise error


def _relative_target(target: str, top: Path) -> str:
    """Returns the absolute path `target` relative to `top`; `_open_below` checks each of its components again."""
    real = Path(os.path.realpath(target))
    if not real.is_relative_to(top):
        raise _OutsideError
    return str(real.relative_to(top))
