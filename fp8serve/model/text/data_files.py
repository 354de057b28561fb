"""Where data come from: files, gzip files, standard input and data sets on the Hugging Face hub, row by row.

Every file is read row by row, so that it costs the memory of what is made of its rows. `DataLimits` bounds that: the
rows of a file, the bytes of one and the bytes of all, counted as they are unpacked. A small file that unpacks into a
terabyte, or into a billion rows, is refused where it exceeds them. All programs read data here; a server has limits of
its own (`TrainConfig.data_limits`).
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

MAX_DATA_BYTES = 4 << 30  # of one file
PIECE = 1 << 16  # bytes of a file that is not read by lines
STDIN = "-"
TEXT_SUFFIXES = (".txt", ".md")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*TEXT_SUFFIXES, *JSON_LINES_SUFFIXES, ".json", *DELIMITERS, PARQUET_SUFFIX)
ENDINGS = tuple(kind + packed for kind in SUFFIXES for packed in ("", ".gz"))
DATA = "Text, JSON (lines), CSV or Parquet file, also .gz or hf://datasets/OWNER/NAME/FILE."  # what options say
_HUB = "hf://"
_HUB_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?", re.ASCII)


def source_name(where: Path | str) -> str:
    """Its name in messages and reports."""
    return "standard input" if where == STDIN else str(where)


@dataclass(frozen=True)
class DataLimits:
    """What one file may hold, unpacked. rows: or paragraphs; row_bytes: of one of them; bytes: of all of them; memory:
    bytes that all data of a run may take while they are read and when they are tokenized, None for any."""

    rows: int = 10_000_000
    row_bytes: int = 256 << 20
    bytes: int = MAX_DATA_BYTES
    memory: int | None = None


LIMITS = DataLimits()


@dataclass(frozen=True)
class Rows:
    """rows: (number from 1, a line of JSON or the columns of a row), as they are read; DataError while iterating: the
    rest cannot be read."""

    rows: Iterator[tuple[int, str | Row]]


@dataclass(frozen=True)
class Prose:
    """paragraphs: the parts between empty lines, as they are read; DataError as above."""

    paragraphs: Iterator[str]


def read_source(where: Path | str, columns: Collection[str] | None = None, limits: DataLimits = LIMITS) -> Rows | Prose:
    """The source for a path or, for a str, also for `-`, standard input, which is JSON lines if it begins with `{`, or
    for hf://datasets/OWNER/NAME[@REVISION][/FILE]. The suffix of a file's name gives its kind. columns: those that are
    read of a Parquet file; None for all.

    DataError: it cannot be read, or is of an unsupported kind. While iterating: a limit is exceeded.
    """
    source, name = _source(where, columns, limits), source_name(where)
    if isinstance(source, Rows):
        return Rows(_limit(source.rows, name, limits.rows, "rows"))
    return Prose(_limit(source.paragraphs, name, limits.rows, "paragraphs"))


def _limit(items: Iterator[T], name: str, most: int, what: str) -> Iterator[T]:
    for count, item in enumerate(items, 1):
        if count > most:
            raise DataError(f"{name} has more than {most:,} {what}, the most that is read of one file; give fewer.")
        yield item


def _source(where: Path | str, columns: Collection[str] | None, limits: DataLimits) -> Rows | Prose:
    if where == STDIN:
        lines = _lines(_stdin(), source_name(where), limits)
        head, lines = _peek(lines)
        return _json_lines(lines) if head.startswith("{") else Prose(_paragraphs(lines, source_name(where), limits))
    path = local_file(where)
    open_file(path, MAX_DATA_BYTES, DataError).close()  # a missing file is reported before an unsupported name
    return _by_suffix(path, Path(path.stem if _is_gzip(path) else path.name).suffix.lower(), columns, limits)


def local_file(where: Path | str) -> Path:
    """Where a source other than standard input lies; a file of the hub is downloaded once. DataError: it cannot be."""
    return _from_hub(where) if isinstance(where, str) and where.startswith(_HUB) else Path(where)


def ending_of(name: str) -> str:
    """The end of a file's name that says what it holds, `.csv.gz`; `.jsonl` where none does."""
    return next((ending for ending in ENDINGS if name.lower().endswith(ending)), JSON_LINES_SUFFIXES[0])


def is_lines(name: str) -> bool:
    """Whether its rows are lines, or paragraphs, that can be counted as they arrive."""
    return not name.endswith((".json", ".gz", PARQUET_SUFFIX))


def _by_suffix(path: Path, suffix: str, columns: Collection[str] | None, limits: DataLimits) -> Rows | Prose:
    if suffix == PARQUET_SUFFIX and not _is_gzip(path):
        return Rows(parquet_rows(path, limits.bytes, limits.row_bytes, columns))
    if suffix in DELIMITERS:
        lines = _file_lines(path, limits, whole=True)
        return Rows(csv_rows(lines, str(path), DELIMITERS[suffix], limits.row_bytes, columns))
    if suffix == ".json" and _begins_with(path, "[", limits):
        return Rows(array_rows(_file_pieces(path, limits), str(path), limits.row_bytes))
    if suffix in (*JSON_LINES_SUFFIXES, ".json"):  # the hub holds many files of JSON lines that are called .json
        return _json_lines(_file_lines(path, limits))
    if suffix in TEXT_SUFFIXES:
        return Prose(_paragraphs(_file_lines(path, limits), str(path), limits))
    raise DataError(
        f"{path} is neither text (.txt, .md), JSON lines (.jsonl), JSON, CSV, TSV nor Parquet; convert it to one of "
        "them."
    )


def _json_lines(lines: Iterator[str]) -> Rows:
    return Rows((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _begins_with(path: Path, character: str, limits: DataLimits) -> bool:
    """Whether it is the first character of a file that is no white space."""
    first = next((piece for piece in _file_pieces(path, limits) if piece.strip()), "")
    return first.lstrip().startswith(character)


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


@contextmanager
def _unpack(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """The content of a file, open for reading."""
    with open_file(path, MAX_DATA_BYTES, DataError) as file:
        try:
            yield gzip.GzipFile(fileobj=file) if _is_gzip(path) else file
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            reason = "it ends too early" if isinstance(e, EOFError) else "its bytes are no gzip data"
            raise DataError(f"{path} is not a complete gzip file: {reason}; pack it again.") from None
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror or e}.") from None


def _file_lines(path: Path, limits: DataLimits, whole: bool = False) -> Iterator[str]:
    """`whole`: with their ends."""
    with _unpack(path) as file:
        yield from _lines(file, str(path), limits, whole)


def _file_pieces(path: Path, limits: DataLimits) -> Iterator[str]:
    """The text of a file in pieces of about PIECE characters. A byte-order mark is dropped."""
    decoder, read, name = codecs.getincrementaldecoder("utf-8-sig")(), 0, str(path)
    with _unpack(path) as file:
        while raw := file.read(PIECE):
            _check_size(name, read + len(raw), limits)
            try:
                piece = decoder.decode(raw)
            except UnicodeDecodeError as e:  # whose object begins with what was left of the piece before
                raise _not_utf8(name, read + len(raw) - len(e.object) + e.start) from None
            _check_text(piece, raw, name, read)
            read += len(raw)
            yield piece
        if decoder.getstate()[0]:
            raise _not_utf8(name, read - len(decoder.getstate()[0]))


def _lines(file: BinaryIO | gzip.GzipFile, name: str, limits: DataLimits, whole: bool = False) -> Iterator[str]:
    """Only newlines end a line. A byte-order mark is dropped. Blank lines behind blank lines are bounded like rows,
    because they take as long."""
    read = number = blanks = 0
    was_blank = False
    while raw := file.readline(limits.row_bytes + 1):
        number += 1
        if len(raw) > limits.row_bytes:
            raise too_large(name, number, limits.row_bytes)
        _check_size(name, read + len(raw), limits)
        is_blank = raw.isspace()
        blanks += is_blank and was_blank
        was_blank = is_blank
        if blanks > limits.rows:
            raise DataError(f"{name} has more than {limits.rows:,} blank lines, the most that is read; take them out.")
        line = _decode(raw, name, read)
        yield line if whole else line.removesuffix("\n").removesuffix("\r")
        read += len(raw)


def _check_size(name: str, size: int, limits: DataLimits) -> None:
    if size > limits.bytes:
        raise DataError(f"{name} is larger than {limits.bytes >> 20} MiB, the most that is read; give less.")


def _decode(raw: bytes, name: str, start: int) -> str:
    try:
        text = raw.decode("utf-8" if start else "utf-8-sig")
    except UnicodeDecodeError as e:
        raise _not_utf8(name, start + e.start) from None
    _check_text(text, raw, name, start)
    return text


def _not_utf8(name: str, position: int) -> DataError:
    return DataError(f"{name} is not UTF-8 text: byte {position} cannot be read.")


def _check_text(text: str, raw: bytes, name: str, start: int) -> None:
    if "\0" in text:
        raise DataError(f"{name} is not text: byte {start + raw.index(0)} is zero.")


def _stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise DataError("Standard input is closed; give a file, or pipe text or JSON lines into the command.")
    if sys.stdin.isatty():
        raise DataError("Standard input is a terminal; give a file, or pipe text or JSON lines into the command.")
    return sys.stdin.buffer


def _paragraphs(lines: Iterator[str], name: str, limits: DataLimits) -> Iterator[str]:
    """The parts between empty lines; those of white space alone are left out."""
    part: list[str] = []
    size = 0
    for number, line in enumerate(chain(lines, [""]), 1):
        if not line:
            if any(map(str.strip, part)):
                yield "\n".join(part)
            part, size = [], 0
            continue
        part.append(line)
        size += len(line) + 1
        if size > limits.row_bytes + 1:  # the last line may have no end
            raise too_large(name, number, limits.row_bytes)


def _peek(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """(the first line that is not blank, all lines)."""
    head: list[str] = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    return "".join(head[-1:]).lstrip(), chain(head, lines)


def _from_hub(name: str) -> Path:
    """The file, downloaded once."""
    from huggingface_hub import hf_hub_download

    match = _HUB_FILE.fullmatch(name)
    if not match:
        raise DataError(f"{name} is not a data set on the hub; write hf://datasets/OWNER/NAME/FILE.")
    owner_and_name, revision, file = match.groups()
    try:
        file = file or _only_file(name, owner_and_name, revision)
        return Path(hf_hub_download(owner_and_name, file, repo_type="dataset", revision=revision))
    except DataError:
        raise
    except Exception as e:  # the hub library raises a dozen classes, some of them from other libraries
        reason = one_line(str(e).strip().partition("\n")[0])
        raise DataError(f"{name} could not be downloaded from the hub: {reason}.") from e


def _only_file(name: str, owner_and_name: str, revision: str | None) -> str:
    """The file of a data set that was named without one; not the whole data set, which may be larger than any disk."""
    from huggingface_hub import list_repo_files

    every = list_repo_files(owner_and_name, repo_type="dataset", revision=revision)
    files = [f for f in every if f.lower().endswith(ENDINGS) and f != "README.md"]
    if len(files) != 1:
        held = f"{len(files)} files, such as {files[0]}; add /FILE for one" if files else "no file that is read"
        raise DataError(f"{name} holds {held}.")
    return files[0]
