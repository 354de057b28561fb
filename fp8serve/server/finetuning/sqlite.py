"""The SQLite file of one server's jobs.

It has a write-ahead log and `synchronous=FULL`, so a commit that returned is on the disk. A write-ahead log needs
shared memory. Network file systems have none and would corrupt the file, so they are refused with MachineError.
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fp8serve.errors import MachineError, one_line
from fp8serve.server.faults import disk_fault
from fp8serve.server.finetuning.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION, newer_schema
from fp8serve.train.events import EVENTS

DISK_ERRORS = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}


class SqliteConnection(sqlite3.Connection):
    """A connection on which `begin` starts a write transaction. `now` is SQL for the seconds since 1970."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"
    row_errors = sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, OverflowError

    def begin(self) -> None:
        self.execute("BEGIN IMMEDIATE")

    def begin_read(self) -> None:
        self.execute("BEGIN")

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Raises Fault 507 for SQLite's errors about the disk. The transaction is then not committed."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in DISK_ERRORS:  # the higher bits are extended result codes
                raise disk_fault(str(error)) from None
            raise


def open_sqlite(path: Path) -> SqliteConnection:
    """Opens the database, creates its tables or migrates them. Raises MachineError if it cannot be used."""
    try:
        _make_private(path)
        db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, factory=SqliteConnection)
        db.row_factory = sqlite3.Row
        _prepare(db, path)
    except sqlite3.Error as error:
        raise MachineError(
            f"The job database {path} cannot be used (SQLite reports: {one_line(error)}); put the data directory "
            "on a local disk with --data-dir."
        ) from None
    except OSError as error:
        raise MachineError(
            f"The job database {path} cannot be written: {error.strerror}; choose another --data-dir."
        ) from None
    return db


def is_older(path: Path) -> bool:
    """Whether opening the database would migrate it. False if the file is no database, which opening it reports."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0]) < SCHEMA_VERSION
    return False


def _prepare(db: SqliteConnection, path: Path) -> None:
    if db.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
        raise sqlite3.OperationalError("this file system has no shared memory for a write-ahead log")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("PRAGMA foreign_keys=ON")
    jobs = path.parent / "jobs"
    db.create_function("bytes_through", 2, lambda job, last: _bytes_through(jobs / job / EVENTS, last))
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version < SCHEMA_VERSION:
        scripts = [SCHEMA] if version == 0 else [MIGRATIONS[number] for number in range(version, SCHEMA_VERSION)]
        db.executescript(f"BEGIN IMMEDIATE; {''.join(scripts)} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    elif version != SCHEMA_VERSION:
        db.close()
        raise newer_schema(str(path), version, "--data-dir")


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
