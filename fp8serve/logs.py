"""Logging of all fp8serve processes: each record is a line on standard error, as text or as a JSON object.

    {"time": "2026-11-24T10:05:03.127Z", "level": "info", "logger": "fp8serve.server.access", "process": "server",
     "message": "POST /generate 200 81.3 ms req-0f3c", "request_id": "req-0f3c", "route": "/generate", "status": 200}

Each process calls `configure` once. A program that imports fp8serve and configures logging itself is not affected. JSON
records contain the fields of the current request, which are bound to its context, and their own `extra=fields(...)`.
With JSON, Python's warnings and uncaught exceptions are records, too, and a traceback is one field. JSON is ASCII, so a
record contains no line break.
"""

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["plain", "json"]
PLAIN = "%(asctime)s %(levelname)s %(message)s"
_FIELDS_ATTRIBUTE = "fp8serve_fields"  # the attribute of a LogRecord that holds its fields

_request_fields: ContextVar[dict[str, Any] | None] = ContextVar("fp8serve_log_fields", default=None)


@contextlib.contextmanager
def request_fields(**values: Any) -> Iterator[None]:
    """Within the block, records of this context have the fields `values` and the fields that `bind` adds."""
    token = _request_fields.set(dict(values))
    try:
        yield
    finally:
        _request_fields.reset(token)


def bind(**values: Any) -> None:
    """Adds fields to the current request, also for the tasks and threads that it has started. Does nothing outside of
    a request."""
    if (current := _request_fields.get()) is not None:
        current.update(values)


def bound() -> dict[str, Any]:
    """Returns the fields of the current request."""
    return dict(_request_fields.get() or {})


def fields(**values: Any) -> dict[str, Any]:
    """Returns the argument `extra` for a record with these fields. Fields that are None are omitted."""
    return {_FIELDS_ATTRIBUTE: {name: value for name, value in values.items() if value is not None}}


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line. `process` names the kind of process, such as "server"."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        entry |= _request_fields.get() or {}
        entry |= getattr(record, _FIELDS_ATTRIBUTE, {})
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = record.exc_info[0].__name__
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(log_format: LogFormat, process: str) -> None:
    """Writes the log of this process to standard error, unless the program has configured logging itself."""
    if logging.getLogger().handlers or logging.getLogger("fp8serve").handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(PLAIN) if log_format == "plain" else JsonFormatter(process))
    logging.getLogger().addHandler(handler)
    logging.getLogger("fp8serve").setLevel(logging.INFO)
    if log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def writes_json() -> bool:
    """Returns whether the log of this process is JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_uncaught(cls: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if error is not None:
        logging.getLogger("fp8serve").critical("unexpected %s", cls.__name__, exc_info=(cls, error, traceback))
