"""Tokenized data, kept in a run's directory, so that a resumed run does not read and tokenize its files again.

    out/tokenized/data.safetensors       ids int32 [T], loss bool [T]: all rows end to end; lengths int64 [items, rows
    out/tokenized/eval_data.safetensors  of an item]; kept uint8 [B] and kept_lengths int64 [items]: what the reader
                                         keeps of an item besides its rows

A file is used only when its key is that of the run: a hash over the bytes of every data file, the tokenizer's files,
the date that templates are told, the options that the reader looks at, and the programs that read, render and tokenize,
this package's own source included. The contents of the file are hashed as well. In any doubt the data are tokenized
again, so the results of a run do not depend on this directory, and it may be deleted.
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
from fp8serve.model.storage.files import MAX_CARRIED_BYTES, read_file, whole_file
from fp8serve.model.storage.opening import open_file, regular_file
from fp8serve.model.text.data_files import MAX_DATA_BYTES, local_file
from fp8serve.model.text.tokenizer import TOKENIZER_FILES, Tokenizer
from fp8serve.train import data, methods
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row, RowCounts, load_items
from fp8serve.train.events import OnEvent, message
from fp8serve.train.methods.interface import Reader
from fp8serve.train.methods.table import reader_of

FOLDER = "tokenized"
PROGRAMS = ("fp8serve", "tokenizers", "jinja2", "numpy", "pyarrow")
PIECE = 1 << 20  # bytes
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class TokenizedData:
    """The data of a run. tokenizer: that of `source`, the base model's directory or a checkpoint's. keeps: whether
    tokenized data are written; only one of several processes does that.
    """

    config: TrainConfig
    source: Path
    tokenizer: Tokenizer
    on_event: OnEvent
    keeps: bool = True

    def load(self, name: str) -> tuple[list[Any], RowCounts]:
        """The items of the files that the field `name` of the configuration lists; see `load_items`."""
        paths: Sequence[str] = getattr(self.config, name)
        reader = reader_of(self.config)
        if self.config.template_date is None:  # then templates are told the current time, which always differs
            return load_items(reader, paths, self.tokenizer, self.config.seq_len, self.config.data_limits)
        file = Path(self.config.out) / FOLDER / f"{name}.safetensors"
        key = self._key(paths, reader) if self.keeps or file.exists() else ""
        if (result := _read(file, key, reader)) is not None:
            text = f"{len(result[0])} items of {name} were tokenized by an earlier start of this run"
            self.on_event(message("tokenized", text))
            return result
        items, counts = load_items(reader, paths, self.tokenizer, self.config.seq_len, self.config.data_limits)
        if self.keeps and self._key(paths, reader) == key:  # no file was changed meanwhile
            self._keep(file, key, reader, items, counts)
        return items, counts

    def _key(self, paths: Sequence[str], reader: Reader[Any, Any]) -> str:
        parts = {
            "data": [(source, _digest_of_data(local_file(source))) for source in paths],
            "tokenizer": [_digest_of_carried(self.source / name) for name in TOKENIZER_FILES],
            "ends": self.tokenizer.eos_ids,
            "options": [self.config.method, self.config.seq_len, self.config.template_date, vars(reader)],
            "programs": _programs(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _keep(self, file: Path, key: str, reader: Reader[Any, Any], items: Sequence[Any], counts: RowCounts) -> None:
        """If the disk is full, the run says so and continues with what is in memory."""
        try:
            arrays = _packed(reader, items)
        except TypeError:  # a value for the reward that JSON cannot hold
            return
        about = {"key": key, "content": _digest(arrays), "counts": vars(counts)}
        try:
            _write(file, arrays, about)
        except (OSError, SafetensorError) as problem:
            text = f"The tokenized data could not be kept ({problem}); a run that goes on tokenizes them again"
            self.on_event(message("tokenized_lost", text, level="warn"))


def _packed(reader: Reader[Any, Any], items: Sequence[Any]) -> Arrays:
    """See the module. TypeError: what the reader keeps cannot be written."""
    rows = [row for item in items for row in item.rows]
    retained = [reader.kept(item) for item in items]
    return {
        "ids": np.concatenate([row.ids for row in rows]),
        "loss": np.concatenate([row.loss for row in rows]),
        "lengths": np.array([[len(row.ids) for row in item.rows] for item in items], np.int64),
        "kept": np.frombuffer(b"".join(retained), np.uint8),
        "kept_lengths": np.array([len(part) for part in retained], np.int64),
    }


def _unpacked(reader: Reader[Any, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    """The reverse of `_packed`; rows are views of the arrays."""
    ends, lengths = np.cumsum(arrays["lengths"]), arrays["lengths"]
    starts = ends - lengths.ravel()
    spans = zip(starts.reshape(lengths.shape).tolist(), ends.reshape(lengths.shape).tolist(), strict=True)
    return [
        reader.recalled(
            tuple(Row(arrays["ids"][a:b], arrays["loss"][a:b]) for a, b in zip(*span, strict=True)), retained
        )
        for span, retained in zip(spans, _pieces(arrays["kept"], arrays["kept_lengths"]), strict=True)
    ]


def _pieces(content: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Iterator[bytes]:
    start = 0
    for length in lengths.tolist():
        yield content[start : start + length].tobytes()
        start += length


def _read(file: Path, key: str, reader: Reader[Any, Any]) -> tuple[list[Any], RowCounts] | None:
    """None unless the file is whole and has this key."""
    with suppress(OSError, SafetensorError, ValueError, KeyError, TypeError):
        with safe_open(file, framework="np") as opened:
            about = json.loads(opened.metadata()["about"])
            if about["key"] != key:
                return None
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        if about["content"] == _digest(arrays):
            return _unpacked(reader, arrays), RowCounts(**about["counts"])
    return None


def _write(file: Path, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Whole or not at all, and the same bytes for the same content."""
    file.parent.mkdir(exist_ok=True)
    for left in file.parent.glob(f".{file.name}.tmp*"):  # by a run that was killed
        left.unlink()
    with whole_file(file) as new:
        new.touch()
        mode = new.stat().st_mode & 0o777  # the library makes a file that only its owner can read
        save_file(arrays, new, {"about": json.dumps(about, sort_keys=True)})
        new.chmod(mode)


def _digest(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _digest_of_data(path: Path) -> str:
    """DataError: it cannot be read."""
    digest = hashlib.sha256()
    with open_file(path, MAX_DATA_BYTES, DataError) as file:
        try:
            while piece := file.read(PIECE):
                digest.update(piece)
        except OSError as problem:
            raise DataError(f"{path} cannot be read: {problem.strerror or problem}.") from None
    return digest.hexdigest()


def _digest_of_carried(path: Path) -> str:
    return hashlib.sha256(read_file(path, MAX_CARRIED_BYTES)).hexdigest() if regular_file(path) else ""


@cache
def _programs() -> list[str]:
    """Versions of the libraries that read, render and tokenize, and a hash of our own modules that do."""
    homes = [Path(str(package.__file__)).parent for package in (text, methods)]
    sources = sorted(path for home in homes for path in home.rglob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, Path(__file__), Path(data.__file__))))
    return [code.hexdigest(), platform.python_version(), *map(_version, PROGRAMS)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
