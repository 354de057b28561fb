"""Converted GGUF files in the cache of the Hugging Face hub, by the hash of their content: each is converted once."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from fp8serve.errors import ModelError
from fp8serve.model.gguf.conversion import convert
from fp8serve.model.storage.opening import open_file

_WRITER = "gguf-1"  # raise this when the conversion of the same file changes


def cached(path: Path, say: Callable[[str], None], sha256: str | None = None) -> Path:
    """The directory of the model in `path`, which is converted if it has not been before; `say` gets a message about
    that.

    sha256: the hash that the file must have. ModelError: it has another, or cannot be converted.
    """
    from huggingface_hub import constants

    found = file_hash(path) if sha256 is None else check_hash(path, sha256)
    out = Path(constants.HF_HOME) / "fp8serve" / _WRITER / f"{path.stem}-{found[:16]}"
    if not (out / "config.json").exists():
        say(f"Converting {path} into {out}, once...")
        _convert_or_find(path, out)
    return out


def check_hash(path: Path, sha256: str) -> str:
    """The hash of the file's content. ModelError: it differs from the expected one."""
    found = file_hash(path)
    if found != sha256:
        raise ModelError(f"{path} has the SHA-256 {found}, not {sha256}; install the package that it came in again.")
    return found


def file_hash(path: Path) -> str:
    """SHA-256 of the content, in hexadecimal."""
    with open_file(path, error=ModelError) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert_or_find(path: Path, out: Path) -> None:
    try:
        convert(path, out)
    except ModelError:
        if not (out / "config.json").exists():  # it exists if another process has converted the same file meanwhile
            raise
