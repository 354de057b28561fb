"""Writes rows of training data from a request into a file, within the server's limits."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8serve.errors import RequestError
from fp8serve.model.storage.files import fsync


def write_rows(path: Path, rows: Sequence[Any], most: int, row_bytes: int) -> None:
    """One JSON line for each row, on the disk when this returns.

    RequestError for a row, or a number of rows, that is too large; OSError when the disk refuses.
    """
    if len(rows) > most:
        raise RequestError(f"{len(rows)} rows are more than this server's limit of {most}.")
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            line = json.dumps(row)
            if len(line) > row_bytes:
                raise RequestError(f"Row {number} is larger than this server's limit of {row_bytes} bytes.")
            file.write(line + "\n")
    fsync(path)
