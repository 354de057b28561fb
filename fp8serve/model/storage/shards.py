"""The tensors of a model directory: safetensors files, one or many, memory-mapped and read only when asked for.

The `safetensors` library opens files by their paths, so that a link could be put there after a check. This module reads
the header itself, and refuses what the library refuses (tensors that overlap, leave gaps, or do not fill the file) and
what it does not: duplicate keys, names that are paths, headers larger than any model's, shard names in the index that
leave the directory, links to elsewhere, and tensors that the index promises but the shards do not hold. A tensor is a
view of the mapped file: nothing is copied until it is used, so a model larger than memory can be walked through layer
by layer. A page that was read stays in this process's memory as long as the mapping lives, that is, until the last
tensor of the file is gone: after copying a tensor elsewhere, call `release_pages`. All tensors of a file are views of
one mapping, so that adjacent ones can be used as one matrix (fp8/joined.py); a tensor that is misaligned for its type
is copied.

A directory that we write has an index even when all its weights are in one file. Without one, vLLM and SGLang take
every `*.safetensors` for weights, and `scales.safetensors` is not a weight file.

Pickles (`pytorch_model.bin`) are not read on purpose: loading one runs the code in it.
"""

import json
import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8serve.errors import ModelError, shown
from fp8serve.model.storage.files import present, read_json, write_json
from fp8serve.model.storage.headers import header_json
from fp8serve.model.storage.opening import open_member

_FILES: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by the address at which each begins
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F64": torch.float64, "I64": torch.int64,
          "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# as safetensors writes them: the tensors of the last type first, and those of one type by name
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F16", "BF16", "I32", "F32", "F64", "I64")


def map_file(path: Path) -> Tensor:
    """The bytes of a file, uint8; writing to them changes this process's memory only. ModelError: `path` is no file of
    its directory (`opening.open_member`), or is empty."""
    with open_member(path, error=ModelError) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    _FILES[whole.data_ptr()] = mapped
    return whole


def release_pages(tensor: Tensor) -> None:
    """Release the pages that only `tensor` covers from this process's memory, if it is a view of a mapped file.

    Its values do not change: they are read from the file again when touched.
    """
    base = tensor.untyped_storage().data_ptr()
    mapped = _FILES.get(base)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = tensor.data_ptr() - base
    first, end = -(-start // mmap.PAGESIZE), (start + tensor.nbytes) // mmap.PAGESIZE
    if end > first:
        mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)


def type_name(dtype: torch.dtype) -> str:
    """The type for a message: "float64", without the name of the library."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as its file's header describes it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0  # offset of its bytes from the beginning of the file
    note: str | None = None  # the file's metadata under the tensor's name

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """(tensors by name, metadata) of one safetensors file, without touching its data. ModelError when malformed."""
    raw, begin, end = header_json(path)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ModelError(f"{path} has metadata that is not text.")
    entries = {name: _entry(path, name, value, begin) for name, value in raw.items()}
    _check_layout(path, entries, begin, end)
    return {name: replace(entry, note=metadata.get(name)) for name, entry in entries.items()}, metadata


def _entry(path: Path, name: str, value: Any, begin: int) -> StoredTensor:
    if not _NAME.fullmatch(name):
        raise ModelError(f"{path} holds a tensor of the name {name[:80]!r}, which is not a parameter's name.")
    dtype_name = value.get("dtype") if isinstance(value, dict) else value
    dtype = DTYPES.get(dtype_name) if isinstance(value, dict) and isinstance(dtype_name, str) else None
    if dtype is None:
        raise ModelError(f"{path}: tensor {name} has the type {shown(dtype_name)}, which is not supported.")
    shape = value.get("shape")
    if not isinstance(shape, list) or not all(isinstance(s, int) and s >= 0 for s in shape):
        raise ModelError(f"{path}: tensor {name} has no shape.")
    offsets = value.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(o, int) and o >= 0 for o in offsets):
        raise ModelError(f"{path}: tensor {name} has no place in the file.")
    entry = StoredTensor(path, dtype, tuple(shape), begin + offsets[0])
    if entry.end != begin + offsets[1]:
        size = offsets[1] - offsets[0]
        raise ModelError(f"{path} is damaged: tensor {name} has {size} bytes, which its shape and type contradict.")
    return entry


def _check_layout(path: Path, entries: Mapping[str, StoredTensor], begin: int, end: int) -> None:
    """ModelError unless the tensors fill the file from `begin` to `end`, one behind the other."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != begin:
            raise ModelError(f"{path} is damaged: tensor {name} does not begin where the one before it ends.")
        begin = entry.end
    if begin != end:
        raise ModelError(
            f"{path} is truncated or damaged: its header describes {begin} bytes and it has {end}; download or write "
            "it again."
        )


class Shards(Mapping[str, Tensor]):
    """All tensors of a directory by name. `shards[name]` maps; `shards.entries[name]` only describes."""

    def __init__(
        self,
        entries: dict[str, StoredTensor],
        metadata: dict[str, str] | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        """keys: the keys in the file by name, where the two differ."""
        self.entries, self.metadata, self._keys = entries, metadata or {}, keys or {}
        self._mapped: dict[Path, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A view of the mapped file; writing to it changes this process's memory only. KeyError when absent.

        ModelError: the file was replaced by a shorter one after its header was read.
        """
        entry = self.entries[name]
        if entry.end == entry.start:
            return torch.empty(entry.shape, dtype=entry.dtype)
        file = self._bytes(entry.file)
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

    def same(self, a: str, b: str) -> bool:
        """Whether two tensors are alike in shape, type and every bit."""
        first, second = self.entries[a], self.entries[b]
        alike = (first.shape, first.dtype) == (second.shape, second.dtype)
        return alike and torch.equal(*(self[name].flatten().view(torch.uint8) for name in (a, b)))

    def renamed(self, names: Mapping[str, str]) -> "Shards":
        """The tensors that `names` lists, under the names that it gives. ModelError: two get the same name."""
        keys = {new: old for old, new in names.items()}
        if len(keys) < len(names):
            twice = next(new for old, new in names.items() if keys[new] != old)
            raise ModelError(f"{self.entries[keys[twice]].file.parent} holds the tensor {twice} under two names.")
        return Shards({new: self.entries[old] for new, old in keys.items()}, self.metadata, keys)

    def _bytes(self, path: Path) -> Tensor:
        """The whole file, mapped once."""
        if path not in self._mapped:
            self._mapped[path] = map_file(path)
        return self._mapped[path]


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Copies of all tensors of one file. ModelError when it is malformed."""
    return {name: tensor.clone() for name, tensor in Shards(read_header(path)[0]).items()}


def write_index(model_dir: Path, files: Iterable[str] = (SINGLE,)) -> None:
    """Write the index of the weights in `files`, which lie in `model_dir`, from their headers."""
    entries = {name: entry for file in files for name, entry in read_header(model_dir / file)[0].items()}
    total_size = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries.values())
    weight_map = {name: entry.file.name for name, entry in entries.items()}
    write_json(model_dir / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def open_shards(model_dir: Path) -> Shards:
    """The weights of `model_dir`: `model.safetensors`, else the shards that the index lists.

    ModelError: no weights, a damaged file, an index that points outside the directory or to missing tensors.
    """
    if present(model_dir / SINGLE):
        entries, metadata = read_header(model_dir / SINGLE)
        _check_alone(model_dir, entries)
        return Shards(entries, metadata)
    if not present(model_dir / INDEX):
        pickled = next(iter(sorted(model_dir.glob("*.bin"))), None)
        hint = f" ({pickled.name} is a pickle, which is never read; convert it to safetensors)" if pickled else ""
        raise ModelError(f"{model_dir} holds no model.safetensors and no {INDEX}{hint}.")
    return _read_index(model_dir)


def _check_alone(model_dir: Path, entries: Mapping[str, StoredTensor]) -> None:
    """ModelError: an index beside the single file lists other files or tensors, for example from an older save;
    programs differ in which of the two they read. Tensors that are only in the file do no harm."""
    if not present(model_dir / INDEX):
        return
    weight_map = _weight_map(model_dir / INDEX)
    others = sorted(set(weight_map.values()) - {SINGLE}) or sorted(set(weight_map) - set(entries))
    if others:
        raise ModelError(
            f"{model_dir} holds {SINGLE} and an index that contradicts it ({shown(others[0])}); remove the older one."
        )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index} has no weight_map from tensor names to files.")
    return weight_map


def _read_index(model_dir: Path) -> Shards:
    index = model_dir / INDEX
    weight_map = _weight_map(index)
    headers = {name: read_header(_plain(model_dir, name))[0] for name in sorted(set(weight_map.values()))}
    for tensor, file in weight_map.items():
        if tensor not in headers[file]:
            raise ModelError(f"{index} places {shown(tensor)} in {file}, which does not hold it.")
    return Shards({tensor: headers[file][tensor] for tensor, file in weight_map.items()})


def _plain(model_dir: Path, name: str) -> Path:
    """`model_dir / name`. ModelError when `name` is a path."""
    if name != Path(name).name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
        raise ModelError(f"{model_dir / INDEX} names the shard {shown(name)}, not a plain .safetensors file name.")
    return model_dir / name


@dataclass(frozen=True)
class Parts:
    """A tensor in parts along its first dimension. parts(): all of them in order, on any device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, tensor: Tensor) -> "Parts":
        """A tensor that is there whole."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: [tensor])


def stream_tensors(path: Path, tensors: Mapping[str, Tensor | Parts], metadata: Mapping[str, str]) -> None:
    """Writes the file; parts are asked for in the order in which they are written. OSError: the disk is full."""
    parts = {name: Parts.of(value) if isinstance(value, Tensor) else value for name, value in tensors.items()}
    order = sorted(parts, key=lambda name: (-_ORDER.index(_NAMES[parts[name].dtype]), name))
    with path.open("wb") as file:
        header = _header({name: parts[name] for name in order}, metadata)
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            _write(file, parts[name], name)


def _header(tensors: Mapping[str, Parts], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def _write(file: BinaryIO, tensor: Parts, name: str) -> None:
    left = math.prod(tensor.shape) * tensor.dtype.itemsize
    for part in tensor.parts():
        data = part.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        left -= data.nbytes
        file.write(data.data)
    if left:
        raise RuntimeError(f"The parts of {name} are {abs(left)} bytes too {'short' if left > 0 else 'long'}.")
