"""Receives a `multipart/form-data` body with one file and streams the file to the disk.

Only one network chunk is held in memory. The temporary file is in the data directory, so no other directory needs to be
writable. Limits apply to the file's size, the number and size of its rows, the time between two chunks, the time of the
whole upload, and the number and size of the other form fields. The result is an `Upload`, whose file is complete and
flushed to the disk.
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

from fp8serve.model.text.data_files import TEXT_SUFFIXES, ending_of, is_line_based
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.streams import ClientGoneError
from fp8serve.server.settings import ServerLimits

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
MIN_BYTES_PER_SECOND = 16 << 10
"""The lowest average rate of an upload, after its first `body_seconds`."""


@dataclass
class Upload:
    """A received file and the other form fields. `filename` is the client's name for the file and never becomes a
    path."""

    path: Path
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0
    sha256: str = ""


class RowBounds:
    """Counts the rows of a file while it is received: lines, or paragraphs if `is_text`.

    Raises Fault if there are too many rows or a row is too large. If not `is_enabled`, nothing is counted: rows of
    JSON, Parquet and compressed files are checked by the process that reads them.
    """

    def __init__(self, limits: ServerLimits, is_text: bool, is_enabled: bool = True) -> None:
        self.limits, self.is_text, self.is_enabled = limits, is_text, is_enabled
        self.rows = 0
        self._row_bytes = 0  # of the current row
        self._is_line_blank = True

    def update(self, piece: bytes) -> None:
        """Counts the rows in the next bytes of the file."""
        if not self.is_enabled:
            return
        *lines, unfinished_line = piece.split(b"\n")
        for line in lines:
            self._extend_row(line)
            if self._is_line_blank or not self.is_text:
                self._row_bytes = 0
            self._is_line_blank = True
        self._extend_row(unfinished_line)

    def _extend_row(self, part: bytes) -> None:
        if not part.strip():
            return
        self._is_line_blank = False
        self.rows += self._row_bytes == 0
        self._row_bytes += len(part)
        if self._row_bytes > self.limits.row_bytes:
            raise self._fault(f"Row {self.rows} is larger than this server's limit of {self.limits.row_bytes} bytes.")
        if self.rows > self.limits.rows:
            raise self._fault(f"The file has more rows than this server's limit of {self.limits.rows}.")

    def _fault(self, message: str) -> Fault:
        return Fault(Code.INVALID_PARAMETER, message, param="file")


class _PartHandler:
    """The callbacks of the multipart parser. They write the part named `file` to `sink` and store the other parts in
    `fields`."""

    def __init__(self, upload: Upload, sink: IO[bytes], limits: ServerLimits) -> None:
        self.upload, self.sink, self.limits = upload, sink, limits
        self.bounds = RowBounds(limits, is_text=False)
        self.digest = hashlib.sha256()
        self.is_complete = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._part: str | None = None
        self._text = bytearray()

    def callbacks(self) -> dict[str, object]:
        names = (
            "part_begin", "part_data", "part_end", "header_field", "header_value", "header_end", "headers_finished",
            "end",
        )  # fmt: skip
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
            suffix = ending_of(self.upload.filename)
            self.bounds = RowBounds(self.limits, suffix in TEXT_SUFFIXES, is_line_based(suffix))

    def part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._part == "file":
            self.bounds.update(piece)
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
        self.is_complete = True


async def receive_upload(request: Request, path: Path, limits: ServerLimits) -> Upload:
    """Streams the uploaded file to `path`. If it raises Fault or ClientGoneError, the file is removed."""
    boundary = _boundary(request)
    _check_disk_space(path.parent, request.headers.get("content-length"), limits.upload_bytes)
    upload = Upload(path)
    try:
        with path.open("xb") as sink:
            parts = _PartHandler(upload, sink, limits)
            parser = MultipartParser(boundary, parts.callbacks(), max_header_count=8, max_header_size=2048)  # type: ignore[arg-type]
            await _feed(request, parser, limits.upload_bytes, limits.body_seconds)
            if not parts.is_complete:
                raise Fault(Code.INVALID_PARAMETER, "The multipart body ends before its last boundary.")
            if upload.filename is None:
                raise Fault(Code.INVALID_PARAMETER, "The form has no field named file.", param="file")
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
        deadline = started + seconds + total / MIN_BYTES_PER_SECOND
        try:
            async with asyncio.timeout_at(min(deadline, clock() + seconds)):
                chunk = await anext(stream, None)
        except TimeoutError:
            message = f"The upload stalled for {seconds:g} seconds, or sent less than {MIN_BYTES_PER_SECOND} bytes/s."
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


def _check_disk_space(folder: Path, declared: str | None, max_bytes: int) -> None:
    size = int(declared[:20]) if declared is not None and declared.isascii() and declared.isdigit() else 0
    if size > max_bytes:
        raise Fault(Code.BODY_TOO_LARGE, f"The file is larger than this server's limit of {max_bytes} bytes.")
    if shutil.disk_usage(folder).free < size + (64 << 20):
        raise Fault(Code.DISK_FULL, "The disk of the data directory does not have enough space for this file.")
