"""Frozen records for the rows of the job database: jobs, their events and uploaded files."""

import json
import re
import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_RESULT = re.compile(r"ft:(.+?):org-local:[^:]*:[^:]*(?::ckpt-step-\d+)?")  # `Job.model_id`, or a checkpoint's name
Status = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True)
class Job:
    """A row of the table of jobs.

    Times are seconds since 1970. `base` is the name of the model that the job trains, and `source` the key of its
    weights. `progress` holds the newest metrics. `events_offset` is the number of bytes of the job's events.jsonl whose
    events are stored.
    """

    id: str
    number: int
    created_at: int
    started_at: int | None
    finished_at: int | None
    status: Status
    base: str
    source: str
    suffix: str
    config: dict[str, Any]
    training_file: str | None
    validation_file: str | None
    metadata: dict[str, str]
    progress: dict[str, Any]
    error: dict[str, Any] | None
    cancel_requested: bool
    crashes: int
    pause_requested: bool
    events_offset: int

    @property
    def root(self) -> str:
        """The name of the original model: the one that `base` was fine-tuned from, or `base` itself."""
        match = _RESULT.fullmatch(self.base)
        return match[1] if match else self.base

    @property
    def model_id(self) -> str:
        """The name of the resulting model, in the form of OpenAI's names."""
        return f"ft:{self.root}:org-local:{self.suffix}:{self.id[-8:]}"


@dataclass(frozen=True)
class Event:
    """An event of a job. `type` is "message", "metrics" or "checkpoint", and decides what `data` contains."""

    seq: int
    created_at: int
    level: str
    type: str
    message: str
    data: dict[str, Any]


@dataclass(frozen=True)
class StoredFile:
    """An uploaded file. It is stored under its id; `filename`, which the client chose, never becomes a path."""

    id: str
    number: int
    created_at: int
    filename: str
    bytes: int
    sha256: str
    purpose: str


@dataclass(frozen=True)
class NewJob:
    """The columns of a new job that its creator sets."""

    base: str
    source: str
    config: Mapping[str, Any]
    suffix: str = ""
    training_file: str | None = None
    validation_file: str | None = None
    metadata: Mapping[str, str] | None = None


def new_job_id() -> str:
    return f"ftjob-{secrets.token_hex(12)}"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def as_job(row: sqlite3.Row) -> Job:
    values = dict(row)
    for name in ("config", "metadata", "progress"):
        values[name] = json.loads(values[name])
    values["error"] = json.loads(values["error"]) if values["error"] else None
    for name in ("cancel_requested", "pause_requested"):
        values[name] = bool(values[name])
    return Job(**values)


def as_event(row: sqlite3.Row) -> Event:
    return Event(row["seq"], row["created_at"], row["level"], row["type"], row["message"], json.loads(row["data"]))
