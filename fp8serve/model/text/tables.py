"""Rows of files that hold a table: a JSON array of objects, CSV with a header, Parquet.

A column that is empty in a row is left out of it. Cells of `messages` and `tools` may be JSON text (chat_rows.py). The
readers of text hold one row at a time, however the file is broken into lines.

A few bytes of Parquet can stand for any number of values: a page that says "this string, a million times", lists of a
billion nulls, a page that unpacks into two gigabytes. So only the columns that are read are decoded, some rows at a
time, while the process may map a bounded number of further bytes (on systems that keep such a limit). What was decoded
is weighed before it becomes Python objects: its bytes, and eight for each value. A value that Python cannot hold, such
as a date in the year 30000, is an error that names its row and column.
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
from fp8serve.model.storage.files import no_duplicates
from fp8serve.model.storage.memory import limited_memory

MAX_DIGITS = 4300  # of a whole number; Python's own limit for int
_WHITE_SPACE = re.compile(r"[ \t\r\n]+")
LONGEST_LITERAL = 12  # characters; an error so near to the end of a piece may be the piece's

Row = Mapping[str, Any]
Numbered = Iterator[tuple[int, Row]]
ROWS_AT_ONCE = 64
MEMORY = 3 << 30  # bytes that decoding may map
BUFFER = 1 << 20  # bytes of a column that are read at once


def _whole_number(digits: str) -> int | Decimal:
    """A Decimal, which nothing reads, for a number so long that Python makes no int of it."""
    return int(digits) if len(digits) <= MAX_DIGITS else Decimal(digits)


JSON_ROWS = json.JSONDecoder(parse_int=_whole_number, object_pairs_hook=no_duplicates)
"""Reads a row. A value that only an ignored column may have (NaN, a number of any length) is no error here; a key that
an object has twice is one, because one of its values would be lost."""


def too_large(name: str, number: int, most: int) -> DataError:
    """The error for a row of more than `most` bytes or characters."""
    size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
    return DataError(f"{name}:{number} is a row of more than {size}, the most that is read; shorten it.")


def array_rows(pieces: Iterator[str], name: str, longest: int) -> Numbered:
    """(number from 1, object) of a JSON array that comes in pieces of any length. longest: characters of an element.

    DataError: it is no array, has another element than objects, or one that is longer.
    """
    return _Array(pieces, name, longest).rows()


class _Array:
    """Reads element after element; holds the text from `at` on, at most about twice the longest element."""

    def __init__(self, pieces: Iterator[str], name: str, longest: int) -> None:
        self._pieces, self._name, self._longest = pieces, name, longest
        self._text, self._at = "", 0

    def rows(self) -> Numbered:
        self._take("[")
        number = 0
        while self._peek() != "]" or number:
            number += 1
            yield number, self._element(number)
            if self._peek() != ",":
                break
            self._at += 1
        self._take("]")
        if self._peek():
            raise self._invalid("there is more behind the array")

    def _element(self, number: int) -> Row:
        self._peek()
        while True:
            try:
                value, end = JSON_ROWS.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > self._longest:
                    raise too_large(self._name, number, self._longest) from None
                if self._may_be_cut(error) and self._grow():
                    continue
                raise self._invalid(json_fault(error, located=False), number) from None
            if end - self._at > self._longest:
                raise too_large(self._name, number, self._longest)
            if not isinstance(value, dict):
                raise DataError(f"{self._name}:{number} is {json_kind(value)} where an object was expected.")
            self._at = end
            return value

    def _may_be_cut(self, error: Exception) -> bool:
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - LONGEST_LITERAL

    def _peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            if space := _WHITE_SPACE.match(self._text, self._at):
                self._at = space.end()
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def _take(self, character: str) -> None:
        if self._peek() != character:
            raise self._invalid(f"expected '{character}', found {shown(self._peek() or 'the end')}")
        self._at += 1

    def _grow(self) -> bool:
        """Doubles the text, so that an element costs no more than a few times its length; False at the end."""
        parts = [self._text[self._at :]]
        target = 2 * len(parts[0]) + 1
        while sum(map(len, parts)) < target and (piece := next(self._pieces, "")):
            parts.append(piece)
        self._text, self._at = "".join(parts), 0
        return len(parts) > 1

    def _invalid(self, why: str, number: int | None = None) -> DataError:
        where = self._name if number is None else f"{self._name}:{number}"
        return DataError(f"{where} is not valid JSON: {why}.")


def csv_rows(
    lines: Iterable[str], name: str, delimiter: str, longest: int, columns: Collection[str] | None
) -> Numbered:
    """(number of the line that ends the row, row) of CSV lines with their ends. longest: characters of a row. columns:
    those that are read, None: all."""
    csv.field_size_limit(longest)  # of the whole process: there is no other, and 131,072 is less than a chapter
    row_lines = _RowLines(lines, name, longest)
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
    """DataError: two columns of the table that are read have the same name, so that one of them would be lost."""
    for column, count in Counter(header).items():
        if count > 1 and (columns is None or column in columns):
            raise DataError(f"{name} has {count} columns called {shown(column)}; rename all but one of them.")


def _csv_fault(error: Exception) -> str:
    message = str(error)
    if "unexpected end" in message:
        return "a quoted cell has no closing quote"
    if "expected after" in message:
        return "there is text behind the closing quote of a cell"
    return "it cannot be divided into cells"


class _RowLines:
    """The lines, of which one row may take only so many: a quoted cell holds line ends. size: characters of the row so
    far."""

    def __init__(self, lines: Iterable[str], name: str, longest: int) -> None:
        self._lines, self._name, self._longest = enumerate(lines, 1), name, longest
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines:
            self.size += len(line)
            if self.size > self._longest:
                raise too_large(self._name, number, self._longest)
            yield line


def parquet_rows(path: Path, most: int, longest: int, columns: Collection[str] | None) -> Numbered:
    """(number from 1, row) of a Parquet file, without nulls. columns: those that are read, None: all; if the file has
    none of them, rows have their names alone, each with None. most: bytes of all rows; longest: bytes of one.

    DataError: it is not a Parquet file, is larger, a value cannot be read, or `pyarrow` is not installed.
    """
    try:
        import pyarrow as pa  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise DataError(f"Reading {path} takes pyarrow: pip install 'fp8serve[parquet]'.") from None
    try:
        with limited_memory(MEMORY):
            file = ParquetFile(path, buffer_size=BUFFER, pre_buffer=False)
        with file:
            names = file.schema_arrow.names
            check_names(names, str(path), columns)
            read = [name for name in names if columns is None or name in columns]
            if not read:
                yield from ((number, dict.fromkeys(names)) for number in range(1, file.metadata.num_rows + 1))
                return
            batches = file.iter_batches(ROWS_AT_ONCE, columns=read, use_threads=False)
            yield from _rows(_decoded(batches), path, most, longest)
    except MemoryError:
        what = f"{path} takes more than {MEMORY >> 20} MiB of memory to read {ROWS_AT_ONCE} rows"
        raise DataError(f"{what}; write it with smaller values.") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:  # the last from the name of a column
        raise DataError(f"{path} is not a Parquet file that can be read; pyarrow says: {one_line(e)}.") from None


def _decoded(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with limited_memory(MEMORY):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _rows(batches: Iterator[Any], path: Path, most: int, longest: int) -> Numbered:
    number = size = 0
    for batch in batches:
        weight = sum(map(_weight, batch.columns))
        size += weight
        if size > most:
            raise DataError(f"{path} is larger than {most >> 20} MiB, the most that is read; give less.")
        for i in range(batch.num_rows):
            number += 1
            if weight > longest and sum(_weight(column.slice(i, 1)) for column in batch.columns) > longest:
                raise too_large(str(path), number, longest)
            cells = zip(batch.schema.names, batch.columns, strict=True)
            row = ((name, _value(column, i, f"{path}:{number}: `{name}`")) for name, column in cells)
            yield number, {name: value for name, value in row if value is not None}


def _weight(array: Any) -> int:
    """Bytes of an array's values, and eight for each: about what they take as Python objects, or less."""
    from pyarrow import types

    kind = array.type
    if hasattr(array, "storage"):  # of an extension type
        return _weight(array.storage)
    if types.is_dictionary(kind):
        with limited_memory(MEMORY):
            return _weight(array.dictionary_decode())
    if types.is_struct(kind):
        return 8 * len(array) + sum(map(_weight, array.flatten()))
    if types.is_map(kind):
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return 8 * len(array) + sum(_weight(part.slice(start, end - start)) for part in (array.keys, array.items))
    if types.is_nested(kind) and hasattr(array, "flatten"):
        return 8 * len(array) + _weight(array.flatten())
    return 8 * len(array) + int(array.nbytes)


def _value(column: Any, index: int, what: str) -> Any:
    try:
        return _without_nulls(column[index].as_py(maps_as_pydicts="strict"))
    except MemoryError:
        raise
    except Exception as e:  # of Python's dates, of time zones, of text that is no UTF-8, or Arrow's own
        reason = one_line(e) or type(e).__name__
        raise DataError(f"{what} cannot be read ({column.type}): {reason}.") from None


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object the keys of all others, as null."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
