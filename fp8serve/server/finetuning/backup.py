"""Copies of the job database as a file of JSON lines, for backups and for the move from SQLite to PostgreSQL.

The first line is {"fp8serve_job_database": VERSION}, and each further line {"table": NAME, "row": {...}}. A backup is
one read transaction, so it is consistent, and servers may write meanwhile. The files of jobs are not part of it: copy
the data directory, or the bucket, after the database, so that every file of a row exists.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8serve.errors import MachineError, RequestError, one_line
from fp8serve.model.storage.files import atomic_file
from fp8serve.server.finetuning.database import Connection, Database
from fp8serve.server.finetuning.schema import SCHEMA_VERSION

VERSION = "fp8serve_job_database"
KEY_TABLES = ("api_keys", "tenants")
TABLES = ("jobs", "events", "files", "idempotency", "activated", "activated_adapters", *KEY_TABLES)
"""The tables of a backup. The others describe servers that run."""
MODEL_COLUMNS = {"activated": "base", "activated_adapters": "model"}
"""The column of each activation's model: NAME in PostgreSQL; in SQLite, NAME=DIRECTORY, or DIRECTORY for the default
model."""


def back_up(database: Database, path: Path) -> int:
    """Writes all rows to the file `path`, which only this user can read. Returns the number of jobs."""
    try:
        with database.read() as db, atomic_file(path) as temporary:
            temporary.touch(mode=0o600)
            with temporary.open("w", encoding="utf-8") as file:
                file.write(json.dumps({VERSION: SCHEMA_VERSION}) + "\n")
                for table in TABLES:
                    for row in db.execute(f"SELECT * FROM {table}"):
                        file.write(json.dumps({"table": table, "row": dict(row)}) + "\n")
            jobs: Any = db.execute("SELECT count(*) AS number FROM jobs").fetchone()
            return int(jobs["number"])
    except OSError as error:
        raise MachineError(f"The backup {path} cannot be written: {error.strerror}.") from None


def restore(database: Database, path: Path) -> int:
    """Adds the rows of a backup to a database without jobs and files, all or none. Returns the number of jobs.

    No server owns the jobs afterwards. SQLite stores activations by the directory of the model's base weights, and
    PostgreSQL by the model's name, for which the directory's name is taken. The other way, activations are left out,
    because a name has no directory, and keys, because a server with an SQLite file reads them from `--api-keys`.
    """
    with database.write() as db:
        for table in TABLES:
            if db.execute(f"SELECT 1 FROM {table}").fetchone() is not None:
                raise RequestError(f"The database has {table} already; restore a backup into an empty database.")
        columns = {table: _columns(db, table) for table in TABLES}
        number = 0
        for table, row in _rows(path):
            if table == "jobs":
                row["owner"] = None
                number += 1
            if row.keys() != columns[table]:
                raise RequestError(f"{path} has other columns of {table} than the database; it is damaged.")
            if table in KEY_TABLES and not database.is_shared:
                continue
            if column := MODEL_COLUMNS.get(table):
                name = _model_name(str(row[column]))
                if database.is_shared:
                    row[column] = name
                elif row[column] == name:
                    continue
            names, placeholders = ", ".join(row), ", ".join("?" * len(row))
            try:
                db.execute(f"INSERT INTO {table} ({names}) VALUES ({placeholders})", tuple(row.values()))
            except database.row_errors as error:
                raise RequestError(f"{path} has a row of {table} that does not fit ({one_line(error)}).") from None
        if database.is_shared:
            last = "max(seq)) FROM events HAVING count(*) > 0"
            db.execute(f"SELECT setval(pg_get_serial_sequence('events', 'seq'), {last}")
    return number


def _model_name(key: str) -> str:
    """Returns the model's name for a key of MODEL_COLUMNS."""
    return Path(key).name if key.startswith("/") else key.partition("=/")[0]


def _columns(db: Connection, table: str) -> set[str]:
    """Returns the names of the columns, except `rowid`, which orders rows in PostgreSQL."""
    return {column[0] for column in db.execute(f"SELECT * FROM {table}").description or ()} - {"rowid"}


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the table and the columns of each row. Raises RequestError if the file is no backup of this version."""
    try:
        with path.open(encoding="utf-8") as file:
            version = json.loads(next(file, "")).get(VERSION)
            if version != SCHEMA_VERSION:
                raise RequestError(
                    f"{path} has schema version {version}, but this fp8serve reads version {SCHEMA_VERSION}; restore "
                    "it with the fp8serve version that wrote it."
                )
            for line in file:
                entry = json.loads(line)
                row = {name: value for name, value in entry["row"].items() if name != "rowid"}
                if entry["table"] not in TABLES:
                    raise KeyError
                yield entry["table"], row
    except OSError as error:
        raise MachineError(f"The backup {path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(f"{path} is no backup of a job database, or is damaged.") from None
