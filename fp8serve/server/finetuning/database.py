"""The database of jobs, events and files: its transactions, and a frozen record for each row.

SQLite and PostgreSQL (connections.py) run the same SQL on the same tables (schema.py).
"""

import contextlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8serve.server.finetuning.connections import PostgresConnection, SqliteConnection, open_sqlite

Connection = SqliteConnection | PostgresConnection


class Database:
    """One connection behind a lock, and its transactions. `front` identifies this process among the servers that use
    the database.

    `location` is the path of an SQLite file, which one server uses, or the URL of a PostgreSQL database, which several
    servers may share. Raises MachineError if it cannot be used. Transactions raise Fault 507 if the disk of the file is
    full or fails, and Fault 503 if PostgreSQL cannot be reached.
    """

    def __init__(self, location: Path | str) -> None:
        self.is_shared = isinstance(location, str)
        self.front = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._db: Connection = PostgresConnection(location) if isinstance(location, str) else open_sqlite(location)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @property
    def now(self) -> str:
        """SQL for the seconds since 1970, by the database's clock."""
        return self._db.now

    @property
    def row_errors(self) -> tuple[type[Exception], ...]:
        """The errors for a row whose values do not fit its table."""
        return self._db.row_errors

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """Runs a block as a write transaction, which commits at its end and rolls back if the block raises."""
        with self._transaction(self._db.begin) as db:
            yield db

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """Runs a block that only reads. It sees one state of the database, and others may write meanwhile."""
        with self._transaction(self._db.begin_read) as db:
            yield db

    @contextlib.contextmanager
    def _transaction(self, begin: Callable[[], None]) -> Iterator[Connection]:
        with self._lock, self._db.faults():
            try:
                begin()
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def rows(self, query: str, *values: Any) -> list[Any]:
        with self._lock, self._db.faults():
            return self._db.execute(query, values).fetchall()


# -- records -----------------------------------------------------------------------------------------------------------

_RESULT = re.compile(r"ft:(.+?):org-local:[^:]*:[^:]*(?::ckpt-step-\d+)?")  # `Job.model_id`, or a checkpoint's name
Status = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True)
class Job:
    """A row of the table of jobs.

    Times are seconds since 1970. `base` is the name of the model that the job trains, and `source` the key of its
    weights. `progress` holds the newest metrics. `events_offset` is the number of bytes of the job's events.jsonl whose
    events are stored. `owner` is the server that runs the job or is about to.
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
    owner: str | None

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


def as_job(row: Any) -> Job:
    values = dict(row)
    for name in ("config", "metadata", "progress"):
        values[name] = json.loads(values[name])
    values["error"] = json.loads(values["error"]) if values["error"] else None
    for name in ("cancel_requested", "pause_requested"):
        values[name] = bool(values[name])
    return Job(**values)


def as_event(row: Any) -> Event:
    return Event(row["seq"], row["created_at"], row["level"], row["type"], row["message"], json.loads(row["data"]))
