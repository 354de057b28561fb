"""The PostgreSQL database of the jobs of several servers.

A write transaction begins with an advisory lock, so write transactions run one after the other, as in SQLite, and the
same SQL is correct in both. PostgreSQL ends a transaction whose server has been silent for STALL_SECONDS, so a server
that is suspended does not hold up the others. A connection that was lost is opened again by the next call.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fp8serve.errors import MachineError, one_line
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION, newer_schema, postgres_script

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("fp8serve.server")
WRITE_LOCK = 0x6670_3873  # any number that other programs do not use for an advisory lock in this database
STALL_SECONDS = 30
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
        arguments: dict[str, Any] = {name: value for name, value in DEFAULT_PARAMETERS.items() if name not in named}
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
