"""A safetensors file of tensors that arrive in parts, so that no tensor needs to be whole anywhere: the bytes that
`files.save_tensors` writes for the same content."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fp8serve.model.storage.shards import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# as safetensors writes them: the tensors of the last type first, and those of one type by name
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F16", "BF16", "I32", "F32", "F64", "I64")


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
    given = {name: Parts.of(value) if isinstance(value, Tensor) else value for name, value in tensors.items()}
    order = sorted(given, key=lambda name: (-_ORDER.index(_NAMES[given[name].dtype]), name))
    with path.open("wb") as file:
        header = _header({name: given[name] for name in order}, metadata)
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            _write(file, given[name], name)


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
