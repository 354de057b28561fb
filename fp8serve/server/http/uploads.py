"""A `multipart/form-data` body with one file, streamed to the disk as it arrives.

Memory stays at one network chunk however large the file is; the temporary file lies in the data directory, so
nothing else need be writable. Size, number and size of rows, time between chunks and for the whole, and number and
size of the other fields are bounded. The result is `Upload`: the path of the whole, fsynced temporary file, its size
and SHA-256, and the fields.
"""

import asyncio
import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from fp8serve.model.text.data_files import TEXT_SUFFIXES, ending_of, is_lines
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import ClientGoneError
from fp8serve.server.settings import ServerLimits

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
LEAST_RATE = 16 << 10
"""Bytes a second that an upload must keep up on average, once its first seconds are over."""


@dataclass
class Upload:
    """What arrived. `filename` is what the client called it: a label, never a path."""

    path: Path
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0
    sha256: str = ""


class RowBounds:
    """Counts the rows of a file as its bytes pass: lines, or paragraphs of plain text. Fault for one too many or too
    large. What a packed file holds is bounded where it is read, by a process with limits.
    """

    def __init__(self, limits: ServerLimits, text: bool, counts: bool = True) -> None:
        self.limits, self.text, self.counts = limits, text, counts
        self.rows = 0
        self._size = 0  # of the row so far
        self._blank = True  # the line so far

    def take(self, piece: bytes) -> None:
        if not self.counts:
            return
        *whole, rest = piece.split(b"\n")
        for line in whole:
            self._grow(line)
            if self._blank or not self.text:
                self._size = 0
            self._blank = True
        self._grow(rest)

    def _grow(self, part: bytes) -> None:
        if not part.strip():
            return
        self._blank = False
        self.rows += self._size == 0
        self._size += len(part)
        if self._size > self.limits.row_bytes:
            raise self._fault(f"Row {self.rows} is larger than this server's limit of {self.limits.row_bytes} bytes.")
        if self.rows > self.limits.rows:
            raise self._fault(f"The file has more rows than this server's limit of {self.limits.rows}.")

    def _fault(self, message: str) -> Fault:
        return Fault(Code.INVALID_PARAMETER, message, param="file")


class _Parts:
    """The parser's callbacks: the part named `file` goes to `sink`, the others into `fields`."""

    def __init__(self, upload: Upload, sink: IO[bytes], limits: ServerLimits) -> None:
        self.upload, self.sink, self.limits = upload, sink, limits
        self.bounds = RowBounds(limits, text=False)
        self.digest = hashlib.sha256()
        self.done = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._part: str | None = None
        self._text = bytearray()

    def callbacks(self) -> dict[str, object]:
        names = (
            "part_begin",
            "part_data",
            "part_end",
            "header_field",
            "header_value",
            "header_end",
            "headers_finished",
            "end",
        )
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        self._headers, self._text = {}, bytearray()

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def headers_finished(self) -> None:
        options = parse_options_header(self._headers.get(b"content-disposition", b""))[1]
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if self._part == "file":
            if self.upload.filename is not None:
                raise Fault(Code.INVALID_PARAMETER, "Send one file in one request.", param="file")
            self.upload.filename = options.get(b"filename", b"upload.jsonl").decode("utf-8", "replace")[:255]
            ending = ending_of(self.upload.filename)
            self.bounds = RowBounds(self.limits, ending in TEXT_SUFFIXES, is_lines(ending))

    def part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._part == "file":
            self.bounds.take(piece)
            self.sink.write(piece)
            self.digest.update(piece)
            self.upload.size += len(piece)
        elif len(self._text) + len(piece) > MAX_FIELD_BYTES:
            raise Fault(
                Code.INVALID_PARAMETER, f"A form field is larger than {MAX_FIELD_BYTES} bytes.", param=self._part
            )
        else:
            self._text += piece

    def part_end(self) -> None:
        if self._part != "file":
            if len(self.upload.fields) >= MAX_FIELDS:
                raise Fault(Code.INVALID_PARAMETER, f"The form has more than {MAX_FIELDS} fields.")
            self.upload.fields[(self._part or "")[:64]] = self._text.decode("utf-8", "replace")

    def end(self) -> None:
        self.done = True


async def receive_upload(request: Request, path: Path, limits: ServerLimits) -> Upload:
    """Streams the request's body to `path`. Raises Fault or ClientGoneError, and then leaves nothing behind."""
    boundary = _boundary(request)
    _check_room(path.parent, request.headers.get("content-length"), limits.upload_bytes)
    upload = Upload(path)
    try:
        with path.open("xb") as sink:
            parts = _Parts(upload, sink, limits)
            parser = MultipartParser(boundary, parts.callbacks(), max_header_count=8, max_header_size=2048)  # type: ignore[arg-type]
            await _feed(request, parser, limits.upload_bytes, limits.body_seconds)
            _check_whole(parts, upload)
            upload.sha256 = parts.digest.hexdigest()
            sink.flush()
            await asyncio.to_thread(os.fsync, sink.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise Fault(Code.DISK_FULL, f"The upload cannot be written: {error.strerror}.") from None
        if isinstance(error, FormParserError):
            raise Fault(Code.INVALID_PARAMETER, "The body is not well-formed multipart/form-data.") from None
        raise
    return upload


async def _feed(request: Request, parser: MultipartParser, max_bytes: int, seconds: float) -> None:
    total = 0
    stream = request.stream()
    clock = asyncio.get_running_loop().time
    started = clock()
    while True:
        late = started + seconds + total / LEAST_RATE
        try:
            async with asyncio.timeout_at(min(late, clock() + seconds)):
                chunk = await anext(stream, None)
        except TimeoutError:
            message = (
                f"The upload stood still for {seconds:g} seconds, or came at less than {LEAST_RATE} bytes a second."
            )
            raise Fault(Code.REQUEST_TIMEOUT, message) from None
        except ClientDisconnect:
            raise ClientGoneError from None
        if chunk is None:
            return
        total += len(chunk)
        if total > max_bytes:
            raise Fault(Code.BODY_TOO_LARGE, f"The file is larger than this server's limit of {max_bytes} bytes.")
        if chunk:
            await asyncio.to_thread(parser.write, chunk)


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Fault(
            Code.UNSUPPORTED_MEDIA_TYPE, "Send the file as multipart/form-data with the fields file and purpose."
        )
    return options[b"boundary"]


def _check_room(folder: Path, declared: str | None, max_bytes: int) -> None:
    size = int(declared[:20]) if declared is not None and declared.isascii() and declared.isdigit() else 0
    if size > max_bytes:
        raise Fault(Code.BODY_TOO_LARGE, f"The file is larger than this server's limit of {max_bytes} bytes.")
    if shutil.disk_usage(folder).free < size + (64 << 20):
        raise Fault(Code.DISK_FULL, "The disk that holds the data directory has no room for this file.")


def _check_whole(parts: _Parts, upload: Upload) -> None:
    if not parts.done:
        raise Fault(Code.INVALID_PARAMETER, "The body ends before its last boundary.")
    if upload.filename is None:
        raise Fault(Code.INVALID_PARAMETER, "The form has no field named file.", param="file")
