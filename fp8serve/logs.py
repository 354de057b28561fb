"""How our processes write their log: one line for each record on standard error, as text or as a JSON object.

    {"time": "2026-11-24T10:05:03.127Z", "level": "info", "logger": "fp8serve.server.access", "process": "server",
     "message": "POST /generate 200 81.3 ms req-0f3c", "request_id": "req-0f3c", "route": "/generate", "status": 200}

`configure` is called once by each process; a program that hosts us and has its own logging keeps it. Fields of the
current request are bound to its context, and every JSON record made on its behalf has them; a record adds its own with
`extra=fields(...)`. In JSON nothing else is written: Python's warnings and uncaught exceptions become records, too, and
a traceback is one field. Only ASCII is written, so that no record contains a line break.
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
_FIELDS = "fp8serve_fields"  # of a record

_bound: ContextVar[dict[str, Any] | None] = ContextVar("fp8serve_log_fields", default=None)


@contextlib.contextmanager
def request_fields(**known: Any) -> Iterator[None]:
    """While it is open, records made in this context have the fields `known` and those that `bind` adds."""
    token = _bound.set(dict(known))
    try:
        yield
    finally:
        _bound.reset(token)


def bind(**known: Any) -> None:
    """Adds to the fields of the current request; does nothing without one. Tasks and threads made for it see them,
    too."""
    if (result := _bound.get()) is not None:
        result.update(known)


def bound() -> dict[str, Any]:
    """The fields of the current request."""
    return dict(_bound.get() or {})


def fields(**known: Any) -> dict[str, Any]:
    """`extra` of a record that has fields of its own; those that are None are left out."""
    return {_FIELDS: {name: value for name, value in known.items() if value is not None}}


class JsonFormatter(logging.Formatter):
    """A record as a JSON object on one line. `process`: the kind of this process, one word."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        results: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        results |= _bound.get() or {}
        results |= getattr(record, _FIELDS, {})
        if record.exc_info and record.exc_info[0] is not None:
            results["exception"] = record.exc_info[0].__name__
            results["traceback"] = self.formatException(record.exc_info)
        return json.dumps(results, default=str)


def configure(form: LogFormat, process: str) -> None:
    """Writes this process's log to standard error, unless the program that hosts us has its own logging."""
    if logging.getLogger().handlers or logging.getLogger("fp8serve").handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(PLAIN) if form == "plain" else JsonFormatter(process))
    logging.getLogger().addHandler(handler)
    logging.getLogger("fp8serve").setLevel(logging.INFO)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def writes_json() -> bool:
    """Whether this process's log is JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if error is not None:
        logging.getLogger("fp8serve").critical("unexpected %s", kind.__name__, exc_info=(kind, error, traceback))
