"""The SQLite database of jobs, events and files: schema, migrations, transactions, and a frozen record for each row.

There is one connection behind a lock, with a write-ahead log and `synchronous=FULL`, so a commit that returned is on
the disk. A write-ahead log needs shared memory. Network file systems have none and would corrupt the file, so they are
refused with MachineError.
"""

import contextlib
import json
import os
import re
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8serve.errors import MachineError, one_line
from fp8serve.server.faults import disk_fault
from fp8serve.train.events import EVENTS

SCHEMA_VERSION = 4
SCHEMA = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, number INTEGER UNIQUE, created_at INTEGER NOT NULL, started_at INTEGER, finished_at INTEGER,
    status TEXT NOT NULL, base TEXT NOT NULL, source TEXT NOT NULL, suffix TEXT NOT NULL, config TEXT NOT NULL,
    training_file TEXT, validation_file TEXT, metadata TEXT NOT NULL, progress TEXT NOT NULL, error TEXT,
    cancel_requested INTEGER NOT NULL DEFAULT 0, crashes INTEGER NOT NULL DEFAULT 0,
    pause_requested INTEGER NOT NULL DEFAULT 0, events_offset INTEGER NOT NULL DEFAULT 0);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL REFERENCES jobs(id), created_at INTEGER NOT NULL,
    level TEXT NOT NULL, type TEXT NOT NULL, message TEXT NOT NULL, data TEXT NOT NULL);
CREATE INDEX events_of_job ON events (job, seq);
CREATE TABLE files (
    id TEXT PRIMARY KEY, number INTEGER UNIQUE, created_at INTEGER NOT NULL, filename TEXT NOT NULL,
    bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, purpose TEXT NOT NULL);
CREATE TABLE idempotency (key TEXT PRIMARY KEY, created_at INTEGER NOT NULL, request TEXT NOT NULL, job TEXT NOT NULL);
CREATE TABLE activated (base TEXT PRIMARY KEY, source TEXT NOT NULL, at INTEGER NOT NULL);
CREATE TABLE activated_adapters (model TEXT NOT NULL, job TEXT NOT NULL, PRIMARY KEY (model, job));
"""
MIGRATIONS = {
    1: "ALTER TABLE jobs ADD COLUMN pause_requested INTEGER NOT NULL DEFAULT 0;",
    2: """
CREATE TABLE activated_adapters (model TEXT NOT NULL, job TEXT NOT NULL, PRIMARY KEY (model, job));
INSERT INTO activated_adapters
    WITH RECURSIVE split(model, job, rest) AS (
        SELECT substr(base, length('adapters of ') + 1), '', source || ',' FROM activated
        WHERE base LIKE 'adapters of %'
        UNION ALL
        SELECT model, substr(rest, 1, instr(rest, ',') - 1), substr(rest, instr(rest, ',') + 1) FROM split
        WHERE rest != '')
    SELECT model, job FROM split WHERE job != '';
DELETE FROM activated WHERE base LIKE 'adapters of %';
""",
    3: """
ALTER TABLE jobs ADD COLUMN events_offset INTEGER NOT NULL DEFAULT 0;
UPDATE jobs SET events_offset = bytes_through(id, (SELECT max(origin) FROM events WHERE job = jobs.id));
CREATE TABLE events_4 (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL REFERENCES jobs(id), created_at INTEGER NOT NULL,
    level TEXT NOT NULL, type TEXT NOT NULL, message TEXT NOT NULL, data TEXT NOT NULL);
INSERT INTO events_4 SELECT seq, job, created_at, level, type, message, data FROM events;
DELETE FROM sqlite_sequence WHERE name = 'events_4';
INSERT INTO sqlite_sequence SELECT 'events_4', seq FROM sqlite_sequence WHERE name = 'events';
DROP TABLE events;
ALTER TABLE events_4 RENAME TO events;
CREATE INDEX events_of_job ON events (job, seq);
""",
}
"""Statements that migrate each earlier schema version to the next one. Version 2 stored adapters as a list in one
column of `activated`. Version 3 stored the number that the training process gave to each event, `origin`, instead of
the byte offset after the last stored event."""


class Database:
    """The connection to the database file, and its transactions. If the disk is full or fails, they raise Fault 507."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            _make_private(path)
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._prepare(path)
        except sqlite3.Error as error:
            raise MachineError(
                f"The job database {path} cannot be used (SQLite reports: {one_line(error)}); put the data directory "
                "on a local disk with --data-dir."
            ) from None
        except OSError as error:
            raise MachineError(
                f"The job database {path} cannot be written: {error.strerror}; choose another --data-dir."
            ) from None

    def _prepare(self, path: Path) -> None:
        if self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
            raise sqlite3.OperationalError("this file system has no shared memory for a write-ahead log")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA foreign_keys=ON")
        jobs = path.parent / "jobs"
        self._db.create_function("bytes_through", 2, lambda job, last: _bytes_through(jobs / job / EVENTS, last))
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version < SCHEMA_VERSION:
            scripts = [SCHEMA] if version == 0 else [MIGRATIONS[number] for number in range(version, SCHEMA_VERSION)]
            self._db.executescript(f"BEGIN IMMEDIATE; {''.join(scripts)} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            self._db.close()
            raise MachineError(
                f"The job database {path} has schema version {version}, but this fp8serve reads version "
                f"{SCHEMA_VERSION}; start the fp8serve version that wrote it, or choose another --data-dir."
            )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """Runs a block as a write transaction, which commits at its end and rolls back if the block raises."""
        with self._lock, _disk_faults():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock, _disk_faults():
            return self._db.execute(query, values).fetchall()


def _make_private(path: Path) -> None:
    """Creates the database file with mode 0600, which SQLite then gives to the log and shared memory beside it, too.

    Files that a killed server left behind may have another mode, and get this one.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for file in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
        with contextlib.suppress(FileNotFoundError):
            file.chmod(0o600)


def _bytes_through(path: Path, last_id: int | None) -> int:
    """Returns the offset after the event `last_id` in a job's events.jsonl. The migration of version 3 needs it."""
    offset = position = 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() and last_id is not None else []
    for line in lines:
        position += len(line)
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # skip damaged lines
            if json.loads(line)["id"] <= last_id:
                offset = position
    return offset


DISK_ERRORS = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}


@contextlib.contextmanager
def _disk_faults() -> Iterator[None]:
    """Raises Fault 507 for SQLite's errors about the disk. The transaction is then not committed."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in DISK_ERRORS:  # the higher bits are extended result codes
            raise disk_fault(str(error)) from None
        raise


# -- records -----------------------------------------------------------------------------------------------------------

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
