"""What a safetensors file says about its tensors, read without torch: its header is JSON behind eight bytes."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from fp8serve.errors import ModelError, json_fault
from fp8serve.model.storage.files import no_duplicates
from fp8serve.model.storage.opening import open_member

MAX_HEADER_BYTES = 100_000_000  # the library's own limit


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
