"""The token cache: tokenized data in a run's directory, so that a resumed run need not tokenize its files again.

    out/tokenized/data.safetensors
    out/tokenized/eval_data.safetensors
        ids           int32 [T]                 the token ids of all rows, concatenated
        loss          bool [T]                  their loss masks
        lengths       int64 [items, rows]       the length of each row of each item
        kept          uint8 [B]                 the other fields of the items (`Reader.encode_fields`), concatenated
        kept_lengths  int64 [items]             their lengths

A file is used only if its key equals the run's key. The key is a hash of the data files, the tokenizer's files, the
date for templates, the reader's options, the versions of the libraries that read, render and tokenize, and this
package's source. The file also stores a hash of its contents. In any doubt the data are tokenized again, so the results
of a run do not depend on this directory, and users may delete it.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fp8serve.errors import DataError
from fp8serve.model import text
from fp8serve.model.storage.files import MAX_COPIED_FILE_BYTES, atomic_file, read_file
from fp8serve.model.storage.opening import is_regular_file, open_file
from fp8serve.model.text.data_files import MAX_DATA_BYTES, local_file
from fp8serve.model.text.tokenizer import TOKENIZER_FILES, Tokenizer
from fp8serve.train import data, methods
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row, RowCounts, load_items
from fp8serve.train.events import OnEvent, message
from fp8serve.train.methods.interface import Reader, reader_of

FOLDER = "tokenized"
LIBRARIES = ("fp8serve", "tokenizers", "jinja2", "numpy", "pyarrow")
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class TokenCache:
    """Loads a run's items from the cache or from the data files. `model_dir` is the base model or a checkpoint, whose
    tokenizer is `tokenizer`. Only the process with `writes` stores tokenized data.
    """

    config: TrainConfig
    model_dir: Path
    tokenizer: Tokenizer
    on_event: OnEvent
    writes: bool = True

    def load(self, name: str) -> tuple[list[Any], RowCounts]:
        """Returns the items of the files in the configuration's field `name`. Raises DataError like `load_items`."""
        paths: Sequence[str] = getattr(self.config, name)
        reader = reader_of(self.config)
        if self.config.template_date is None:  # templates then receive the current time, so the text always differs
            return load_items(reader, paths, self.tokenizer, self.config.seq_len, self.config.data_limits)
        file = Path(self.config.out) / FOLDER / f"{name}.safetensors"
        key = self._key(paths, reader) if self.writes or file.exists() else ""
        if (cached := _read(file, key, reader)) is not None:
            text = f"{len(cached[0])} items of {name} were read from the token cache of this run"
            self.on_event(message("tokenized", text))
            return cached
        items, counts = load_items(reader, paths, self.tokenizer, self.config.seq_len, self.config.data_limits)
        if self.writes and self._key(paths, reader) == key:  # no file has changed during the tokenization
            self._store(file, key, reader, items, counts)
        return items, counts

    def _key(self, paths: Sequence[str], reader: Reader[Any, Any]) -> str:
        parts = {
            "data": [(path, _data_file_digest(local_file(path))) for path in paths],
            "tokenizer": [_tokenizer_file_digest(self.model_dir / name) for name in TOKENIZER_FILES],
            "eos_ids": self.tokenizer.eos_ids,
            "options": [self.config.method, self.config.seq_len, self.config.template_date, vars(reader)],
            "versions": _versions(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _store(self, file: Path, key: str, reader: Reader[Any, Any], items: Sequence[Any], counts: RowCounts) -> None:
        """Writes the cache. If that fails, for example because the disk is full, the run continues with a warning."""
        try:
            arrays = _arrays_of(reader, items)
        except TypeError:  # a field that `encode_fields` cannot store exactly
            return
        metadata = {"key": key, "content": _content_digest(arrays), "counts": vars(counts)}
        try:
            _write(file, arrays, metadata)
        except (OSError, SafetensorError) as problem:
            text = f"The token cache could not be written ({problem}); a resumed run tokenizes its data again"
            self.on_event(message("tokenized_lost", text, level="warn"))


def _arrays_of(reader: Reader[Any, Any], items: Sequence[Any]) -> Arrays:
    """Returns the arrays of a cache file. Raises TypeError if a field of an item cannot be stored exactly."""
    rows = [row for item in items for row in item.rows]
    fields = [reader.encode_fields(item) for item in items]
    return {
        "ids": np.concatenate([row.ids for row in rows]),
        "loss": np.concatenate([row.loss for row in rows]),
        "lengths": np.array([[len(row.ids) for row in item.rows] for item in items], np.int64),
        "fields": np.frombuffer(b"".join(fields), np.uint8),
        "field_lengths": np.array([len(part) for part in fields], np.int64),
    }


def _items_of(reader: Reader[Any, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    """Returns the items of a cache file's arrays. The rows are views of the arrays."""
    ends, lengths = np.cumsum(arrays["lengths"]), arrays["lengths"]
    starts = ends - lengths.ravel()
    spans = zip(starts.reshape(lengths.shape).tolist(), ends.reshape(lengths.shape).tolist(), strict=True)
    return [
        reader.decode_item(
            tuple(Row(arrays["ids"][a:b], arrays["loss"][a:b]) for a, b in zip(*span, strict=True)), fields
        )
        for span, fields in zip(spans, _split(arrays["fields"], arrays["field_lengths"]), strict=True)
    ]


def _split(content: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Iterator[bytes]:
    start = 0
    for length in lengths.tolist():
        yield content[start : start + length].tobytes()
        start += length


def _read(file: Path, key: str, reader: Reader[Any, Any]) -> tuple[list[Any], RowCounts] | None:
    """Returns the cached items and counts, or None if the file is missing, damaged or has another key."""
    with suppress(OSError, SafetensorError, ValueError, KeyError, TypeError):
        with safe_open(file, framework="np") as opened:
            metadata = json.loads(opened.metadata()["about"])
            if metadata["key"] != key:
                return None
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        if metadata["content"] == _content_digest(arrays):
            return _items_of(reader, arrays), RowCounts(**metadata["counts"])
    return None


def _write(file: Path, arrays: Arrays, metadata: Mapping[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    for temporary in file.parent.glob(f".{file.name}.tmp*"):  # left by a run that was killed
        temporary.unlink()
    with atomic_file(file) as new:
        new.touch()
        mode = new.stat().st_mode & 0o777  # safetensors would create a file that only its owner can read
        save_file(arrays, new, {"about": json.dumps(metadata, sort_keys=True)})
        new.chmod(mode)


def _content_digest(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _data_file_digest(path: Path) -> str:
    """Returns the SHA-256 of the file. Raises DataError if the file cannot be read."""
    with open_file(path, MAX_DATA_BYTES, DataError) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise DataError(f"{path} cannot be read: {problem.strerror or problem}.") from None


def _tokenizer_file_digest(path: Path) -> str:
    return hashlib.sha256(read_file(path, MAX_COPIED_FILE_BYTES)).hexdigest() if is_regular_file(path) else ""


@cache
def _versions() -> list[str]:
    """Returns a hash of this package's modules that read and tokenize, and the versions of Python and LIBRARIES."""
    folders = [Path(str(package.__file__)).parent for package in (text, methods)]
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, Path(__file__), Path(data.__file__))))
    return [code.hexdigest(), platform.python_version(), *map(_version, LIBRARIES)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
