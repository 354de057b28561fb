"""Reads the tensors of a model directory from one or more memory-mapped safetensors files, and writes such files.

The `safetensors` library opens files by path, so a file could be replaced by a link after a check. This module reads
headers itself. Like the library it rejects tensors that overlap, leave gaps, or do not fill the file. It also rejects
duplicate keys, names that are paths, oversized headers, links out of the directory, shard names in the index that leave
the directory, and tensors that only the index lists.

A tensor is a view of the mapped file and is read when it is used, so a model larger than memory can be processed layer
by layer. Pages that were read stay in memory until the last tensor of the file is deleted, unless the caller calls
`release_pages`. All tensors of a file are views of one mapping, so that adjacent ones can be used as one matrix
(fp8/joined.py). A tensor that is misaligned for its dtype is copied.

Directories written by fp8serve have an index even if all weights are in one file. Without an index, vLLM and SGLang
load every `*.safetensors` as weights, even `scales.safetensors`.

Pickles (`pytorch_model.bin`) are never read, because loading one runs the code in it.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fp8serve.errors import ModelError, shown
from fp8serve.model.storage.files import present, read_json, write_json
from fp8serve.model.storage.headers import header_json, tensor_shape
from fp8serve.model.storage.mapping import map_file

SAFE_WEIGHTS, SAFE_WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F64": torch.float64, "I64": torch.int64,
          "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# safetensors writes tensors in the reverse order of these dtypes, and tensors of one dtype by name
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F16", "BF16", "I32", "F32", "F64", "I64")


def type_name(dtype: torch.dtype) -> str:
    """Returns the name of the dtype for messages, such as "float64"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StoredTensor:
    """The entry of a tensor in the header of its file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0  # offset of its bytes from the beginning of the file
    note: str | None = None  # the file's metadata under the tensor's name
    content: Tensor | None = field(default=None, compare=False, repr=False)  # of a file in memory: its bytes, uint8 [N]

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Reads (tensor entries by name, metadata) from the header of a file. Raises ModelError if it is malformed."""
    raw, begin, end = header_json(path)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ModelError(f"{path} has metadata that is not text.")
    entries = {name: _entry(path, name, value, begin) for name, value in raw.items()}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != begin:
            raise ModelError(f"{path} is damaged: tensor {name} does not begin where the one before it ends.")
        begin = entry.end
    if begin != end:
        raise ModelError(
            f"{path} is truncated or damaged: its header describes {begin} bytes and it has {end}; download or write "
            "it again."
        )
    return {name: replace(entry, note=metadata.get(name)) for name, entry in entries.items()}, metadata


def _entry(path: Path, name: str, value: Any, begin: int) -> StoredTensor:
    if not _NAME.fullmatch(name):
        raise ModelError(f"{path} holds a tensor named {name[:80]!r}, which is not a valid parameter name.")
    dtype_name = value.get("dtype") if isinstance(value, dict) else value
    dtype = DTYPES.get(dtype_name) if isinstance(value, dict) and isinstance(dtype_name, str) else None
    if dtype is None:
        raise ModelError(f"{path}: tensor {name} has the type {shown(dtype_name)}, which is not supported.")
    shape = tensor_shape(path, name, value)
    offsets = value.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(o, int) and o >= 0 for o in offsets):
        raise ModelError(f"{path}: tensor {name} has no valid data_offsets.")
    entry = StoredTensor(path, dtype, shape, begin + offsets[0])
    if entry.end != begin + offsets[1]:
        size = offsets[1] - offsets[0]
        raise ModelError(f"{path} is damaged: tensor {name} has {size} bytes, which its shape and type contradict.")
    return entry


class Shards(Mapping[str, Tensor]):
    """A mapping from the names of a directory's tensors to views of the files; `entries` has their header entries."""

    def __init__(self, entries: dict[str, StoredTensor], metadata: dict[str, str] | None = None) -> None:
        self.entries, self.metadata = entries, metadata or {}
        self._mapped: dict[Path, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Returns a view of the mapped file; writing to it does not change the file. Raises ModelError if the file
        became shorter after its header was read."""
        entry = self.entries[name]
        if entry.end == entry.start:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.content is None and entry.file not in self._mapped:
            self._mapped[entry.file] = map_file(entry.file)
        file = self._mapped[entry.file] if entry.content is None else entry.content
        if len(file) < entry.end:
            raise ModelError(f"{entry.file} was replaced while it was read; load the model again.")
        raw = file[entry.start : entry.end]
        return (raw.clone() if entry.start % entry.dtype.itemsize else raw).view(entry.dtype).view(entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def bits_equal(self, a: str, b: str) -> bool:
        """Whether two tensors have the same shape, dtype and bits."""
        first, second = self.entries[a], self.entries[b]
        same_type = (first.shape, first.dtype) == (second.shape, second.dtype)
        return same_type and torch.equal(*(self[name].flatten().view(torch.uint8) for name in (a, b)))

    def renamed(self, names: Mapping[str, str]) -> "Shards":
        """Returns the tensors in `names`, which maps old to new names. Raises ModelError if new names are equal."""
        keys = {new: old for old, new in names.items()}
        if len(keys) < len(names):
            duplicate = next(new for old, new in names.items() if keys[new] != old)
            folder = self.entries[keys[duplicate]].file.parent
            raise ModelError(f"{folder} holds the tensor {duplicate} under two names.")
        return Shards({new: self.entries[old] for new, old in keys.items()}, self.metadata)


def shards_in_memory(tensors: Mapping[str, Tensor], name: str) -> Shards:
    """Returns tensors in memory as if they were those of a directory. `name` stands for the files in messages."""

    def entry(tensor: Tensor) -> StoredTensor:
        content = tensor.reshape(-1).view(torch.uint8)
        return StoredTensor(Path(name), tensor.dtype, tuple(tensor.shape), content=content)

    return Shards({key: entry(tensor) for key, tensor in tensors.items()})


class ComputedShards(Shards):
    """The tensors in `entries`: those in `computed` are computed when they are read, all others are in `stored`."""

    def __init__(
        self, stored: Shards, entries: dict[str, StoredTensor], computed: Mapping[str, Callable[[], Tensor]]
    ) -> None:
        super().__init__(entries, stored.metadata)
        self._stored, self.computed = stored, computed

    def __getitem__(self, name: str) -> Tensor:
        compute = self.computed.get(name)
        return self._stored[name] if compute is None else compute()


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of these `names`, each of which `read` returns when it is needed."""

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Returns copies of all tensors of one file. Raises ModelError if it is malformed."""
    return {name: tensor.clone() for name, tensor in Shards(read_header(path)[0]).items()}


def write_index(model_dir: Path, files: Iterable[str] = (SAFE_WEIGHTS,)) -> None:
    """Writes the index of the safetensors files `files` in `model_dir` from their headers."""
    entries = {name: entry for file in files for name, entry in read_header(model_dir / file)[0].items()}
    total_size = sum(entry.end - entry.start for entry in entries.values())
    weight_map = {name: entry.file.name for name, entry in entries.items()}
    write_json(model_dir / SAFE_WEIGHTS_INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def open_shards(model_dir: Path) -> Shards:
    """Opens the weights of `model_dir`: `model.safetensors` or else the files that the index lists.

    Raises ModelError if there are no weights, a file is damaged, or the index lists a missing tensor or a file outside
    the directory.
    """
    if present(model_dir / SAFE_WEIGHTS):
        entries, metadata = read_header(model_dir / SAFE_WEIGHTS)
        _check_index_agrees(model_dir, entries)
        return Shards(entries, metadata)
    if not present(model_dir / SAFE_WEIGHTS_INDEX):
        pickled = next(iter(sorted(model_dir.glob("*.bin"))), None)
        hint = f" ({pickled.name} is a pickle, which is never read; convert it to safetensors)" if pickled else ""
        raise ModelError(f"{model_dir} holds no model.safetensors and no {SAFE_WEIGHTS_INDEX}{hint}.")
    index = model_dir / SAFE_WEIGHTS_INDEX
    weight_map = _weight_map(index)
    headers = {name: read_header(_shard_path(model_dir, name))[0] for name in sorted(set(weight_map.values()))}
    for tensor, file in weight_map.items():
        if tensor not in headers[file]:
            raise ModelError(f"{index} places {shown(tensor)} in {file}, which does not hold it.")
    return Shards({tensor: headers[file][tensor] for tensor, file in weight_map.items()})


def _check_index_agrees(model_dir: Path, entries: Mapping[str, StoredTensor]) -> None:
    """Raises ModelError if an index lists other files or tensors than those of the single file. Programs differ in
    which of the two they read. Tensors that the index does not list are allowed."""
    if not present(model_dir / SAFE_WEIGHTS_INDEX):
        return
    weight_map = _weight_map(model_dir / SAFE_WEIGHTS_INDEX)
    unknown = sorted(set(weight_map.values()) - {SAFE_WEIGHTS}) or sorted(set(weight_map) - set(entries))
    if unknown:
        raise ModelError(
            f"{model_dir} holds {SAFE_WEIGHTS} and an index that contradicts it ({shown(unknown[0])}); remove the "
            "older one."
        )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index} has no weight_map from tensor names to files.")
    return weight_map


def _shard_path(model_dir: Path, name: str) -> Path:
    """Returns `model_dir / name`. Raises ModelError if `name` is not a plain file name."""
    if name != Path(name).name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
        raise ModelError(
            f"{model_dir / SAFE_WEIGHTS_INDEX} names the shard {shown(name)}, not a plain .safetensors file name."
        )
    return model_dir / name


@dataclass(frozen=True)
class TensorParts:
    """A tensor that is written in parts along its first dimension."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]  # returns the parts in order, on any device


def save_tensors(path: Path, tensors: Mapping[str, Tensor | TensorParts], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file; equal content gives equal bytes. The parts of a tensor are computed only when they
    are written."""
    names = sorted(tensors, key=lambda name: (-_ORDER.index(_DTYPE_NAMES[tensors[name].dtype]), name))
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        dtype, shape, begin = tensors[name].dtype, tensors[name].shape, end
        end += math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            _write_parts(file, tensors[name], name)


def _write_parts(file: BinaryIO, tensor: Tensor | TensorParts, name: str) -> None:
    missing_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    for part in [tensor] if isinstance(tensor, Tensor) else tensor.parts():
        data = part.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        missing_bytes -= data.nbytes
        file.write(data.data)
    if missing_bytes:
        size = "short" if missing_bytes > 0 else "long"
        raise RuntimeError(f"The parts of {name} are {abs(missing_bytes)} bytes too {size}.")
