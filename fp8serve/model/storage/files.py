"""Reads the small files of a model directory, and writes files and directories atomically.

Model directories are untrusted. opening.py opens their files, and every read has a size limit, so that a sparse file
of a terabyte raises an error instead of exhausting memory.

A directory is written to a hidden sibling of its final name. Then every file and directory in it is fsynced, one
`rename` gives it its final name, and the parent is fsynced: after a crash or on a full disk the final directory is
either complete or absent. An existing directory is never overwritten, because a server may be using it.
"""

import fcntl
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fp8serve.errors import Fp8ServeError, JobError, MachineError, TakenError, json_fault, json_kind, shown
from fp8serve.model.storage.opening import is_regular_file, open_member, too_large

CHUNK_BYTES = 1024 * 1024
MAX_JSON_BYTES = 64 * 1024 * 1024  # the index of the largest published model is 1 % of this
_FLOAT_KEY = "__float__"
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
# Files that are copied when a model directory is written from another one.
COPIED_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
           "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "LICENSE",
           "vocab.txt", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "LICENSE.txt",
           "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")  # fmt: skip
MAX_COPIED_FILE_BYTES = 256 * 1024 * 1024  # for one tokenizer file; the largest published one is an eighth of this


def present(path: Path) -> bool:
    """Whether the path exists, even as a broken link, which callers report as an error and not as a missing file."""
    return os.path.lexists(path)


def read_file(path: Path, limit: int, error: type[Fp8ServeError] = TakenError, root: Path | None = None) -> bytes:
    """Returns the content of a file, which `open_member` opens. Raises `error` if it is larger than `limit` bytes."""
    content = bytearray()  # `file.read` would allocate `limit` bytes at once, which a memory limit may not allow
    with open_member(path, limit, error, root) as file:
        try:
            while chunk := file.read(min(CHUNK_BYTES, limit + 1 - len(content))):
                content += chunk
        except OSError as e:
            raise error(f"{path} cannot be read: {e.strerror or e}.") from None
    if len(content) > limit:
        raise too_large(path, limit, error)
    return bytes(content)


def copied_files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the content of each of the COPIED_FILES that `source` has."""
    for name in COPIED_FILES:
        if is_regular_file(source / name):
            yield name, read_file(source / name, MAX_COPIED_FILE_BYTES)


def read_text(path: Path, limit: int, error: type[Fp8ServeError] = TakenError, root: Path | None = None) -> str:
    """Reads a file as `read_file` does and decodes it from UTF-8, without a byte-order mark."""
    try:
        return read_file(path, limit, error, root).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise error(f"{path} is not UTF-8 text: byte {e.start} cannot be read.") from None


def read_json(path: Path, error: type[Fp8ServeError] = TakenError, root: Path | None = None) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises `error` if it is missing, unreadable, too large or no JSON object."""
    text = read_text(path, MAX_JSON_BYTES, error, root)
    try:
        value = json.loads(text, object_pairs_hook=decode_nonfinite)
        if "\\ud" in text or "\\uD" in text:  # encoding raises ValueError for half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise error(f"{path} is not valid JSON: {json_fault(e)}.") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds {json_kind(value)} where an object was expected.")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file as `read_json` does, or an empty one if the file does not exist."""
    return read_json(path) if present(path) else {}


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for json that raises ValueError for a duplicate key, which programs read differently."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys: set[str] = set()
        duplicate = next(k for k, _ in pairs if k in keys or keys.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(duplicate)} appears twice")
    return result


def decode_nonfinite(pairs: list[tuple[str, Any]]) -> Any:
    """An `object_pairs_hook` that rejects duplicate keys and decodes {"__float__": "Infinity"} of transformers 5."""
    result = reject_duplicate_keys(pairs)
    tag = result.get(_FLOAT_KEY) if len(result) == 1 else None
    return _FLOATS[tag] if isinstance(tag, str) and tag in _FLOATS else result


def encode_nonfinite(value: Any) -> Any:
    """Replaces every infinity and NaN in `value` by {"__float__": ...}, as transformers 5 does."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT_KEY: next(tag for tag, number in _FLOATS.items() if repr(number) == repr(value))}
    if isinstance(value, dict):
        return {key: encode_nonfinite(item) for key, item in value.items()}
    return [encode_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON. Raises ValueError for NaN and infinities."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def check_writable(out: Path, num_bytes: int = 0) -> None:
    """Raises MachineError if the file or directory `out` cannot be written or its disk has less than `num_bytes` free.

    Commands call this before long work. It creates and removes a temporary file.
    """
    out = Path(os.path.abspath(out))
    folder = next(path for path in (out, *out.parents) if present(path))
    if out.is_file():
        folder = out.parent
        if not os.access(out, os.W_OK):
            raise MachineError(f"{out} cannot be written: permission denied.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as e:
        raise MachineError(f"{out} cannot be written: {folder}: {e.strerror or e}.") from None
    if free < num_bytes:
        needed, available = (f"{count / 2**30:.1f} GiB" for count in (num_bytes, free))
        raise MachineError(
            f"{out} needs at least {needed}, and its disk has {available} free; make room, or choose another disk."
        )


def check_absent(out: Path, error: type[Fp8ServeError] = TakenError) -> None:
    """Raises `error` if `out` exists and is not an empty directory, and MachineError if it cannot be written."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise error(f"{out} exists and is not a directory; choose another output directory.")
    if out.is_dir() and any(out.iterdir()):
        raise error(f"{out} exists and is not empty; choose another output directory or remove it first.")
    check_writable(out)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary file beside `path`, which is renamed to `path` at the end, or removed on an exception.

    Callers ensure that only one process writes `path` at a time. The next call overwrites the temporary file of a
    killed process.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        fsync(temporary)
        temporary.rename(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(out: Path, error: type[Fp8ServeError] = TakenError) -> Iterator[Path]:
    """Yields a temporary directory beside `out`, which is renamed to `out` at the end, or removed on an exception.

    Raises `error` if `out` exists or is created meanwhile, and MachineError if the disk is full or not writable.
    """
    out = Path(os.path.abspath(out))
    check_absent(out, error)
    temporary = out.parent / f".{out.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as e:
        raise MachineError(f"{out} cannot be written: {e.strerror}.") from None
    try:
        yield temporary
        fsync_tree(temporary)
        try:
            os.rename(temporary, out)  # replaces an empty directory, and fails if another process filled it meanwhile
        except OSError as e:
            raise error(f"{out} could not be created: {e.strerror}.") from None
        fsync(out.parent)
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, OSError):
            raise MachineError(f"{out} could not be written: {e.strerror or e}; nothing was left there.") from e
        raise


def fsync(path: Path) -> None:
    """Flushes a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Flushes every file below `root`, then the directories, deepest first."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            fsync(Path(folder, name))
        fsync(Path(folder))


def make_private(folder: Path) -> None:
    """Creates a directory of mode 0700, or sets this mode on an existing one, unless it belongs to another user."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        with suppress(PermissionError):
            folder.chmod(0o700)


def acquire_lock(path: Path, refusal: str, error: type[Fp8ServeError] = JobError, is_shared: bool = False) -> IO[str]:
    """Locks the file `path` and returns it open; closing it releases the lock. Several processes may hold a shared lock
    at the same time.

    Raises `error` with the message `refusal` if any process holds a lock that excludes this one, and MachineError if
    the file cannot be written or locks do not work.
    """
    try:
        lock = path.open("a+", encoding="utf-8")
    except OSError as e:
        raise MachineError(f"{path} cannot be written: {e.strerror}.") from None
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as e:
        lock.close()
        if isinstance(e, BlockingIOError):
            raise error(refusal) from None
        raise MachineError(f"{path} cannot be locked: {e.strerror}; choose a directory on a local disk.") from None
    return lock
