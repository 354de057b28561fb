"""Reads rows from JSON arrays of objects, CSV files with a header, and Parquet files.

A row omits columns that are empty in it. Cells of `messages` and `tools` may be JSON text (chat_rows.py). The readers
of JSON and CSV hold one row at a time in memory.

A few bytes of Parquet can encode any number of values: a million repetitions of a string, lists of a billion nulls, or
a page that decompresses to two gigabytes. So only requested columns are decoded, ROWS_PER_BATCH rows at a time, and
decoding them may allocate at most MEMORY_BYTES beyond the memory in use, if the system has such a limit. The size of
decoded rows is estimated before they become Python objects. A value that Python cannot represent, such as a date in the
year 30000, raises DataError with its row and column.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError, json_fault, json_kind, one_line, shown
from fp8serve.model.storage.files import reject_duplicate_keys
from fp8serve.model.storage.memory import limited_memory

MAX_INTEGER_DIGITS = 4300  # Python's own limit for conversion to int
_WHITE_SPACE = re.compile(r"[ \t\r\n]+")
# A chunk of text may end inside a number or inside `false`. The reader reports an error that is this close to the end
# of the text only after it has read the next chunk.
MAX_LITERAL_CHARS = 12

Row = Mapping[str, Any]
NumberedRows = Iterator[tuple[int, Row]]
ROWS_PER_BATCH = 64
MEMORY_BYTES = 3 << 30  # limit of the memory that decoding Parquet rows allocates
BUFFER_BYTES = 1 << 20  # read at once from a Parquet column


def _parse_int(digits: str) -> int | Decimal:
    """Converts an integer to an int, or to a Decimal if it has too many digits for int(). A row may contain a Decimal
    only in a column that is ignored."""
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else Decimal(digits)


JSON_ROWS = json.JSONDecoder(parse_int=_parse_int, object_pairs_hook=reject_duplicate_keys)
"""Decodes a row. It accepts NaN and integers of any length, which ignored columns may contain, and rejects duplicate
keys."""


def too_large(name: str, number: int, limit: int) -> DataError:
    """Returns the error for a row of more than `limit` bytes or characters."""
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
    return DataError(f"{name}:{number} is a row of more than {size}, the limit for one row; shorten it.")


def array_rows(chunks: Iterator[str], name: str, limit: int) -> NumberedRows:
    """Yields (number from 1, object) for the elements of a JSON array whose text comes in chunks of any length.

    Raises DataError if the text is no JSON array of objects, or if an element has more than `limit` characters.
    """
    return _ArrayReader(chunks, name, limit).rows()


class _ArrayReader:
    """Decodes a JSON array one element at a time; its buffer holds at most about twice the longest element."""

    def __init__(self, chunks: Iterator[str], name: str, limit: int) -> None:
        self._chunks, self._name, self._limit = chunks, name, limit
        self._text, self._position = "", 0

    def rows(self) -> NumberedRows:
        self._expect("[")
        number = 0
        while self._peek() != "]" or number:
            number += 1
            yield number, self._element(number)
            if self._peek() != ",":
                break
            self._position += 1
        self._expect("]")
        if self._peek():
            raise self._invalid("there is text after the array")

    def _element(self, number: int) -> Row:
        self._peek()
        while True:
            try:
                value, end = JSON_ROWS.raw_decode(self._text, self._position)
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._position > self._limit:
                    raise too_large(self._name, number, self._limit) from None
                if self._may_be_incomplete(error) and self._read_more():
                    continue
                raise self._invalid(json_fault(error, located=False), number) from None
            if end - self._position > self._limit:
                raise too_large(self._name, number, self._limit)
            if not isinstance(value, dict):
                raise DataError(f"{self._name}:{number} is {json_kind(value)} where an object was expected.")
            self._position = end
            return value

    def _may_be_incomplete(self, error: Exception) -> bool:
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - MAX_LITERAL_CHARS

    def _peek(self) -> str:
        """Returns the next character other than white space without consuming it, or an empty string at the end."""
        while True:
            if space := _WHITE_SPACE.match(self._text, self._position):
                self._position = space.end()
            if self._position < len(self._text) or not self._read_more():
                return self._text[self._position : self._position + 1]

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._invalid(f"expected '{character}', found {shown(self._peek() or 'the end')}")
        self._position += 1

    def _read_more(self) -> bool:
        """Doubles the remaining text, so that decoding an element takes linear time. Returns False at the end."""
        parts = [self._text[self._position :]]
        target = 2 * len(parts[0]) + 1
        while sum(map(len, parts)) < target and (chunk := next(self._chunks, "")):
            parts.append(chunk)
        self._text, self._position = "".join(parts), 0
        return len(parts) > 1

    def _invalid(self, reason: str, number: int | None = None) -> DataError:
        where = self._name if number is None else f"{self._name}:{number}"
        return DataError(f"{where} is not valid JSON: {reason}.")


def csv_rows(
    lines: Iterable[str], name: str, delimiter: str, limit: int, columns: Collection[str] | None
) -> NumberedRows:
    """Yields (number of the row's last line, row) for CSV lines that include their line ends.

    `limit` is the maximum of characters in a row, and `columns` names the columns to read; None reads all.
    """
    csv.field_size_limit(limit)  # of the whole process; the default of 131,072 is too small for long texts
    row_lines = _RowLines(lines, name, limit)
    reader = csv.reader(row_lines, delimiter=delimiter, strict=True)
    try:
        header = next((cells for cells in reader if cells), [])
        check_names(header, name, columns)
        row_lines.size = 0
        for cells in reader:
            row_lines.size = 0
            if len(cells) > len(header):
                raise DataError(f"{name}:{reader.line_num} has more cells than the header {shown(header)}.")
            if cells:
                yield reader.line_num, {column: cell for column, cell in zip(header, cells, strict=False) if cell}
    except csv.Error as e:
        raise DataError(f"{name}:{reader.line_num} is not valid CSV: {_csv_fault(e)}.") from None


def check_names(header: Sequence[str], name: str, columns: Collection[str] | None) -> None:
    """Raises DataError if two columns that are read have the same name."""
    for column, count in Counter(header).items():
        if count > 1 and (columns is None or column in columns):
            raise DataError(f"{name} has {count} columns called {shown(column)}; rename all but one of them.")


def _csv_fault(error: Exception) -> str:
    message = str(error)
    if "unexpected end" in message:
        return "a quoted cell has no closing quote"
    if "expected after" in message:
        return "there is text after the closing quote of a cell"
    return "it cannot be divided into cells"


class _RowLines:
    """Iterates over lines and limits the characters of a row, whose quoted cells may contain line ends. The caller
    resets `size`, the number of characters of the current row, at the end of each row."""

    def __init__(self, lines: Iterable[str], name: str, limit: int) -> None:
        self._lines, self._name, self._limit = enumerate(lines, 1), name, limit
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines:
            self.size += len(line)
            if self.size > self._limit:
                raise too_large(self._name, number, self._limit)
            yield line


def parquet_rows(path: Path, file_limit: int, row_limit: int, columns: Collection[str] | None) -> NumberedRows:
    """Yields (number from 1, row) for a Parquet file, without nulls.

    `file_limit` and `row_limit` are the maximum of bytes of all rows and of one row. `columns` names the columns to
    read; None reads all. If the file has none of these columns, every row maps each of the file's column names to None.
    So the message about a row without the requested columns can list the columns that the file has.

    Raises DataError if the file is no Parquet file, exceeds a limit, has a value that Python cannot represent, or if
    pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise DataError(f"Reading {path} needs pyarrow: pip install 'fp8serve[parquet]'.") from None
    try:
        with limited_memory(MEMORY_BYTES):
            file = ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)
        with file:
            names = file.schema_arrow.names
            check_names(names, str(path), columns)
            selected = [name for name in names if columns is None or name in columns]
            if not selected:
                yield from ((number, dict.fromkeys(names)) for number in range(1, file.metadata.num_rows + 1))
                return
            batches = file.iter_batches(ROWS_PER_BATCH, columns=selected, use_threads=False)
            yield from _rows(_decode_batches(batches), path, file_limit, row_limit)
    except MemoryError:
        raise DataError(
            f"{path} takes more than {MEMORY_BYTES >> 20} MiB of memory to read {ROWS_PER_BATCH} rows; "
            "write it with smaller values."
        ) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:  # a column's name may raise UnicodeDecodeError
        raise DataError(f"{path} is not a Parquet file that can be read; pyarrow says: {one_line(e)}.") from None


def _decode_batches(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with limited_memory(MEMORY_BYTES):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _rows(batches: Iterator[Any], path: Path, file_limit: int, row_limit: int) -> NumberedRows:
    number = file_bytes = 0
    for batch in batches:
        batch_bytes = sum(map(_estimate_bytes, batch.columns))
        file_bytes += batch_bytes
        if file_bytes > file_limit:
            raise DataError(f"{path} is larger than {file_limit >> 20} MiB, the limit for one file; give less.")
        for i in range(batch.num_rows):
            number += 1
            row = (column.slice(i, 1) for column in batch.columns)
            if batch_bytes > row_limit and sum(map(_estimate_bytes, row)) > row_limit:
                raise too_large(str(path), number, row_limit)
            cells = zip(batch.schema.names, batch.columns, strict=True)
            values = ((name, _value(column, i, f"{path}:{number}: `{name}`")) for name, column in cells)
            yield number, {name: value for name, value in values if value is not None}


def _estimate_bytes(array: Any) -> int:
    """Returns a lower bound of the memory of the array's values as Python objects: their bytes and eight for each."""
    from pyarrow import types

    kind = array.type
    if hasattr(array, "storage"):  # an extension type
        return _estimate_bytes(array.storage)
    if types.is_dictionary(kind):
        with limited_memory(MEMORY_BYTES):
            return _estimate_bytes(array.dictionary_decode())
    if types.is_struct(kind):
        return 8 * len(array) + sum(map(_estimate_bytes, array.flatten()))
    if types.is_map(kind):
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        parts = (part.slice(start, end - start) for part in (array.keys, array.items))
        return 8 * len(array) + sum(map(_estimate_bytes, parts))
    if types.is_nested(kind) and hasattr(array, "flatten"):
        return 8 * len(array) + _estimate_bytes(array.flatten())
    return 8 * len(array) + int(array.nbytes)


def _value(column: Any, index: int, subject: str) -> Any:
    try:
        return _without_nulls(column[index].as_py(maps_as_pydicts="strict"))
    except MemoryError:
        raise
    except Exception as e:  # raised by dates, time zones, text that is no UTF-8, or Arrow
        reason = one_line(e) or type(e).__name__
        raise DataError(f"{subject} cannot be read ({column.type}): {reason}.") from None


def _without_nulls(value: Any) -> Any:
    """Removes null values from objects, because Arrow adds the keys of all other objects of the column as null."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):  # Arrow refuses them only without pandas
        raise ValueError("a time has a fraction of a microsecond")
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
