"""What a safetensors file says about its tensors, read without torch: its header is JSON behind eight bytes."""

import json
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError, one_line
from fp8serve.model.storage.files import no_duplicates

MAX_HEADER_BYTES = 100_000_000  # the library's own limit


def header_json(path: Path) -> tuple[dict[str, Any], int]:
    """(the header, where the tensors' bytes begin). ModelError when it is cut off, too long or no JSON object."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a whole safetensors file ({size} bytes); download it again.")
        text = file.read(length)
    try:
        raw = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path} has a header that is not valid JSON: {one_line(e)}.") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} has a header that is not a JSON object.")
    return raw, 8 + length
