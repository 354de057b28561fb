"""Reading the small files of a model directory and writing a directory whole or not at all.

Files come from strangers. `opening` opens them, and a sparse file of a terabyte gives an error message instead of a
process that is killed for its memory.

A directory is written into a hidden sibling of its final name, every file is fsynced, the directory too, then one
`rename` puts it in place and the parent is fsynced: after a crash or a full disk either the whole directory is there
or nothing is. `safetensors` and `json` write without fsync, so that is done here. Overwriting is not offered on
purpose: a server may be using the directory.
"""

import fcntl
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fp8serve.errors import Fp8ServeError, JobError, MachineError, TakenError, json_fault, json_kind, shown
from fp8serve.model.storage.opening import open_member, too_large

if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 1024 * 1024
MAX_JSON_BYTES = 64 * 1024 * 1024  # the index of the largest published model is 1 % of this
_FLOAT = "__float__"
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
# Files of a model directory that are copied to a directory made from it.
CARRIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
           "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "LICENSE",
           "vocab.txt", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "LICENSE.txt",
           "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md")  # fmt: skip
MAX_CARRIED_BYTES = 256 * 1024 * 1024  # for one tokenizer file; the largest published one is an eighth of this


def present(path: Path) -> bool:
    """Whether the directory lists it, even as a broken link: that is an error, not an absent file."""
    return os.path.lexists(path)


def read_file(path: Path, limit: int, error: type[Fp8ServeError] = TakenError, root: Path | None = None) -> bytes:
    """The content of a file that `open_member` opens."""
    content = bytearray()  # read in pieces: `read` allocates as much as it is asked for, and memory may be limited
    with open_member(path, limit, error, root) as file:
        try:
            while piece := file.read(min(PIECE_BYTES, limit + 1 - len(content))):
                content += piece
        except OSError as e:
            raise error(f"{path} cannot be read: {e.strerror or e}.") from None
    if len(content) > limit:
        raise too_large(path, limit, error)
    return bytes(content)


def read_text(path: Path, limit: int, error: type[Fp8ServeError] = TakenError, root: Path | None = None) -> str:
    """As `read_file`, decoded; a byte-order mark is dropped."""
    try:
        return read_file(path, limit, error, root).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise error(f"{path} is not UTF-8 text: byte {e.start} cannot be read.") from None


def read_json(path: Path, error: type[Fp8ServeError] = TakenError, root: Path | None = None) -> dict[str, Any]:
    """The JSON object in a file that `open_member` opens; `error` with one sentence when it is missing, unreadable,
    too large or not an object."""
    text = read_text(path, MAX_JSON_BYTES, error, root)
    try:
        value = json.loads(text, object_pairs_hook=with_floats)
        if "\\ud" in text or "\\uD" in text:  # half of a surrogate pair is a ValueError, too
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise error(f"{path} is not valid JSON: {json_fault(e)}.") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds {json_kind(value)} where an object was expected.")
    return value


def read_optional_json(path: Path, error: type[Fp8ServeError] = TakenError) -> dict[str, Any]:
    """As `read_json`; empty when there is no such file."""
    return read_json(path, error) if present(path) else {}


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers may disagree on which of two equal keys counts, so a file with both is refused."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} appears twice")
    return result


def with_floats(pairs: list[tuple[str, Any]]) -> Any:
    """As `no_duplicates`; {"__float__": "Infinity"}, as transformers 5 writes an infinity, becomes that number."""
    result = no_duplicates(pairs)
    tag = result.get(_FLOAT) if len(result) == 1 else None
    return _FLOATS[tag] if isinstance(tag, str) and tag in _FLOATS else result


def as_json(value: Any) -> Any:
    """`value` with every infinity and NaN as transformers 5 writes it, because they are not JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: next(tag for tag, number in _FLOATS.items() if repr(number) == repr(value))}
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON; NaN and infinity are refused, because they are not JSON."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def save_tensors(path: Path, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> None:
    """A safetensors file of tensors on the CPU: the same bytes for the same content.

    The library by itself writes metadata in a different order each time, and makes the file readable by its owner only.
    """
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # the mode that this process gives a new file
    save_file(dict(tensors), path, dict(metadata))
    _sort_metadata(path)
    path.chmod(mode)


def _sort_metadata(path: Path) -> None:
    """Rewrite the header of a file just written, in the same space: only the order of the metadata changes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise RuntimeError(f"The header of {path} grew from {size} to {len(text)} bytes.")
        file.seek(8)
        file.write(text.ljust(size))


def check_writable(out: Path, num_bytes: int = 0) -> None:
    """Call it before the work whose result goes to the file or directory `out`. Writes and removes an empty file.

    MachineError: nothing can be written there, or the disk has less than `num_bytes` left.
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
        needed, left = (f"{count / 2**30:.1f} GiB" for count in (num_bytes, free))
        raise MachineError(
            f"{out} takes at least {needed}, and its disk has {left} left; make room, or choose another."
        )


def check_absent(out: Path, error: type[Fp8ServeError] = TakenError) -> None:
    """`error` when something is already at `out`; an empty directory is allowed. MachineError as `check_writable`."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise error(f"{out} exists and is not a directory; choose another output directory.")
    if out.is_dir() and any(out.iterdir()):
        raise error(f"{out} exists and is not empty; choose another output directory or remove it first.")
    check_writable(out)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary sibling of the file `path` to write; on success it becomes `path`, on any exception it is removed.

    One writer at a time: a killed one leaves the temporary file, which the next one overwrites.
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
def whole_directory(out: Path, error: type[Fp8ServeError] = TakenError) -> Iterator[Path]:
    """A temporary sibling of `out` to write into; on success it becomes `out`, on any exception it is removed.

    Costs one fsync per file at the end. `error` when `out` is taken, before or in the meantime; MachineError when the
    disk is full or not writable.
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
        _put_in_place(temporary, out, error)
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, OSError):
            raise MachineError(f"{out} could not be written: {e.strerror or e}; nothing was left there.") from e
        raise


def _put_in_place(temporary: Path, out: Path, error: type[Fp8ServeError]) -> None:
    try:
        os.rename(temporary, out)  # replaces an empty directory, refuses one that was filled meanwhile
    except OSError as e:
        raise error(f"{out} could not be put in place: {e.strerror}.") from None
    fsync(out.parent)


def fsync(path: Path) -> None:
    """Force a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Every file below `root`, then the directories, deepest first."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            fsync(Path(folder, name))
        fsync(Path(folder))


def make_private(folder: Path) -> None:
    """Makes a directory of mode 0700, or gives one that exists this mode, unless it belongs to another user."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        with suppress(PermissionError):
            folder.chmod(0o700)


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
