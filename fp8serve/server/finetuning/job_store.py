"""The tables that survive a restart: fine-tune jobs, their events, uploaded files, and which weights were activated.

Every method is one transaction and blocks until it is on the disk (`database.py`), so handlers call them in a thread. A
job moves only along `MOVES`. The UPDATE that would make a move also refuses one that is not listed there, so two
callers cannot both succeed.

Events are numbered by `seq`, rising over all jobs: the id of a server-sent event and the place where a reader
resumes. Those of a job's process come from its events.jsonl. A job's row says up to which byte they are stored, and the
transaction that stores further ones moves it.
"""

import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from fp8serve import logs
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.database import Database, Transaction
from fp8serve.server.finetuning.job_records import Event, Job, NewJob, Status, StoredFile, as_event, as_job

log = logging.getLogger("fp8serve.server")

FINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
MOVES: dict[str, tuple[Status, ...]] = {
    "running": ("queued",),
    "queued": ("running", "paused", "failed"),
    "paused": ("running", "queued"),
    "succeeded": ("running",),
    "failed": ("running", "queued"),
    "cancelled": ("running", "queued", "paused"),
}
"""State -> the states it may be entered from."""

IDEMPOTENCY_SECONDS = 24 * 3600
NOT_DATA = frozenset({"id", "created_at", "level", "type", "message", "path"})
"""Fields of a worker's event that have a column, or that hold paths on the server's disk, which no client is told."""


class JobStore:
    """See the module. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path)

    def close(self) -> None:
        self._database.close()

    def _write(self) -> Transaction:
        return self._database.transaction()

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self._database.rows(query, *values)

    def ids(self, table: Literal["jobs", "files"]) -> set[str]:
        """The ids of all rows."""
        return {row[0] for row in self._rows(f"SELECT id FROM {table}")}

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def create(
        self, new: NewJob, job_id: str, max_queued: int, key: str | None = None, request: str = ""
    ) -> tuple[Job, bool]:
        """Adds a queued job. With an idempotency `key` seen in the last day for the same `request`: the job it made,
        and False.

        Fault 409 for a key that came with another request, 429 when `max_queued` jobs wait already.
        """
        now = int(time.time())
        with self._write() as db:
            if key is not None and (earlier := _idempotent(db, key, request, now)) is not None:
                return _job(db, earlier), False
            if db.execute("SELECT count(*) FROM jobs WHERE status = 'queued'").fetchone()[0] >= max_queued:
                raise Fault(Code.QUEUE_FULL, f"{max_queued} fine-tune jobs are waiting already.", retry_after=60)
            _insert_job(db, new, job_id, now)
            _insert_event(db, job_id, "info", "message", "The job is queued.", {"code": "queued"})
            if key is not None:
                db.execute("INSERT OR REPLACE INTO idempotency VALUES (?, ?, ?, ?)", (key, now, request, job_id))
            return _job(db, job_id), True

    def get(self, job_id: str) -> Job:
        """Fault 404 when there is no such job."""
        rows = self._rows("SELECT * FROM jobs WHERE id = ?", job_id)
        if not rows:
            raise Fault(Code.JOB_NOT_FOUND, "There is no fine-tune job of that id.", param="id")
        return as_job(rows[0])

    def jobs(self, limit: int = 20, after: str | None = None, status: str | None = None) -> list[Job]:
        """Newest first; `after` is the id of the last job already seen."""
        bound = 2**62 if after is None else self.get(after).number
        state = "%" if status is None else status
        rows = self._rows(
            "SELECT * FROM jobs WHERE number < ? AND status LIKE ? ORDER BY number DESC LIMIT ?", bound, state, limit
        )
        return [as_job(row) for row in rows]

    def unfinished(self) -> list[Job]:
        """Jobs to run or to continue: first those that have already run, then the others in the order they came."""
        rows = self._rows(
            "SELECT * FROM jobs WHERE status IN ('queued', 'running') ORDER BY started_at IS NULL, number"
        )
        return [as_job(row) for row in rows]

    def ended(self) -> list[Job]:
        """Jobs that have ended, the last first."""
        marks = ",".join("?" * len(FINAL))
        rows = self._rows(
            f"SELECT * FROM jobs WHERE status IN ({marks}) ORDER BY finished_at DESC, number DESC", *sorted(FINAL)
        )
        return [as_job(row) for row in rows]

    def delete_job(self, job_id: str) -> None:
        """Forgets a job and its events. Fault 404, and 409 unless it has ended and nothing needs it any more."""
        job = self.get(job_id)
        with self._write() as db:
            if (needed := _needed(db, job)) is not None:
                raise Fault(Code.JOB_STATE, needed)
            for table, column in (("events", "job"), ("idempotency", "job"), ("jobs", "id")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (job_id,))
        log.info("job %s was deleted", job_id, extra=logs.fields(job_id=job_id, state="deleted"))

    def counts(self) -> dict[str, int]:
        """Jobs in each state, all states named."""
        rows = self._rows("SELECT status, count(*) FROM jobs GROUP BY status")
        return dict.fromkeys(MOVES, 0) | {row[0]: row[1] for row in rows}

    def move(
        self,
        job_id: str,
        to: Status,
        message: str,
        *,
        level: str = "info",
        code: str | None = None,
        error: str | None = None,
        only_from: Status | None = None,
    ) -> bool:
        """Puts the job into state `to` and says so in an event. If its state does not lead there, or is not
        `only_from`, nothing happens and the answer is False.
        """
        sources = MOVES[to] if only_from is None else (only_from,)
        if not self._moved(job_id, to, sources, message, level, code or to, error):
            return False
        text = message if error is None else f"{message} {error}"
        number = logging.ERROR if level == "error" else logging.INFO
        log.log(number, "job %s: %s", job_id, text, extra=logs.fields(job_id=job_id, state=to, code=code or to))
        return True

    def _moved(
        self,
        job_id: str,
        to: Status,
        sources: tuple[Status, ...],
        message: str,
        level: str,
        code: str,
        error: str | None,
    ) -> bool:
        """One transaction: the row, and an event."""
        now = int(time.time())
        with self._write() as db:
            marks = ",".join("?" * len(sources))
            done = db.execute(
                f"UPDATE jobs SET status = ? WHERE id = ? AND status IN ({marks})", (to, job_id, *sources)
            )
            if done.rowcount == 0:
                return False
            if to == "running":
                db.execute("UPDATE jobs SET started_at = coalesce(started_at, ?) WHERE id = ?", (now, job_id))
            if to == "queued":
                db.execute("UPDATE jobs SET finished_at = NULL, error = NULL, crashes = 0 WHERE id = ?", (job_id,))
            if to in FINAL:
                failure = json.dumps({"code": code, "message": error, "param": None}) if error else None
                db.execute("UPDATE jobs SET finished_at = ?, error = ? WHERE id = ?", (now, failure, job_id))
            if to != "running":
                db.execute("UPDATE jobs SET pause_requested = 0 WHERE id = ?", (job_id,))
            if to == "failed":  # a job that is resumed must not be cancelled by an earlier request
                db.execute("UPDATE jobs SET cancel_requested = 0 WHERE id = ?", (job_id,))
            _insert_event(db, job_id, level, "message", message, {"code": code})
        return True

    def request_cancel(self, job_id: str) -> Job:
        """Asks a job to end; one that does not run is cancelled at once. Fault 409 when it has ended already."""
        job = self._not_ended(job_id)
        with self._write() as db:
            still = "status IN ('queued', 'running', 'paused')"
            db.execute(f"UPDATE jobs SET cancel_requested = 1 WHERE id = ? AND {still}", (job_id,))
        if job.status != "running":
            where = "before it ran" if job.started_at is None else "while it did not run"
            self.move(job_id, "cancelled", f"The job was cancelled {where}.")
        return self.get(job_id)

    def request_pause(self, job_id: str) -> Job:
        """Asks a job to stop at a checkpoint and wait; one that is queued waits at once. Fault 409 when it has ended
        already, or is to end.
        """
        if self._not_ended(job_id).cancel_requested:
            raise Fault(Code.JOB_STATE, "The job is being cancelled.")
        with self._write() as db:  # a queued job may start meanwhile; then it must stop
            still = "status IN ('queued', 'running')"
            db.execute(f"UPDATE jobs SET pause_requested = 1 WHERE id = ? AND {still}", (job_id,))
        self.move(job_id, "paused", "The job is paused.", only_from="queued")
        return self.get(job_id)

    def resume(self, job_id: str) -> Job:
        """Queues a job that failed or is paused; it continues from its last checkpoint. A job that was asked to pause
        but still runs just continues. Fault 409 for any other.
        """
        job = self.get(job_id)
        if job.status == "running" and job.pause_requested:
            with self._write() as db:
                db.execute("UPDATE jobs SET pause_requested = 0 WHERE id = ?", (job_id,))
            job = self.get(job_id)
            if job.status != "paused":
                return job
        message = "The job is queued again and goes on from its last checkpoint."
        if not (job.status in ("failed", "paused") and self.move(job_id, "queued", message, code="resumed")):
            what = f"Only a job that failed or is paused can be resumed; this one is {job.status}."
            raise Fault(Code.JOB_STATE, what)
        return self.get(job_id)

    def _not_ended(self, job_id: str) -> Job:
        job = self.get(job_id)
        if job.status in FINAL:
            raise Fault(Code.JOB_STATE, f"The job has ended already: it {_ENDED[job.status]}.")
        return job

    # -- events --------------------------------------------------------------------------------------------------------

    def add_crash(self, job_id: str, message: str) -> None:
        """Counts one more worker that died, since the job last made progress, and says so in an event."""
        with self._write() as db:
            db.execute("UPDATE jobs SET crashes = crashes + 1 WHERE id = ?", (job_id,))
            _insert_event(db, job_id, "warn", "message", message, {"code": "restarted"})

    def add_events(self, job: Job, events: Iterable[Mapping[str, Any]], offset: int) -> None:
        """Stores the events that lie between `job.events_offset` and `offset` of events.jsonl, and the newest metrics
        as the job's progress; nothing if that part has been stored meanwhile.
        """
        with self._write() as db:
            moved = "UPDATE jobs SET events_offset = ? WHERE id = ? AND events_offset = ?"
            if db.execute(moved, (offset, job.id, job.events_offset)).rowcount == 0:
                return
            for event in events:
                data = {k: v for k, v in event.items() if k not in NOT_DATA}
                _insert_event(
                    db, job.id, event["level"], event["type"], safe_text(event["message"]), data, event["created_at"]
                )
                if event["type"] == "metrics":
                    db.execute("UPDATE jobs SET progress = ?, crashes = 0 WHERE id = ?", (json.dumps(data), job.id))

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        """Oldest first, beginning after the event `after`."""
        return [
            as_event(r)
            for r in self._rows(
                "SELECT * FROM events WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?", job_id, after, limit
            )
        ]

    def newest_events(self, job_id: str, limit: int, before: int | None = None, kind: str = "%") -> list[Event]:
        """Newest first."""
        bound = 2**62 if before is None else before
        query = "SELECT * FROM events WHERE job = ? AND seq < ? AND type LIKE ? ORDER BY seq DESC LIMIT ?"
        return [as_event(r) for r in self._rows(query, job_id, bound, kind, limit)]

    # -- files ---------------------------------------------------------------------------------------------------------

    def add_file(self, file_id: str, filename: str, size: int, sha256: str, purpose: str) -> StoredFile:
        with self._write() as db:
            number = db.execute("SELECT coalesce(max(number), 0) + 1 FROM files").fetchone()[0]
            db.execute(
                "INSERT INTO files VALUES (?,?,?,?,?,?,?)",
                (file_id, number, int(time.time()), filename, size, sha256, purpose),
            )
        return self.file(file_id)

    def file(self, file_id: str) -> StoredFile:
        """Fault 404 when there is no such file."""
        rows = self._rows("SELECT * FROM files WHERE id = ?", file_id)
        if not rows:
            raise Fault(Code.FILE_NOT_FOUND, "There is no file of that id.", param="file_id")
        return StoredFile(**dict(rows[0]))

    def files(
        self, limit: int = 10000, after: str | None = None, purpose: str | None = None, oldest_first: bool = False
    ) -> list[StoredFile]:
        """Newest first unless told otherwise; `after` is the id of the last file already seen."""
        sign, order, start = (">", "ASC", 0) if oldest_first else ("<", "DESC", 2**62)
        bound = start if after is None else self.file(after).number
        query = f"SELECT * FROM files WHERE number {sign} ? AND purpose LIKE ? ORDER BY number {order} LIMIT ?"
        return [StoredFile(**dict(r)) for r in self._rows(query, bound, purpose or "%", limit)]

    def delete_file(self, file_id: str) -> None:
        """Forgets a file. Fault 404, and 409 while a job that has not ended needs it."""
        self.file(file_id)
        with self._write() as db:
            users = "status IN ('queued', 'running', 'paused') AND ? IN (training_file, validation_file)"
            if db.execute(f"SELECT count(*) FROM jobs WHERE {users}", (file_id,)).fetchone()[0]:
                raise Fault(Code.JOB_STATE, "A job that has not ended needs this file; cancel the job first.")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # -- activation ----------------------------------------------------------------------------------------------------

    def activated(self, base: str) -> str | None:
        """What was last activated in place of the model directory `base`: a job id, "base", or None."""
        rows = self._rows("SELECT source FROM activated WHERE base = ?", base)
        return str(rows[0][0]) if rows else None

    def set_activated(self, base: str, source: str) -> None:
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO activated VALUES (?, ?, ?)", (base, source, int(time.time())))

    def activated_adapters(self, model: str) -> list[str]:
        """The jobs, or checkpoints of jobs, whose adapters are loaded beside a model when it starts."""
        return [
            row[0] for row in self._rows("SELECT job FROM activated_adapters WHERE model = ? ORDER BY rowid", model)
        ]

    def add_activated_adapter(self, model: str, job: str) -> None:
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO activated_adapters VALUES (?, ?)", (model, job))

    def remove_activated_adapter(self, model: str, job: str) -> None:
        with self._write() as db:
            db.execute("DELETE FROM activated_adapters WHERE model = ? AND job = ?", (model, job))


_ENDED = {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}


def _needed(db: sqlite3.Connection, job: Job) -> str | None:
    """Why a job must not be deleted, as a sentence. A source is a job's id, perhaps followed by a checkpoint's step."""
    status = db.execute("SELECT status FROM jobs WHERE id = ?", (job.id,)).fetchone()[0]
    if status not in FINAL:
        return f"The job has not ended, it is {status}; cancel it first."
    below = f"{job.id}:%"
    served = "SELECT source FROM activated UNION SELECT job FROM activated_adapters"
    if db.execute(f"SELECT 1 FROM ({served}) WHERE source = ? OR source LIKE ?", (job.id, below)).fetchone():
        return "The job's result was activated and is served when the server starts again; activate another first."
    users = "id != ? AND (source = ? OR source LIKE ?)"
    rows = db.execute(f"SELECT * FROM jobs WHERE {users}", (job.id, job.id, below)).fetchall()
    if open_ones := [user.id for user in map(as_job, rows) if user.status not in (FINAL - {"failed"})]:
        return f"The job {open_ones[0]} began with this one's result and may go on; cancel or delete it first."
    return None


def _idempotent(db: sqlite3.Connection, key: str, request: str, now: int) -> str | None:
    db.execute("DELETE FROM idempotency WHERE created_at < ?", (now - IDEMPOTENCY_SECONDS,))
    row = db.execute("SELECT request, job FROM idempotency WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    if row["request"] != request:
        raise Fault(
            Code.IDEMPOTENCY_MISMATCH,
            "This Idempotency-Key was used for another request.",
            hint="Use a new key for a new job.",
        )
    return str(row["job"])


def _insert_job(db: sqlite3.Connection, new: NewJob, job_id: str, now: int) -> None:
    number = db.execute("SELECT coalesce(max(number), 0) + 1 FROM jobs").fetchone()[0]
    config, metadata = json.dumps(dict(new.config)), json.dumps(dict(new.metadata or {}))
    values = (
        job_id,
        number,
        now,
        new.base,
        new.source,
        new.suffix,
        config,
        new.training_file,
        new.validation_file,
        metadata,
    )
    columns = "id, number, created_at, base, source, suffix, config, training_file, validation_file, metadata"
    db.execute(f"INSERT INTO jobs ({columns}, status, progress) VALUES (?,?,?,?,?,?,?,?,?,?,'queued','{{}}')", values)


def _insert_event(
    db: sqlite3.Connection,
    job_id: str,
    level: str,
    kind: str,
    message: str,
    data: Mapping[str, Any],
    created_at: int | None = None,
) -> None:
    now = int(time.time()) if created_at is None else created_at
    values = (job_id, now, level, kind, message, json.dumps(dict(data)))
    db.execute("INSERT INTO events (job, created_at, level, type, message, data) VALUES (?,?,?,?,?,?)", values)


def _job(db: sqlite3.Connection, job_id: str) -> Job:
    return as_job(db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone())
