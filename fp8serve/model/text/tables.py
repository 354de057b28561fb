"""Rows of files that hold a table: a JSON array of objects, CSV with a header, Parquet.

A column that is empty or null in a row is left out of it. Cells of `messages` and `tools` may be JSON text
(chat_rows.py).
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError, json_kind, one_line, shown

COLUMNS = (
    *("text", "prompt", "completion", "messages", "tools", "functions"),
    *("chosen", "rejected", "input", "preferred_output", "non_preferred_output"),
)
"""The columns that are read from Parquet files."""
MAX_ARRAY_BYTES = 256 << 20  # a JSON array is read whole
ROWS_AT_ONCE = 256

MAX_DIGITS = 4300  # of a whole number; Python's own limit for int


def _whole_number(digits: str) -> int | Decimal:
    """A Decimal, which nothing reads, for a number so long that Python makes no int of it."""
    return int(digits) if len(digits) <= MAX_DIGITS else Decimal(digits)


JSON_ROWS = json.JSONDecoder(parse_int=_whole_number)
"""Reads a row. A value that only an ignored column may have (NaN, a number of any length) is no error here."""

Row = Mapping[str, Any]
Numbered = Iterator[tuple[int, Row]]


def array_rows(lines: Iterable[str], name: str) -> Numbered:
    """(number from 1, object) of a JSON array. DataError: it is not an array, or is too large."""
    text = "\n".join(_at_most(MAX_ARRAY_BYTES, lines, name))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{name} is not valid JSON: {one_line(e)}.") from None
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise DataError(f"{name}:{number} is {json_kind(row)} where an object was expected.")
        yield number, row


def _at_most(limit: int, lines: Iterable[str], name: str) -> Iterator[str]:
    read = 0
    for line in lines:
        read += len(line) + 1
        if read > limit:
            raise DataError(f"{name} is a JSON array of more than {limit >> 20} MiB; write it as JSON lines (.jsonl).")
        yield line


def csv_rows(lines: Iterable[str], name: str, delimiter: str, longest: int) -> Numbered:
    """(number of the line that ends the row, row) of CSV lines with their ends. longest: characters of a cell."""
    csv.field_size_limit(longest)  # of the whole process: there is no other, and 131,072 is less than a chapter
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if None in row:
                raise DataError(f"{name}:{reader.line_num} has more cells than the header {shown(reader.fieldnames)}.")
            yield reader.line_num, {column: cell for column, cell in row.items() if cell}
    except csv.Error as e:
        raise DataError(f"{name}:{reader.reader.line_num} is not valid CSV: {one_line(e)}.") from None


def parquet_rows(path: Path, largest: int, every_column: bool = False) -> Numbered:
    """(number from 1, row) of a Parquet file, with only its COLUMNS unless all are wanted. largest: bytes, unpacked.

    DataError: it is not a Parquet file, is larger, or `pyarrow` is not installed.
    """
    try:
        from pyarrow import ArrowException  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise DataError(f"Reading {path} takes pyarrow: pip install 'fp8serve[parquet]'.") from None
    try:
        with ParquetFile(path) as file:
            meta = file.metadata
            if sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)) > largest:
                raise DataError(f"{path} is larger than {largest >> 20} MiB, the most that is read; give less.")
            names = file.schema_arrow.names
            columns = [name for name in names if every_column or name in COLUMNS] or names
            batches = file.iter_batches(ROWS_AT_ONCE, columns=columns)
            yield from enumerate((_without_nulls(row) for batch in batches for row in batch.to_pylist()), 1)
    except (ArrowException, OSError) as e:
        raise DataError(f"{path} is not a Parquet file that can be read: {one_line(e)}.") from None


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object the keys of all others, as null."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
