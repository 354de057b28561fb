"""API keys in the database of several servers: created, revoked and limited by a command, accepted by all servers.

A row has the SHA-256 of a key, as the file of keys has (access/keys.py). The row of a revoked key stays, so its name is
not used again, and servers whose last key was revoked do not begin to accept requests without a key. A row with invalid
values, such as a scope of a later version, is no valid key; the log names it, and the other keys are read.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import astuple, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from fp8serve.errors import RequestError, one_line, shown
from fp8serve.server.access.keys import Caller, Key, Keys, TenantLimits, check_name, create_entry
from fp8serve.server.finetuning.database import Database

log = logging.getLogger("fp8serve.server")


def create_key(database: Database, name: str, tenant: str, scopes: Sequence[str], key: str) -> None:
    """Stores the hash of a key. Raises RequestError for invalid values, or if there was a key of this name."""
    entry = create_entry(name, tenant, scopes, key)
    values = name, entry.tenant, " ".join(entry.scopes), entry.sha256, int(time.time())
    with database.write() as db:
        if db.execute("SELECT 1 FROM api_keys WHERE name = ?", (name,)).fetchone() is not None:
            raise RequestError(f"The database has or had a key named {name}; choose another --name.")
        db.execute("INSERT INTO api_keys VALUES (?, ?, ?, ?, ?, NULL)", values)


def revoke_key(database: Database, name: str) -> None:
    """Makes a key invalid. Raises RequestError if there is none of this name."""
    valid = "name = ? AND revoked_at IS NULL"
    with database.write() as db:
        if db.execute(f"SELECT 1 FROM api_keys WHERE {valid}", (name,)).fetchone() is None:
            raise RequestError(f"The database has no valid key named {name!r}; fp8serve key list shows the names.")
        db.execute(f"UPDATE api_keys SET revoked_at = ? WHERE {valid}", (int(time.time()), name))


def set_limits(database: Database, tenant: str, limits: TenantLimits) -> None:
    """Replaces the limits of a tenant, which need not have a key yet. Raises RequestError for an invalid name."""
    check_name("tenant", tenant)
    try:
        with database.write() as db:
            db.execute("DELETE FROM tenants WHERE name = ?", (tenant,))
            db.execute("INSERT INTO tenants VALUES (?, ?, ?, ?)", (tenant, *astuple(limits)))
    except database.row_errors as error:
        raise RequestError(f"The limits cannot be stored ({one_line(error)}).") from None


def load_keys(database: Database) -> Keys | None:
    """Returns the valid keys, or None if the database never had one."""
    with database.read() as db:
        keys: list[Any] = db.execute("SELECT * FROM api_keys ORDER BY created_at, name").fetchall()
        tenants: list[Any] = db.execute("SELECT * FROM tenants").fetchall()
    limits = {row["name"]: {f.name: row[f.name] for f in fields(TenantLimits)} for row in tenants}
    digests = {}
    for row in keys:
        if row["revoked_at"] is not None:
            continue
        try:
            entry = Key(row["tenant"], tuple(row["scopes"].split()), row["sha256"])
            tenant_limits = TenantLimits(**limits.get(entry.tenant, {}))
        except RequestError as error:
            _log_invalid_key(row["name"], str(error))
        else:
            digests[bytes.fromhex(entry.sha256)] = Caller(row["name"], entry.tenant, entry.scopes, tenant_limits)
    return Keys(MappingProxyType(digests)) if keys else None


@cache  # servers read the keys every second, and the log names a row once
def _log_invalid_key(name: str, problem: str) -> None:
    log.error(
        "the key %s of the database, or a limit of its tenant, is invalid, and the key is refused: %s",
        shown(name),
        problem,
    )
