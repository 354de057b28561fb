"""Where data come from: files, gzip files, standard input and data sets on the Hugging Face hub, line by line.

Nothing is read whole: a file of JSON lines costs the memory of its examples. The limits hold for what comes out of a
gzip file, so that a small file which unpacks into a terabyte is a sentence, like a terabyte itself.
"""

import gzip
import re
import sys
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from fp8serve.errors import DataError, one_line
from fp8serve.model.storage.files import open_file

MAX_DATA_BYTES = 4 << 30  # of one file, unpacked; its examples are held in memory
MAX_LINE_BYTES = 256 << 20
STDIN = "-"
TEXT_SUFFIXES = (".txt", ".md")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
DATA = "Text or JSON-lines file, also as .gz or hf://datasets/OWNER/NAME/FILE."  # what options say of them
_HUB = "hf://"
_HUB_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?", re.ASCII)


def source_name(given: Path | str) -> str:
    """What messages and reports call it."""
    return "standard input" if given == STDIN else str(given)


def read_lines(given: Path | str) -> tuple[bool, Iterator[str]]:
    """(whether these are JSON lines, the lines without their ends) of a path or, for a str, what else a name can be:
    `-`, which is JSON lines where it begins with `{`, or hf://datasets/OWNER/NAME[@REVISION][/FILE].

    DataError, also while iterating: it cannot be read, or is neither JSON lines nor text.
    """
    if given == STDIN:
        return _told_apart(_lines(_stdin(), source_name(given)))
    path = _from_hub(given) if isinstance(given, str) and given.startswith(_HUB) else Path(given)
    open_file(path, MAX_DATA_BYTES, DataError).close()  # whether it is there comes before what it is called
    return _is_json_lines(path), _file_lines(path)


def _is_json_lines(path: Path) -> bool:
    suffix = Path(path.stem if _is_gzip(path) else path.name).suffix.lower()
    if suffix not in (*TEXT_SUFFIXES, *JSON_LINES_SUFFIXES):
        raise DataError(
            f"{path} is neither text (.txt, .md) nor JSON lines (.jsonl), as they are or as .gz; convert it to one "
            "of them."
        )
    return suffix in JSON_LINES_SUFFIXES


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _file_lines(path: Path) -> Iterator[str]:
    with open_file(path, MAX_DATA_BYTES, DataError) as file:
        try:
            yield from _lines(gzip.GzipFile(fileobj=file) if _is_gzip(path) else file, str(path))
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise DataError(f"{path} is no whole gzip file: {one_line(e)}.") from None
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror or e}.") from None


def _lines(file: BinaryIO | gzip.GzipFile, name: str) -> Iterator[str]:
    """Only newlines end a line. A byte-order mark is dropped."""
    read = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(f"{name} has a line of more than {MAX_LINE_BYTES >> 20} MiB; break it into shorter ones.")
        if read + len(raw) > MAX_DATA_BYTES:
            raise DataError(f"{name} is larger than {MAX_DATA_BYTES >> 20} MiB, the most that is read; give less.")
        yield _decoded(raw, name, read)
        read += len(raw)


def _decoded(raw: bytes, name: str, start: int) -> str:
    try:
        text = raw.decode("utf-8" if start else "utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{name} is not UTF-8 text: byte {start + e.start} cannot be read.") from None
    if "\0" in text:
        raise DataError(f"{name} is not text: byte {start + raw.index(0)} is zero.")
    return text.removesuffix("\n").removesuffix("\r")


def _stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise DataError("Standard input is closed; give a file, or pipe text or JSON lines into the command.")
    if sys.stdin.isatty():
        raise DataError("Standard input is a terminal; give a file, or pipe text or JSON lines into the command.")
    return sys.stdin.buffer


def _told_apart(lines: Iterator[str]) -> tuple[bool, Iterator[str]]:
    head: list[str] = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    return bool(head) and head[-1].lstrip().startswith("{"), chain(head, lines)


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
    except Exception as e:  # the hub library raises a dozen classes, some of them of other libraries
        reason = one_line(str(e).strip().partition("\n")[0])
        raise DataError(f"{name} could not be had from the hub: {reason}.") from e


def _only_file(name: str, owner_and_name: str, revision: str | None) -> str:
    """Of a data set that was named without a file: a data set may be larger than any disk."""
    from huggingface_hub import list_repo_files

    ends = tuple(s + z for s in (*TEXT_SUFFIXES, *JSON_LINES_SUFFIXES) for z in ("", ".gz"))
    every = list_repo_files(owner_and_name, repo_type="dataset", revision=revision)
    files = [f for f in every if f.lower().endswith(ends) and f != "README.md"]
    if len(files) != 1:
        held = f"{len(files)} files, such as {files[0]}; add /FILE for one" if files else "no text or JSON lines"
        raise DataError(f"{name} holds {held}.")
    return files[0]
