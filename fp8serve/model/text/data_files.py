"""Where data come from: files, gzip files, standard input and data sets on the Hugging Face hub, row by row.

Only a JSON array is read whole: a file of JSON lines costs the memory of its examples. The limits apply to the unpacked
content of a gzip file, so that a small file which unpacks into a terabyte is refused like a terabyte itself.
"""

import gzip
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from fp8serve.errors import DataError, one_line
from fp8serve.model.storage.files import open_file
from fp8serve.model.text.tables import Row, array_rows, csv_rows, parquet_rows

MAX_DATA_BYTES = 4 << 30  # of one file, unpacked; its examples are held in memory
MAX_LINE_BYTES = 256 << 20
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


def source_name(given: Path | str) -> str:
    """Its name in messages and reports."""
    return "standard input" if given == STDIN else str(given)


@dataclass(frozen=True)
class Rows:
    """rows: (number from 1, a line of JSON or the columns of a row), as they are read; DataError while iterating: the
    rest cannot be read."""

    rows: Iterator[tuple[int, str | Row]]


@dataclass(frozen=True)
class Prose:
    """lines: without their ends, as they are read; DataError as above."""

    lines: Iterator[str]


def read_source(given: Path | str, every_column: bool = False) -> Rows | Prose:
    """The source for a path or, for a str, also for `-`, standard input, which is JSON lines if it begins with `{`, or
    for hf://datasets/OWNER/NAME[@REVISION][/FILE]. The suffix of a file's name gives its kind. every_column: also of
    Parquet files, of which else only those are read that rows to learn from may have.

    DataError: it cannot be read, or is of an unsupported kind.
    """
    if given == STDIN:
        return _told_apart(_lines(_stdin(), source_name(given)))
    path = local_file(given)
    open_file(path, MAX_DATA_BYTES, DataError).close()  # a missing file is reported before an unsupported name
    return _by_suffix(path, Path(path.stem if _is_gzip(path) else path.name).suffix.lower(), every_column)


def local_file(given: Path | str) -> Path:
    """Where a source other than standard input lies; a file of the hub is downloaded once. DataError: it cannot be."""
    return _from_hub(given) if isinstance(given, str) and given.startswith(_HUB) else Path(given)


def ending_of(name: str) -> str:
    """The end of a file's name that says what it holds, `.csv.gz`; `.jsonl` where none does."""
    return next((ending for ending in ENDINGS if name.lower().endswith(ending)), JSON_LINES_SUFFIXES[0])


def is_lines(name: str) -> bool:
    """Whether its rows are lines, or paragraphs, that can be counted as they arrive."""
    return not name.endswith((".json", ".gz", PARQUET_SUFFIX))


def _by_suffix(path: Path, suffix: str, every_column: bool) -> Rows | Prose:
    if suffix == PARQUET_SUFFIX and not _is_gzip(path):
        return Rows(parquet_rows(path, MAX_DATA_BYTES, every_column))
    if suffix in DELIMITERS:
        return Rows(csv_rows(_file_lines(path, whole=True), str(path), DELIMITERS[suffix], MAX_LINE_BYTES))
    if suffix in JSON_LINES_SUFFIXES:
        return _json_lines(_file_lines(path))
    if suffix == ".json":
        return _array_or_lines(_file_lines(path), str(path))
    if suffix in TEXT_SUFFIXES:
        return Prose(_file_lines(path))
    raise DataError(
        f"{path} is neither text (.txt, .md), JSON lines (.jsonl), JSON, CSV, TSV nor Parquet; convert it to one of "
        "them."
    )


def _json_lines(lines: Iterator[str]) -> Rows:
    return Rows((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _array_or_lines(lines: Iterator[str], name: str) -> Rows:
    """The hub holds many files of JSON lines that are called .json."""
    head, lines = _beginning(lines)
    return Rows(array_rows(lines, name)) if head.startswith("[") else _json_lines(lines)


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _file_lines(path: Path, whole: bool = False) -> Iterator[str]:
    """`whole`: with their ends."""
    with open_file(path, MAX_DATA_BYTES, DataError) as file:
        try:
            yield from _lines(gzip.GzipFile(fileobj=file) if _is_gzip(path) else file, str(path), whole)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise DataError(f"{path} is no whole gzip file: {one_line(e)}.") from None
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror or e}.") from None


def _lines(file: BinaryIO | gzip.GzipFile, name: str, whole: bool = False) -> Iterator[str]:
    """Only newlines end a line. A byte-order mark is dropped."""
    read = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(f"{name} has a line of more than {MAX_LINE_BYTES >> 20} MiB; break it into shorter ones.")
        if read + len(raw) > MAX_DATA_BYTES:
            raise DataError(f"{name} is larger than {MAX_DATA_BYTES >> 20} MiB, the most that is read; give less.")
        line = _decoded(raw, name, read)
        yield line if whole else line.removesuffix("\n").removesuffix("\r")
        read += len(raw)


def _decoded(raw: bytes, name: str, start: int) -> str:
    try:
        text = raw.decode("utf-8" if start else "utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{name} is not UTF-8 text: byte {start + e.start} cannot be read.") from None
    if "\0" in text:
        raise DataError(f"{name} is not text: byte {start + raw.index(0)} is zero.")
    return text


def _stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise DataError("Standard input is closed; give a file, or pipe text or JSON lines into the command.")
    if sys.stdin.isatty():
        raise DataError("Standard input is a terminal; give a file, or pipe text or JSON lines into the command.")
    return sys.stdin.buffer


def _told_apart(lines: Iterator[str]) -> Rows | Prose:
    head, lines = _beginning(lines)
    return _json_lines(lines) if head.startswith("{") else Prose(lines)


def _beginning(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
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

    found = _HUB_FILE.fullmatch(name)
    if not found:
        raise DataError(f"{name} is no data set on the hub; write hf://datasets/OWNER/NAME/FILE.")
    owner_and_name, revision, file = found.groups()
    try:
        file = file or _only_file(name, owner_and_name, revision)
        return Path(hf_hub_download(owner_and_name, file, repo_type="dataset", revision=revision))
    except DataError:
        raise
    except Exception as e:  # the hub library raises a dozen classes, some of them from other libraries
        reason = one_line(str(e).strip().partition("\n")[0])
        raise DataError(f"{name} could not be had from the hub: {reason}.") from e


def _only_file(name: str, owner_and_name: str, revision: str | None) -> str:
    """The file of a data set that was named without one; not the whole data set, which may be larger than any disk."""
    from huggingface_hub import list_repo_files

    every = list_repo_files(owner_and_name, repo_type="dataset", revision=revision)
    files = [f for f in every if f.lower().endswith(ENDINGS) and f != "README.md"]
    if len(files) != 1:
        held = f"{len(files)} files, such as {files[0]}; add /FILE for one" if files else "no file that is read"
        raise DataError(f"{name} holds {held}.")
    return files[0]
