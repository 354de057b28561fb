"""What a safetensors file says about its tensors, read without torch: its header is JSON behind eight bytes.

`require_finite` checks the bits of all numbers in a directory's files, also without torch.
"""

import json
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8serve.errors import ModelError, json_fault
from fp8serve.model.storage.files import no_duplicates
from fp8serve.model.storage.opening import open_member

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
CHUNK = 1 << 22  # numbers at once
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger], int]] = {  # exponent bits: only NaN and infinity set all
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
    "F8_E5M2": (np.uint8, 0x7C),
}


class Header(NamedTuple):
    """tensors: the header's JSON. Tensors' bytes lie from `begin` to `end` of the file."""

    tensors: dict[str, Any]
    begin: int
    end: int


def header_json(path: Path) -> Header:
    """ModelError: the header is cut off, too long or no JSON object, or `path` is no file of its directory."""
    with open_member(path, error=ModelError) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a whole safetensors file ({size} bytes); download it again.")
        text = file.read(length)
    try:
        raw = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path} has a header that is not valid JSON: {json_fault(e)}.") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} has a header that is not a JSON object.")
    return Header(raw, 8 + length, size)


def require_finite(directory: Path) -> None:
    """Reads every byte of the weights. ModelError names the first tensor that holds NaN or an infinity."""
    for path in sorted(directory.glob("*.safetensors")):
        where = f"{directory.name}/{path.name}"
        try:
            name = _first_bad(path)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{where} is not a whole safetensors file; download or write it again.") from None
        if name is not None:
            raise ModelError(f"{where} holds NaN or an infinity in {name}.")


def _first_bad(path: Path) -> str | None:
    header, begin, _ = header_json(path)
    with open_member(path, error=ModelError) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        bad = (n for n, about in header.items() if n != "__metadata__" and _is_bad(content, begin, about))
        return next(bad, None)


def _is_bad(content: mmap.mmap, begin: int, about: dict[str, Any]) -> bool:
    if about["dtype"] not in _EXPONENTS:
        return False
    kind, bits = _EXPONENTS[about["dtype"]]
    start, end = about["data_offsets"]
    size = np.dtype(kind).itemsize
    for at in range(begin + start, begin + end, CHUNK * size):
        count = min(CHUNK, (begin + end - at) // size)
        numbers = np.frombuffer(content, kind, count, at).copy()  # a view would keep the file mapped
        if bool((numbers & kind(bits) == bits).any()):
            return True
    return False
