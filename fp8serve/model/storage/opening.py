"""The one place that opens files of strangers: regular files only, and in a model's directory none that lies elsewhere.

A model directory comes from a stranger, and a link in it could make a server read any file of its user and show the
content, for example as a chat template. So a file of a directory is opened by walking from the directory to the file,
component by component, each relative to the descriptor of the folder before it, and without following links. A link is
read here, and its target is walked the same way: it may lead to any place in the directory and nowhere else. What was
opened is what was checked: a link that is put there between two of these steps is not followed either. `open_member`
returns the descriptor, and readers read from it, never from the path.

    DIR              as a person wrote it; it may be a link itself
    DIR/name         may be a link to DIR/other or DIR/sub/other
    models--x/snapshots/REV/name
                     in the cache of the Hugging Face hub may also be a link to anything in models--x, which holds the
                     files as blobs/HASH

A file that a person names (training rows, a GGUF file, --scales) may be a link to anywhere: `open_file` and `real_path`
are for those.

FIFOs, devices and sockets are refused without waiting for them. A file that grows is read up to the limit. One that is
cut off while it is mapped (storage/shards.py) ends the process with SIGBUS, as with every mapped file.
"""

import os
import stat
from collections import deque
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from fp8serve.errors import Fp8ServeError, TakenError

MAX_LINKS = 40  # on the way to one file, as in Linux
_HUB_KINDS = ("models--", "datasets--")
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO without a writer opens, too
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


class _OutsideError(Exception):
    """A link, or a name with "..", leaves the directory."""


def open_member(
    path: Path, limit: int | None = None, error: type[Fp8ServeError] = TakenError, root: Path | None = None
) -> BufferedReader:
    """A regular file of at most `limit` bytes in the directory `root`, open for reading.

    root: a parent of `path`; None: the folder in which the file lies. `error` for anything else, and when a link
    between `root` and the file leads out of `root`.
    """
    root = path.parent if root is None else root
    top, start = _top(root)
    try:
        descriptor = _walk(top, [*start, *path.relative_to(root).parts])
    except _OutsideError:
        raise error(
            f"{path} is a link to outside of {root}, which is not followed; put the file itself there (cp -L copies "
            "what a link leads to), or link the whole directory."
        ) from None
    except (OSError, ValueError) as e:
        raise _unreadable(path, e, error) from None
    return _regular(descriptor, path, limit, error)


def open_file(path: Path, limit: int | None = None, error: type[Fp8ServeError] = TakenError) -> BufferedReader:
    """As `open_member`, for a file that a person named: it may be a link to anywhere."""
    try:
        descriptor = os.open(path, _FILE)
    except (OSError, ValueError) as e:
        raise _unreadable(path, e, error) from None
    return _regular(descriptor, path, limit, error)


def real_path(path: Path | str) -> Path:
    """The file that a person named, with links followed; readers of `open_member` then take it as it is."""
    path = Path(path)
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def regular_file(path: Path) -> bool:
    """Whether it is a regular file, directly or through a link: not a device, socket or directory."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def too_large(path: Path, limit: int, error: type[Fp8ServeError]) -> Fp8ServeError:
    return error(f"{path} is larger than {limit >> 20} MiB, the most that is read; give a smaller file.")


def _unreadable(path: Path, problem: OSError | ValueError, error: type[Fp8ServeError]) -> Fp8ServeError:
    if isinstance(problem, FileNotFoundError):
        what = "is a link to a file that does not exist" if path.is_symlink() else "does not exist"
        return error(f"{path} {what}.")
    # ValueError: a name with a null byte
    return error(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}.")


def _regular(descriptor: int, path: Path, limit: int | None, error: type[Fp8ServeError]) -> BufferedReader:
    """The open file, which owns the descriptor, unless it is of another kind or too large."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise error(f"{path} is not a regular file; put the file itself there.")
    if limit is not None and status.st_size > limit:
        os.close(descriptor)
        raise too_large(path, limit, error)
    return os.fdopen(descriptor, "rb")


def _top(root: Path) -> tuple[Path, list[str]]:
    """(the folder that links may not leave, the way from there to `root`)."""
    folder = Path(os.path.realpath(root))
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith(_HUB_KINDS):
            return repository, list(folder.relative_to(repository).parts)
    return folder, []


def _walk(top: Path, names: list[str]) -> int:
    """A descriptor of the file that `names` lead to from `top`. OSError; _OutsideError when they leave it."""
    folders = [os.open(top, _FOLDER)]
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
                descriptor = os.open(name, (_FOLDER if remaining else _FILE) | os.O_NOFOLLOW, dir_fd=folders[-1])
            except OSError as refusal:
                target = _target(name, folders[-1], refusal)
                links += 1
                if links > MAX_LINKS:
                    raise
                if os.path.isabs(target):
                    target = _from_top(target, top)
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


def _target(name: str, folder: int, refusal: OSError) -> str:
    """Where the link `name` leads. Raises `refusal`, for which it was not opened, when it is no link."""
    with suppress(OSError):
        return os.readlink(name, dir_fd=folder)
    raise refusal


def _from_top(target: str, top: Path) -> str:
    """The way from `top` to the absolute path `target`; it is walked again, so that nothing rests on this answer."""
    real = Path(os.path.realpath(target))
    if not real.is_relative_to(top):
        raise _OutsideError
    return str(real.relative_to(top))
