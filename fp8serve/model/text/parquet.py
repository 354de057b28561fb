"""Rows of Parquet files, with no more memory than a few rows take.

A few bytes of Parquet can stand for any number of values: a page that says "this string, a million times", lists of a
billion nulls, a page that unpacks into two gigabytes. So only the columns that are read are decoded, some rows at a
time, while the process may map a bounded number of further bytes (on systems that keep such a limit). What was decoded
is weighed before it becomes Python objects: its bytes, and eight for each value.

Values of other columns are never looked at. A value that Python cannot hold, such as a date in the year 30000, is an
error that names its row and column.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError, one_line
from fp8serve.model.storage.memory import limited_memory
from fp8serve.model.text.tables import Numbered, check_names, too_large

ROWS_AT_ONCE = 64
MEMORY = 3 << 30  # bytes that decoding may map
BUFFER = 1 << 20  # bytes of a column that are read at once


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
