"""Reads training and calibration data row by row from files, gzip files, standard input and the Hugging Face hub.

`DataLimits` bounds the number of rows, the bytes of a row and the bytes of a file, all after decompression. A small
file that decompresses to a terabyte or to a billion rows raises DataError as soon as it exceeds a limit. The server
sets lower limits (`TrainConfig.data_limits`).
"""

import codecs
import gzip
import re
import sys
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

from fp8serve.errors import DataError, one_line
from fp8serve.model.storage.opening import open_file
from fp8serve.model.text.tables import Row, array_rows, csv_rows, parquet_rows, too_large

T = TypeVar("T")

MAX_DATA_BYTES = 4 << 30  # of one file, after decompression
CHUNK_BYTES = 1 << 16  # read at once from a file that is not read by lines
STDIN = "-"
TEXT_SUFFIXES = (".txt", ".md")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*TEXT_SUFFIXES, *JSON_LINES_SUFFIXES, ".json", *DELIMITERS, PARQUET_SUFFIX)
ENDINGS = tuple(suffix + compression for suffix in SUFFIXES for compression in ("", ".gz"))
DATA = "Text, JSON (lines), CSV or Parquet file, also .gz or hf://datasets/OWNER/NAME/FILE."  # help text of options
_HUB_PREFIX = "hf://"
_HUB_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?", re.ASCII)


def source_name(where: Path | str) -> str:
    """Returns the name of a source for messages and reports."""
    return "standard input" if where == STDIN else str(where)


@dataclass(frozen=True)
class DataLimits:
    """Limits of one file after decompression, and of the memory for the data of a run."""

    rows: int = 10_000_000  # or paragraphs
    row_bytes: int = 256 << 20  # of one row or paragraph
    bytes: int = MAX_DATA_BYTES
    memory: int | None = None  # bytes for reading and tokenizing all data of a run; None is no limit


LIMITS = DataLimits()


@dataclass(frozen=True)
class Rows:
    """The numbers (from 1) and contents of rows, read lazily. Iterating raises DataError if a row cannot be read."""

    rows: Iterator[tuple[int, str | Row]]


@dataclass(frozen=True)
class Paragraphs:
    """The paragraphs of a text, which empty lines separate, read lazily. Iterating may raise DataError."""

    paragraphs: Iterator[str]


def read_source(where: Path | str, columns: Collection[str] | None, limits: DataLimits) -> Rows | Paragraphs:
    """Opens a source of data, whose format follows from the suffix of its file name.

    Args:
        where: a path, hf://datasets/OWNER/NAME[@REVISION][/FILE], or `-` for standard input, which contains JSON lines
            if it begins with `{`, and text otherwise
        columns: columns to read from a Parquet file; None reads all

    Raises DataError if the source cannot be read or has an unsupported format. Iterating raises it at a limit.
    """
    name = source_name(where)
    if where == STDIN:
        first_line, lines = _peek(_lines(_stdin(), name, limits))
        is_json = first_line.startswith("{")
        source = _json_lines(lines) if is_json else Paragraphs(_paragraphs(lines, name, limits))
    else:
        path = local_file(where)
        open_file(path, MAX_DATA_BYTES, DataError).close()  # reports a missing file before an unsupported suffix
        source = _by_suffix(path, Path(path.stem if _is_gzip(path) else path.name).suffix.lower(), columns, limits)
    if isinstance(source, Rows):
        return Rows(_limit(source.rows, name, limits.rows, "rows"))
    return Paragraphs(_limit(source.paragraphs, name, limits.rows, "paragraphs"))


def _limit(items: Iterator[T], name: str, max_count: int, unit: str) -> Iterator[T]:
    for count, item in enumerate(items, 1):
        if count > max_count:
            raise DataError(f"{name} has more than {max_count:,} {unit}, the limit for one file; give fewer.")
        yield item


def local_file(where: Path | str) -> Path:
    """Returns the path of a source, after downloading it from the hub if needed. Raises DataError if that fails."""
    return _download(where) if isinstance(where, str) and where.startswith(_HUB_PREFIX) else Path(where)


def ending_of(name: str) -> str:
    """Returns the ending of a file name that tells its format, such as `.csv.gz`, or `.jsonl` if it has none."""
    return next((ending for ending in ENDINGS if name.lower().endswith(ending)), JSON_LINES_SUFFIXES[0])


def is_line_based(name: str) -> bool:
    """Whether rows of a file with this name can be counted line by line while it is uploaded."""
    return not name.endswith((".json", ".gz", PARQUET_SUFFIX))


def _by_suffix(path: Path, suffix: str, columns: Collection[str] | None, limits: DataLimits) -> Rows | Paragraphs:
    if suffix == PARQUET_SUFFIX and not _is_gzip(path):
        return Rows(parquet_rows(path, limits.bytes, limits.row_bytes, columns))
    if suffix in DELIMITERS:
        lines = _file_lines(path, limits, keep_ends=True)
        return Rows(csv_rows(lines, str(path), DELIMITERS[suffix], limits.row_bytes, columns))
    if suffix == ".json" and _begins_with(path, "[", limits):
        return Rows(array_rows(_file_chunks(path, limits), str(path), limits.row_bytes))
    if suffix in (*JSON_LINES_SUFFIXES, ".json"):  # many .json files on the hub contain JSON lines
        return _json_lines(_file_lines(path, limits))
    if suffix in TEXT_SUFFIXES:
        return Paragraphs(_paragraphs(_file_lines(path, limits), str(path), limits))
    raise DataError(
        f"{path} is neither text (.txt, .md), JSON lines (.jsonl), JSON, CSV, TSV nor Parquet; convert it to one of "
        "them."
    )


def _json_lines(lines: Iterator[str]) -> Rows:
    return Rows((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _begins_with(path: Path, character: str, limits: DataLimits) -> bool:
    """Whether the file's first character other than white space is `character`."""
    first = next((chunk for chunk in _file_chunks(path, limits) if chunk.strip()), "")
    return first.lstrip().startswith(character)


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


@contextmanager
def _open_decompressed(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    with open_file(path, MAX_DATA_BYTES, DataError) as file:
        try:
            yield gzip.GzipFile(fileobj=file) if _is_gzip(path) else file
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            reason = "it ends too early" if isinstance(e, EOFError) else "its bytes are no gzip data"
            raise DataError(f"{path} is not a complete gzip file: {reason}; pack it again.") from None
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror or e}.") from None


def _file_lines(path: Path, limits: DataLimits, keep_ends: bool = False) -> Iterator[str]:
    with _open_decompressed(path) as file:
        yield from _lines(file, str(path), limits, keep_ends)


def _file_chunks(path: Path, limits: DataLimits) -> Iterator[str]:
    """Yields the text of a file in chunks of about CHUNK_BYTES characters, without a byte-order mark."""
    decoder, offset, name = codecs.getincrementaldecoder("utf-8-sig")(), 0, str(path)
    with _open_decompressed(path) as file:
        while raw := file.read(CHUNK_BYTES):
            _check_size(name, offset + len(raw), limits)
            try:
                chunk = decoder.decode(raw)
            except UnicodeDecodeError as e:  # `e.object` begins with undecoded bytes of the previous chunk
                raise _not_utf8(name, offset + len(raw) - len(e.object) + e.start) from None
            _check_text(chunk, raw, name, offset)
            offset += len(raw)
            yield chunk
        if decoder.getstate()[0]:
            raise _not_utf8(name, offset - len(decoder.getstate()[0]))


def _lines(file: BinaryIO | gzip.GzipFile, name: str, limits: DataLimits, keep_ends: bool = False) -> Iterator[str]:
    """Yields lines, which only a newline ends, without a byte-order mark. The limit of rows also applies to consecutive
    blank lines, because reading them takes as long."""
    offset = number = blanks = 0
    was_blank = False
    while raw := file.readline(limits.row_bytes + 1):
        number += 1
        if len(raw) > limits.row_bytes:
            raise too_large(name, number, limits.row_bytes)
        _check_size(name, offset + len(raw), limits)
        is_blank = raw.isspace()
        blanks += is_blank and was_blank
        was_blank = is_blank
        if blanks > limits.rows:
            raise DataError(f"{name} has more than {limits.rows:,} blank lines, the limit for one file; remove them.")
        try:
            line = raw.decode("utf-8" if offset else "utf-8-sig")
        except UnicodeDecodeError as e:
            raise _not_utf8(name, offset + e.start) from None
        _check_text(line, raw, name, offset)
        yield line if keep_ends else line.removesuffix("\n").removesuffix("\r")
        offset += len(raw)


def _check_size(name: str, size: int, limits: DataLimits) -> None:
    if size > limits.bytes:
        raise DataError(f"{name} is larger than {limits.bytes >> 20} MiB, the limit for one file; give less.")


def _not_utf8(name: str, position: int) -> DataError:
    return DataError(f"{name} is not UTF-8 text: byte {position} cannot be read.")


def _check_text(text: str, raw: bytes, name: str, offset: int) -> None:
    if "\0" in text:
        raise DataError(f"{name} is not text: byte {offset + raw.index(0)} is zero.")


def _stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise DataError("Standard input is closed; give a file, or pipe text or JSON lines into the command.")
    if sys.stdin.isatty():
        raise DataError("Standard input is a terminal; give a file, or pipe text or JSON lines into the command.")
    return sys.stdin.buffer


def _paragraphs(lines: Iterator[str], name: str, limits: DataLimits) -> Iterator[str]:
    """Yields the paragraphs, which empty lines separate; paragraphs of white space are omitted."""
    paragraph: list[str] = []
    size = 0
    for number, line in enumerate(chain(lines, [""]), 1):
        if not line:
            if any(map(str.strip, paragraph)):
                yield "\n".join(paragraph)
            paragraph, size = [], 0
            continue
        paragraph.append(line)
        size += len(line) + 1
        if size > limits.row_bytes + 1:  # the last line may have no newline
            raise too_large(name, number, limits.row_bytes)


def _peek(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """Returns the first line that is not blank, and an iterator over all lines."""
    consumed: list[str] = []
    for line in lines:
        consumed.append(line)
        if line.strip():
            break
    return "".join(consumed[-1:]).lstrip(), chain(consumed, lines)


def _download(name: str) -> Path:
    """Returns the file in the local cache of the hub, after downloading it if it is not there."""
    from huggingface_hub import hf_hub_download

    match = _HUB_FILE.fullmatch(name)
    if not match:
        raise DataError(f"{name} is not a data set on the hub; write hf://datasets/OWNER/NAME/FILE.")
    repository, revision, file = match.groups()
    try:
        file = file or _only_file(name, repository, revision)
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    except DataError:
        raise
    except Exception as e:  # huggingface_hub raises many classes, also from other libraries
        reason = one_line(str(e).strip().partition("\n")[0])
        raise DataError(f"{name} could not be downloaded from the hub: {reason}.") from e


def _only_file(name: str, repository: str, revision: str | None) -> str:
    """Returns the name of the data set's only file. Raises DataError if it has several, which may not fit on a disk."""
    from huggingface_hub import list_repo_files

    all_files = list_repo_files(repository, repo_type="dataset", revision=revision)
    files = [f for f in all_files if f.lower().endswith(ENDINGS) and f != "README.md"]
    if not files:
        raise DataError(f"{name} has no file in a supported format.")
    if len(files) > 1:
        raise DataError(f"{name} has {len(files)} files, such as {files[0]}; add /FILE to choose one.")
    return files[0]
