"""The SQLite database of jobs, events and files: its schema and transactions.

There is one connection behind a lock, with a write-ahead log and `synchronous=FULL`, so a commit that returned is on
the disk. A write-ahead log needs shared memory. Network file systems have none and would corrupt the file, so they are
refused with MachineError.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8serve.errors import MachineError, one_line
from fp8serve.server.faults import disk_fault

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
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:  # a new file
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
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
