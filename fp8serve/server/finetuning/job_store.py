"""Stores what survives a restart of the server: fine-tune jobs, their events, uploaded files, and activations.

Several servers may share a PostgreSQL database. Each job then has one owner: the server that claimed it, until the job
has another status than running or the owner's lease ends (fronts.py). A server that has lost its lease cannot write
about a job that another one has claimed, because the UPDATE statements check the owner, too.

Every method blocks until its transactions are on the disk (`database.py`), so handlers call it in a thread. A job
changes its status only along `TRANSITIONS`. The UPDATE statement itself checks the previous status, so of two
concurrent callers only one succeeds.

Every event has a number `seq`, which increases over all jobs. It is the id of the server-sent event, so a client that
reconnects resumes after the last number that it received. The events of a training process are read from its
events.jsonl. The transaction that stores them also updates the byte offset in the job's row.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fp8serve import logs
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.database import (
    Connection,
    Database,
    Event,
    Job,
    NewJob,
    Status,
    StoredFile,
    as_event,
    as_job,
)
from fp8serve.train.events import EVENT_FIELDS

log = logging.getLogger("fp8serve.server")

FINAL_STATUSES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
TRANSITIONS: dict[str, tuple[Status, ...]] = {
    "running": ("queued",),
    "queued": ("running", "paused", "failed"),
    "paused": ("running", "queued"),
    "succeeded": ("running",),
    "failed": ("running", "queued"),
    "cancelled": ("running", "queued", "paused"),
}
"""The statuses from which each status may be entered."""

IDEMPOTENCY_SECONDS = 24 * 3600  # how long an Idempotency-Key is remembered
NON_DATA_FIELDS = EVENT_FIELDS | {"path"}
"""Fields of a training process's event that have a column, or that contain a path on the server's disk, which clients
must not see."""


class JobStore(Database):
    """The methods on the database of jobs, events, files and activations. They may be called from several threads."""

    def ids(self, table: Literal["jobs", "files"]) -> set[str]:
        return {row["id"] for row in self.rows(f"SELECT id FROM {table}")}

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def create(
        self, new: NewJob, job_id: str, max_queued: int, key: str | None = None, request: str = ""
    ) -> tuple[Job, bool]:
        """Adds a queued job and returns it with True.

        If the idempotency `key` was used for the same `request` within IDEMPOTENCY_SECONDS, that job and False are
        returned. Raises Fault 409 if the key was used for another request, and 429 if `max_queued` jobs are queued.
        """
        now = int(time.time())
        with self.write() as db:
            if key is not None and (existing := _find_idempotent_job(db, key, request, now)) is not None:
                return _job(db, existing), False
            if _first(db, "SELECT count(*) AS first FROM jobs WHERE status = 'queued'") >= max_queued:
                message = f"{max_queued} fine-tune jobs are queued, which is this server's limit."
                raise Fault(Code.QUEUE_FULL, message, retry_after=60)
            number = _first(db, "SELECT coalesce(max(number), 0) + 1 AS first FROM jobs")
            row = vars(new) | {
                "id": job_id, "number": number, "created_at": now, "status": "queued", "progress": "{}",
                "config": json.dumps(dict(new.config)), "metadata": json.dumps(dict(new.metadata or {})),
            }  # fmt: skip
            columns, placeholders = ", ".join(row), ", ".join("?" * len(row))
            db.execute(f"INSERT INTO jobs ({columns}) VALUES ({placeholders})", tuple(row.values()))
            _insert_event(db, job_id, "info", "message", "The job is queued.", {"code": "queued"})
            if key is not None:
                db.execute("INSERT INTO idempotency VALUES (?, ?, ?, ?)", (key, now, request, job_id))
            return _job(db, job_id), True

    def get(self, job_id: str) -> Job:
        """Returns a job. Raises Fault 404 if there is none with this id."""
        rows = self.rows("SELECT * FROM jobs WHERE id = ?", job_id)
        if not rows:
            raise Fault(Code.JOB_NOT_FOUND, "There is no fine-tune job with that id.", param="id")
        return as_job(rows[0])

    def jobs(self, limit: int = 20, after: str | None = None, status: str | None = None) -> list[Job]:
        """Returns jobs, newest first. `after` is the id of the last job on the previous page."""
        bound = 2**62 if after is None else self.get(after).number
        pattern = "%" if status is None else status
        rows = self.rows(
            "SELECT * FROM jobs WHERE number < ? AND status LIKE ? ORDER BY number DESC LIMIT ?", bound, pattern, limit
        )
        return [as_job(row) for row in rows]

    def unfinished_jobs(self) -> list[Job]:
        """Returns the queued and running jobs that this server may run, because no other server with a lease owns them:
        first those that have run before, then the others in order of arrival."""
        query = f"SELECT * FROM jobs WHERE {self._is_free} ORDER BY started_at IS NULL, number"
        return [as_job(row) for row in self.rows(query)]

    def claim(self, job_id: str) -> Job | None:
        """Makes this server the owner of a job that it may run, and returns the job as it was before. Returns None if
        another server was faster."""
        with self.write() as db:
            row: Any = db.execute(f"SELECT * FROM jobs WHERE id = ? AND {self._is_free}", (job_id,)).fetchone()
            if row is not None:
                db.execute("UPDATE jobs SET owner = ? WHERE id = ?", (self.front, job_id))
        return None if row is None else as_job(row)

    def owns(self, job_id: str) -> bool:
        """Whether this server owns the job."""
        return bool(self.rows("SELECT 1 FROM jobs WHERE id = ? AND owner = ?", job_id, self.front))

    @property
    def _is_free(self) -> str:
        """SQL for a job that this server may run. A server that shares the database needs a lease."""
        live = f"SELECT id FROM fronts WHERE expires_at > {self.now}"
        is_unowned = f"owner IS NULL OR owner = '{self.front}' OR owner NOT IN ({live})"
        may_own = f"'{self.front}' IN ({live})" if self.is_shared else "1 = 1"
        return f"status IN ('queued', 'running') AND ({is_unowned}) AND {may_own}"

    def ended_jobs(self) -> list[Job]:
        """Returns the jobs that have ended, the most recently ended one first."""
        placeholders = ",".join("?" * len(FINAL_STATUSES))
        query = f"SELECT * FROM jobs WHERE status IN ({placeholders}) ORDER BY finished_at DESC, number DESC"
        rows = self.rows(query, *sorted(FINAL_STATUSES))
        return [as_job(row) for row in rows]

    def delete_job(self, job_id: str) -> None:
        """Deletes a job and its events. Raises Fault 404 for an unknown job, and 409 if it runs or is needed."""
        job = self.get(job_id)
        with self.write() as db:
            if (reason := _reason_to_keep(db, job)) is not None:
                raise Fault(Code.JOB_STATE, reason)
            for table, column in (("events", "job"), ("idempotency", "job"), ("jobs", "id")):
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (job_id,))
        log.info("job %s was deleted", job_id, extra=logs.fields(job_id=job_id, state="deleted"))

    def counts(self) -> dict[str, int]:
        """Returns the number of jobs with each status, including statuses without jobs."""
        rows = self.rows("SELECT status, count(*) AS number FROM jobs GROUP BY status")
        return dict.fromkeys(TRANSITIONS, 0) | {row["status"]: row["number"] for row in rows}

    def set_status(
        self,
        job_id: str,
        status: Status,
        message: str,
        *,
        level: str = "info",
        code: str | None = None,
        error: str | None = None,
        only_from: Status | None = None,
    ) -> bool:
        """Sets the status of a job and adds an event with `message`; returns True.

        Returns False and changes nothing if the job's status does not allow the transition or is not `only_from`, or if
        another server owns the job and it runs or is to run.
        """
        allowed, code = TRANSITIONS[status] if only_from is None else (only_from,), code or status
        now = int(time.time())
        with self.write() as db:
            placeholders = ",".join("?" * len(allowed))
            is_own = f"(owner IS NULL OR owner = ? OR 'running' NOT IN (status, '{status}'))"
            query = f"UPDATE jobs SET status = ? WHERE id = ? AND status IN ({placeholders}) AND {is_own}"
            if db.execute(query, (status, job_id, *allowed, self.front)).rowcount == 0:
                return False
            if status == "running":
                values = self.front, now, job_id
                db.execute("UPDATE jobs SET owner = ?, started_at = coalesce(started_at, ?) WHERE id = ?", values)
            if status == "queued":
                db.execute("UPDATE jobs SET finished_at = NULL, error = NULL, crashes = 0 WHERE id = ?", (job_id,))
            if status in FINAL_STATUSES:
                failure = json.dumps({"code": code, "message": error, "param": None}) if error else None
                db.execute("UPDATE jobs SET finished_at = ?, error = ? WHERE id = ?", (now, failure, job_id))
            if status != "running":
                db.execute("UPDATE jobs SET pause_requested = 0, owner = NULL WHERE id = ?", (job_id,))
            if status == "failed":  # an earlier request to cancel must not apply when the job is resumed
                db.execute("UPDATE jobs SET cancel_requested = 0 WHERE id = ?", (job_id,))
            _insert_event(db, job_id, level, "message", message, {"code": code})
        text = message if error is None else f"{message} {error}"
        log_level = logging.ERROR if level == "error" else logging.INFO
        log.log(log_level, "job %s: %s", job_id, text, extra=logs.fields(job_id=job_id, state=status, code=code))
        return True

    def request_cancel(self, job_id: str) -> Job:
        """Requests that a running job is cancelled; cancels any other job at once. Raises Fault 409 if it has ended."""
        job = self._get_unended(job_id)
        with self.write() as db:
            is_unended = "status IN ('queued', 'running', 'paused')"
            db.execute(f"UPDATE jobs SET cancel_requested = 1 WHERE id = ? AND {is_unended}", (job_id,))
        if job.status != "running":
            clause = "before it started" if job.started_at is None else "while it was not running"
            message = f"The job was cancelled {clause}."  # if it has started meanwhile, its runner cancels it
            self.set_status(job_id, "cancelled", message, only_from=job.status)
        return self.get(job_id)

    def request_pause(self, job_id: str) -> Job:
        """Requests that a running job pauses at a checkpoint; pauses a queued job at once.

        Raises Fault 409 if the job has ended or is being cancelled.
        """
        if self._get_unended(job_id).cancel_requested:
            raise Fault(Code.JOB_STATE, "The job is being cancelled.")
        with self.write() as db:  # also for a queued job, which may start meanwhile
            is_active = "status IN ('queued', 'running')"
            db.execute(f"UPDATE jobs SET pause_requested = 1 WHERE id = ? AND {is_active}", (job_id,))
        self.set_status(job_id, "paused", "The job is paused.", only_from="queued")
        return self.get(job_id)

    def resume(self, job_id: str) -> Job:
        """Queues a failed or paused job, which continues from its last checkpoint.

        If the job was asked to pause but still runs, the request to pause is withdrawn. Raises Fault 409 for jobs in
        other states.
        """
        job = self.get(job_id)
        if job.status == "running" and job.pause_requested:
            with self.write() as db:
                db.execute("UPDATE jobs SET pause_requested = 0 WHERE id = ?", (job_id,))
            job = self.get(job_id)
            if job.status != "paused":
                return job
        message = "The job is queued again and will continue from its last checkpoint."
        if not (job.status in ("failed", "paused") and self.set_status(job_id, "queued", message, code="resumed")):
            message = f"Only failed or paused jobs can be resumed, but this job is {job.status}."
            raise Fault(Code.JOB_STATE, message)
        return self.get(job_id)

    def _get_unended(self, job_id: str) -> Job:
        """Returns a job. Raises Fault 409 if it has ended."""
        job = self.get(job_id)
        if job.status in FINAL_STATUSES:
            raise Fault(Code.JOB_STATE, f"The job has already ended: it {_PAST_TENSES[job.status]}.")
        return job

    # -- events --------------------------------------------------------------------------------------------------------

    def add_message(self, job_id: str, message: str, code: str) -> None:
        """Adds an event of the server about the job."""
        with self.write() as db:
            _insert_event(db, job_id, "info", "message", message, {"code": code})

    def add_crash(self, job_id: str, message: str) -> None:
        """Counts a crash of the job's training process and adds an event. Metrics of the job reset the count."""
        with self.write() as db:
            db.execute("UPDATE jobs SET crashes = crashes + 1 WHERE id = ?", (job_id,))
            _insert_event(db, job_id, "warn", "message", message, {"code": "restarted"})

    def add_events(self, job: Job, events: Iterable[Mapping[str, Any]], offset: int) -> None:
        """Stores the events between `job.events_offset` and `offset` of events.jsonl, and the newest metrics as the
        job's progress. Does nothing if another caller has stored them meanwhile, or another server owns the job.
        """
        with self.write() as db:
            is_own = "(owner IS NULL OR owner = ?)"
            update = f"UPDATE jobs SET events_offset = ? WHERE id = ? AND events_offset = ? AND {is_own}"
            if db.execute(update, (offset, job.id, job.events_offset, self.front)).rowcount == 0:
                return
            for event in events:
                data = {k: v for k, v in event.items() if k not in NON_DATA_FIELDS}
                message, created_at = safe_text(event["message"]), event["created_at"]
                _insert_event(db, job.id, event["level"], event["type"], message, data, created_at)
                if event["type"] == "metrics":
                    db.execute("UPDATE jobs SET progress = ?, crashes = 0 WHERE id = ?", (json.dumps(data), job.id))

    def set_events_offset(self, job_id: str, offset: int) -> None:
        """Sets the number of bytes of events.jsonl whose events are stored, after this server wrote the file anew."""
        with self.write() as db:
            db.execute("UPDATE jobs SET events_offset = ? WHERE id = ? AND owner = ?", (offset, job_id, self.front))

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        """Returns a job's events after the event number `after`, oldest first."""
        query = "SELECT * FROM events WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?"
        return [as_event(row) for row in self.rows(query, job_id, after, limit)]

    def newest_events(self, job_id: str, limit: int, before: int | None = None, kind: str = "%") -> list[Event]:
        """Returns a job's events before the event number `before`, newest first. `kind` is a type or "%" for all."""
        bound = 2**62 if before is None else before
        query = "SELECT * FROM events WHERE job = ? AND seq < ? AND type LIKE ? ORDER BY seq DESC LIMIT ?"
        return [as_event(r) for r in self.rows(query, job_id, bound, kind, limit)]

    # -- files ---------------------------------------------------------------------------------------------------------

    def add_file(self, file_id: str, filename: str, size: int, sha256: str, purpose: str) -> StoredFile:
        with self.write() as db:
            number = _first(db, "SELECT coalesce(max(number), 0) + 1 AS first FROM files")
            db.execute(
                "INSERT INTO files VALUES (?,?,?,?,?,?,?)",
                (file_id, number, int(time.time()), filename, size, sha256, purpose),
            )
        return self.file(file_id)

    def file(self, file_id: str) -> StoredFile:
        """Returns an uploaded file. Raises Fault 404 if there is none with this id."""
        rows = self.rows("SELECT * FROM files WHERE id = ?", file_id)
        if not rows:
            raise Fault(Code.FILE_NOT_FOUND, "There is no file with that id.", param="file_id")
        return StoredFile(**dict(rows[0]))

    def files(
        self, limit: int = 10000, after: str | None = None, purpose: str | None = None, oldest_first: bool = False
    ) -> list[StoredFile]:
        """Returns uploaded files, newest first by default. `after` is the id of the last file on the previous page."""
        sign, order, start = (">", "ASC", 0) if oldest_first else ("<", "DESC", 2**62)
        bound = start if after is None else self.file(after).number
        query = f"SELECT * FROM files WHERE number {sign} ? AND purpose LIKE ? ORDER BY number {order} LIMIT ?"
        return [StoredFile(**dict(r)) for r in self.rows(query, bound, purpose or "%", limit)]

    def delete_file(self, file_id: str) -> None:
        """Deletes a file. Raises Fault 404 for an unknown file, and 409 while a job that has not ended needs it."""
        self.file(file_id)
        with self.write() as db:
            condition = "status IN ('queued', 'running', 'paused') AND ? IN (training_file, validation_file)"
            if _first(db, f"SELECT count(*) AS first FROM jobs WHERE {condition}", file_id):
                raise Fault(Code.JOB_STATE, "A job that has not ended needs this file; cancel the job first.")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # -- activation ----------------------------------------------------------------------------------------------------

    def activated(self, base: str) -> str | None:
        """Returns the key of the weights last activated for the model `base`: a job's or checkpoint's key, "base", or
        None."""
        rows = self.rows("SELECT source FROM activated WHERE base = ?", base)
        return str(rows[0]["source"]) if rows else None

    def set_activated(self, base: str, source: str) -> None:
        with self.write() as db:
            activate(db, base, source)

    def activated_adapters(self, model: str) -> list[str]:
        """Returns the keys of the jobs and checkpoints whose adapters are loaded when the model starts."""
        rows = self.rows("SELECT job FROM activated_adapters WHERE model = ? ORDER BY rowid", model)
        return [row["job"] for row in rows]

    def add_activated_adapter(self, model: str, job: str) -> None:
        with self.write() as db:
            db.execute("INSERT INTO activated_adapters (model, job) VALUES (?, ?) ON CONFLICT DO NOTHING", (model, job))

    def remove_activated_adapter(self, model: str, job: str) -> None:
        with self.write() as db:
            db.execute("DELETE FROM activated_adapters WHERE model = ? AND job = ?", (model, job))


def activate(db: Connection, base: str, source: str) -> None:
    """Stores in a transaction that the model `base` serves the weights with the key `source`."""
    update = "ON CONFLICT (base) DO UPDATE SET source = excluded.source, at = excluded.at"
    db.execute(f"INSERT INTO activated VALUES (?, ?, ?) {update}", (base, source, int(time.time())))


_PAST_TENSES = {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}


def _reason_to_keep(db: Connection, job: Job) -> str | None:
    """Returns why a job must not be deleted, as a sentence, or None if it may be.

    The key of a source is a job's id, or a job's id with a checkpoint's step.
    """
    status = _first(db, "SELECT status AS first FROM jobs WHERE id = ?", job.id)
    if status not in FINAL_STATUSES:
        return f"The job is {status}; cancel it first."
    checkpoint_keys = f"{job.id}:%"
    activated = "SELECT source FROM activated UNION SELECT job FROM activated_adapters"
    loading = f"SELECT source FROM swaps WHERE state = 'loading' AND expires_at > {db.now}"
    is_of_job, keys = "source = ? OR source LIKE ?", (job.id, checkpoint_keys)
    if db.execute(f"SELECT 1 FROM ({activated}) AS activated WHERE {is_of_job}", keys).fetchone():
        return "The job's result is activated and will be served at the server's next start; activate another first."
    if db.execute(f"SELECT 1 FROM ({loading}) AS loading WHERE {is_of_job}", keys).fetchone():
        return "The job's result is being activated."
    condition = "id != ? AND (source = ? OR source LIKE ?)"
    rows = db.execute(f"SELECT * FROM jobs WHERE {condition}", (job.id, job.id, checkpoint_keys)).fetchall()
    if unended := [user.id for user in map(as_job, rows) if user.status not in (FINAL_STATUSES - {"failed"})]:
        return f"The job {unended[0]} started from this job's result and may continue; cancel or delete it first."
    return None


def _find_idempotent_job(db: Connection, key: str, request: str, now: int) -> str | None:
    db.execute("DELETE FROM idempotency WHERE created_at < ?", (now - IDEMPOTENCY_SECONDS,))
    row = db.execute("SELECT request, job FROM idempotency WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    if row["request"] != request:
        message = "This Idempotency-Key was used for another request."
        raise Fault(Code.IDEMPOTENCY_MISMATCH, message, hint="Use a new key for a new job.")
    return str(row["job"])


def _insert_event(
    db: Connection,
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


def _first(db: Connection, query: str, *values: Any) -> Any:
    """Returns the column `first` of the query's only row."""
    row: Any = db.execute(query, values).fetchone()
    return row["first"]


def _job(db: Connection, job_id: str) -> Job:
    return as_job(db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone())
