"""The events of a run in a file, one JSON object a line (`train.events`), with `id`, rising by one across restarts, and
`created_at`.

An event is on the disk before the next step starts, so a crash never takes back an event that a reader has seen. A line
cut by a crash is removed at the next start, and steps that are taken again are not logged again.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fp8serve.errors import JobError
from fp8serve.model.storage.files import fsync
from fp8serve.model.storage.opening import open_member
from fp8serve.train.events import Event

EVENTS = "events.jsonl"


class EventLog:
    """Appends to a file, which is opened at the first event: by then the caller holds the run's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __call__(self, event: Event) -> None:
        file = self._file or self._opened()
        if (place := _place(event)) is not None and place <= self._logged:
            return
        line = {"id": self._next, "created_at": int(time.time()), **event}
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
        self._next += 1

    def _opened(self) -> IO[str]:
        past = _whole_lines(self._path)
        self._next = past[-1]["id"] + 1 if past else 1
        self._logged = max((place for e in past if (place := _place(e)) is not None), default=(0, 0))
        self._file = self._path.open("a", encoding="utf-8")
        fsync(self._path.parent)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _place(event: Event) -> tuple[int, int] | None:
    """(returns, step) of an event that a run repeats when it takes the same steps again; None for any other event."""
    repeats = event["type"] == "metrics" or event.get("code") == "returned"
    return (event.get("returns", 0), event["step"]) if repeats else None


@contextmanager
def logged(path: Path) -> Iterator[EventLog]:
    """An EventLog that is closed when the block ends."""
    log = EventLog(path)
    try:
        yield log
    finally:
        log.close()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The events in the file; what follows the last newline was cut by a crash and is removed."""
    if not path.exists():
        return []
    with open_member(path, error=JobError) as file:
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]
