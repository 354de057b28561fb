"""The tables of the job database, in SQL that SQLite and PostgreSQL share, and the migrations of earlier versions.

    jobs, events, files, idempotency    fine-tune jobs, their events, uploads, keys of repeated requests
    activated, activated_adapters       the weights and adapters that each model serves after a start
    fronts                              the servers that use the database, and when the lease of each ends
    swaps, votes                        activations that all servers make together (fronts.py)
    api_keys, tenants                   API keys that servers of a PostgreSQL database accept, limits (stored_keys.py)

`jobs.owner` is the server that runs the job or is about to.
"""

from fp8serve.errors import MachineError

FRONTS = """
CREATE TABLE fronts (id TEXT PRIMARY KEY, models TEXT NOT NULL, expires_at DOUBLE PRECISION NOT NULL);
CREATE TABLE swaps (
    id TEXT PRIMARY KEY, model TEXT NOT NULL, source TEXT NOT NULL, max_ratio DOUBLE PRECISION NOT NULL,
    state TEXT NOT NULL, reason TEXT, expires_at DOUBLE PRECISION NOT NULL);
CREATE TABLE votes (
    swap TEXT NOT NULL REFERENCES swaps(id), front TEXT NOT NULL, state TEXT NOT NULL, PRIMARY KEY (swap, front));
"""
KEYS = """
CREATE TABLE api_keys (
    name TEXT PRIMARY KEY, tenant TEXT NOT NULL, scopes TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL, revoked_at INTEGER);
CREATE TABLE tenants (
    name TEXT PRIMARY KEY, requests_per_minute INTEGER, tokens_per_minute INTEGER, concurrent_requests INTEGER);
"""
SCHEMA_VERSION = 6
SCHEMA = f"""
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, number INTEGER UNIQUE, created_at INTEGER NOT NULL, started_at INTEGER, finished_at INTEGER,
    status TEXT NOT NULL, base TEXT NOT NULL, source TEXT NOT NULL, suffix TEXT NOT NULL, config TEXT NOT NULL,
    training_file TEXT, validation_file TEXT, metadata TEXT NOT NULL, progress TEXT NOT NULL, error TEXT,
    cancel_requested INTEGER NOT NULL DEFAULT 0, crashes INTEGER NOT NULL DEFAULT 0,
    pause_requested INTEGER NOT NULL DEFAULT 0, events_offset INTEGER NOT NULL DEFAULT 0, owner TEXT);
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
{FRONTS}{KEYS}"""
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
    4: f"ALTER TABLE jobs ADD COLUMN owner TEXT; {FRONTS}",
    5: KEYS,
}
"""Statements that migrate each earlier schema version to the next one. Version 2 stored adapters as a list in one
column of `activated`. Version 3 stored the number that the training process gave to each event, `origin`, instead of
the byte offset after the last stored event."""


def postgres_script(script: str) -> str:
    """Returns a script of SCHEMA, or of MIGRATIONS from version 5 on, for PostgreSQL. Its integers have 64 bits as
    SQLite's do, and `rowid`, which SQLite gives every table, is a column."""
    key = "PRIMARY KEY (model, job)"
    return (
        script.replace("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY")
        .replace(" INTEGER", " BIGINT")
        .replace(key, f"rowid BIGINT GENERATED BY DEFAULT AS IDENTITY, {key}")
    )


def newer_schema(name: str, version: int, option: str) -> MachineError:
    """Returns the error for a database that a newer version of fp8serve wrote."""
    return MachineError(
        f"The job database {name} has schema version {version}, but this fp8serve reads version "
        f"{SCHEMA_VERSION}; start the fp8serve version that wrote it, or choose another {option}."
    )
