"""Reads the headers of safetensors files, and checks files for NaN and infinities, without importing torch."""

import json
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8serve.errors import ModelError, json_fault
from fp8serve.model.storage.files import reject_duplicate_keys
from fp8serve.model.storage.opening import open_member

MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
CHUNK_ELEMENTS = 1 << 22
# The exponent bits of each dtype. They are all set in NaN and infinities only.
_EXPONENT_BITS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
    "F8_E5M2": (np.uint8, 0x7C),
}


class Header(NamedTuple):
    """The header of a safetensors file."""

    tensors: dict[str, Any]  # the JSON object
    begin: int  # offset of the first tensor's bytes
    end: int  # size of the file


def header_json(path: Path) -> Header:
    """Reads the header of a safetensors file. Raises ModelError if the file is unreadable or the header is damaged."""
    with open_member(path, error=ModelError) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a complete safetensors file ({size} bytes); download it again.")
        text = file.read(length)
    try:
        raw = json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path} has a header that is not valid JSON: {json_fault(e)}.") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} has a header that is not a JSON object.")
    return Header(raw, 8 + length, size)


def tensor_shape(path: Path, name: str, entry: Any) -> tuple[int, ...]:
    """Returns the shape in a header entry. Raises ModelError if the entry has none."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ModelError(f"{path}: tensor {name[:80]} has no shape.")
    return tuple(shape)


def require_finite(directory: Path) -> None:
    """Reads all weights and raises ModelError for the first tensor that holds NaN or an infinity."""
    for path in sorted(directory.glob("*.safetensors")):
        where = f"{directory.name}/{path.name}"
        try:
            header, begin, _ = header_json(path)
            with open_member(path, error=ModelError) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with mapped:
                tensors = ((name, entry) for name, entry in header.items() if name != "__metadata__")
                name = next((name for name, entry in tensors if _has_nonfinite(mapped, begin, entry)), None)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{where} is not a complete safetensors file; download or write it again.") from None
        if name is not None:
            raise ModelError(f"{where} holds NaN or an infinity in {name}.")


def _has_nonfinite(content: mmap.mmap, begin: int, entry: dict[str, Any]) -> bool:
    if entry["dtype"] not in _EXPONENT_BITS:
        return False
    dtype, bits = _EXPONENT_BITS[entry["dtype"]]
    start, end = entry["data_offsets"]
    size = np.dtype(dtype).itemsize
    for offset in range(begin + start, begin + end, CHUNK_ELEMENTS * size):
        count = min(CHUNK_ELEMENTS, (begin + end - offset) // size)
        elements = np.frombuffer(content, dtype, count, offset).copy()  # a view would keep the file mapped
        if bool((elements & dtype(bits) == bits).any()):
            return True
    return False
