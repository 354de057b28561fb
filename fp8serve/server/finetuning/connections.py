"""Connections to the job database: an SQLite file of one server, or a PostgreSQL database of several servers.

The SQLite file has a write-ahead log and `synchronous=FULL`, so a commit that returned is on the disk. A write-ahead
log needs shared memory. Network file systems have none and would corrupt the file, so they are refused with
MachineError.

In PostgreSQL, a write transaction begins with an advisory lock, so write transactions run one after the other, as in
SQLite, and the same SQL is correct in both. PostgreSQL ends a transaction whose server has been silent for
STALL_SECONDS, so a server that is suspended does not hold up the others. A connection that was lost is opened again by
the next call. The password in `PGPASSWORD` is removed from the environment, because child processes need no secret:
engines, parsers and trainers run code that came with a model.
"""

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fp8serve.errors import MachineError, one_line
from fp8serve.server.faults import Code, Fault, disk_fault
from fp8serve.server.finetuning.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION, newer_schema, postgres_script
from fp8serve.train.events import EVENTS

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("fp8serve.server")

# -- SQLite ------------------------------------------------------------------------------------------------------------

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


# -- PostgreSQL --------------------------------------------------------------------------------------------------------

WRITE_LOCK = 0x6670_3873  # any number that other programs do not use for an advisory lock in this database
STALL_SECONDS = 30
PASSWORD_VARIABLE = "PGPASSWORD"
DEFAULT_PARAMETERS = {
    "connect_timeout": 10, "keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}  # fmt: skip
"""libpq's parameters where the URL does not name them: a connection whose peer is gone fails after about 20 seconds, so
a new one is made before the lease ends."""


class PostgresConnection:
    """A connection with the interface of `SqliteConnection`. Rows are dictionaries. Raises MachineError if the database
    cannot be used."""

    now = "extract(epoch FROM clock_timestamp())::float8"
    _password: ClassVar[str | None] = None  # the last PGPASSWORD, for all connections of this process

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise MachineError(
                "A PostgreSQL database needs psycopg, which is not installed: pip install 'fp8serve[postgres]', or "
                "leave --database out."
            ) from None
        self._psycopg = psycopg
        self.row_errors = psycopg.IntegrityError, psycopg.DataError, psycopg.ProgrammingError
        self._url = url
        PostgresConnection._password = os.environ.pop(PASSWORD_VARIABLE, self._password)
        self._db: psycopg.Connection[dict[str, Any]] | None = None
        try:
            self._prepare()
        except psycopg.Error as error:  # the message of a bad URL may contain its password
            reason = "the URL is invalid" if isinstance(error, psycopg.ProgrammingError) and self._db is None else error
            raise MachineError(f"The job database cannot be used (PostgreSQL reports: {one_line(reason)}).") from None

    def _prepare(self) -> None:
        self.begin()
        self.execute("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
        row = self.execute("SELECT version FROM schema_version").fetchone()
        version = 0 if row is None else row["version"]
        if version > SCHEMA_VERSION:
            self.close()
            raise newer_schema("of --database", version, "--database")
        scripts = [SCHEMA] if version == 0 else [MIGRATIONS[number] for number in range(version, SCHEMA_VERSION)]
        for script in scripts:
            self.execute(postgres_script(script))
        if scripts:
            self.execute("DELETE FROM schema_version")
            self.execute("INSERT INTO schema_version VALUES (?)", (SCHEMA_VERSION,))
        self.execute("COMMIT")

    def execute(self, query: str, values: Sequence[Any] = ()) -> "psycopg.Cursor[dict[str, Any]]":
        connection = self._db if self._db is not None and not self._db.closed else self._connect()
        texts = [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]
        sql: Any = query.replace("?", "%s") if values else query
        return connection.execute(sql, texts or None)

    def _connect(self) -> "psycopg.Connection[dict[str, Any]]":
        from psycopg.rows import dict_row

        named = self._psycopg.conninfo.conninfo_to_dict(self._url)
        parameters = DEFAULT_PARAMETERS | ({} if self._password is None else {"password": self._password})
        arguments: dict[str, Any] = {name: value for name, value in parameters.items() if name not in named}
        # autocommit: transactions begin where `begin` is called; a pool of connections keeps no prepared statements
        self._db = db = self._psycopg.connect(
            self._url, autocommit=True, prepare_threshold=None, row_factory=dict_row, **arguments
        )
        db.execute(f"SET idle_in_transaction_session_timeout = '{STALL_SECONDS}s'")
        return db

    def begin(self) -> None:
        self.execute("BEGIN")
        self.execute(f"SELECT pg_advisory_xact_lock({WRITE_LOCK})")

    def begin_read(self) -> None:
        self.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    @property
    def in_transaction(self) -> bool:
        if self._db is None or self._db.closed:
            return False
        return self._db.info.transaction_status != self._psycopg.pq.TransactionStatus.IDLE

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Raises Fault 503 if the database cannot be reached, or refuses to write."""
        try:
            yield
        except (self._psycopg.OperationalError, self._psycopg.InterfaceError, self._psycopg.InternalError) as error:
            log.error("the job database cannot be used: %s", one_line(error))
            raise Fault(Code.STORAGE_UNAVAILABLE, "The job database cannot be used.", retry_after=5) from None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
