"""Runs fine-tune jobs, one at a time, each in its own process: `python -m fp8serve.train.job_process JOB_DIR`.

What a job computes lies in its directory, which only its process writes: `events.jsonl`, checkpoints, `result.json`,
and `worker.lock`, held while the process lives. What clients see of a job, and request of it, lies in the job table,
which only the server writes. Between them is one number, in the job's row: how many bytes of `events.jsonl` the table
holds. So nothing is lost or stored twice whichever process dies.

A worker outlives a front that was killed: the next front finds the lock held and follows it instead of starting a
second one. A worker that dies without a word is started again and resumes from its last checkpoint; after MAX_CRASHES
deaths without a finished step the job fails. When the server stops, the job is asked to stop at a checkpoint and is
queued again.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from fp8serve.model.storage.files import make_private
from fp8serve.processes import describe_exit, module_command
from fp8serve.server.faults import safe_text
from fp8serve.server.finetuning.job_records import Job
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.train.config import TrainConfig
from fp8serve.train.events import EVENTS
from fp8serve.train.job_process import EXIT_FAILED, EXIT_LOCKED, EXIT_STOPPED, EXIT_USAGE, job_config

log = logging.getLogger("fp8serve.server")

POLL_SECONDS = 0.1
NICE = 10
EVENT = {"id", "created_at", "level", "type", "message"}
"""Fields that every event has."""


class TrainingProcess:
    """A job's process: one we started, or one that outlived an earlier front and is only followed."""

    def __init__(self, job_id: str, directory: Path, process: asyncio.subprocess.Process | None) -> None:
        self.job_id = job_id
        self.directory = directory
        self.code: int | None = None
        self._process = process

    @classmethod
    async def start(cls, job_id: str, directory: Path, command: Sequence[str]) -> "TrainingProcess":
        """Starts the process in its own session, so that a Ctrl-C meant for the server does not reach it."""
        if lock_is_held(directory / "worker.lock"):
            log.info("job %s is still running from before; following it", job_id)
            return cls(job_id, directory, None)
        with (directory / "worker.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(directory),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with contextlib.suppress(OSError):  # serving comes first where they share a CPU
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        return cls(job_id, directory, process)

    def ended(self) -> bool:
        if self._process is None:
            return not lock_is_held(self.directory / "worker.lock")
        self.code = self._process.returncode
        return self.code is not None

    async def stop(self, seconds: float) -> None:
        """Sends SIGTERM, on which the process writes a checkpoint; after `seconds`, SIGKILL, which loses the steps
        since the last checkpoint."""
        for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 10.0)):
            self._signal(number)
            if await self._gone(patience):
                return

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)
            elif (pid := lock_holder(self.directory / "worker.lock")) is not None:
                os.kill(pid, number)

    async def _gone(self, seconds: float) -> bool:
        for _ in range(max(1, int(seconds / POLL_SECONDS))):
            if self.ended():
                return True
            await asyncio.sleep(POLL_SECONDS)
        return self.ended()


def read_events(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The events in the whole lines behind `offset`, and the offset behind them. They are on the disk when this
    returns: the table must not outlive what it names.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            if whole:
                os.fsync(file.fileno())
    except FileNotFoundError:
        return [], offset
    events = [event for line in whole.splitlines() if (event := _event(path, line)) is not None]
    return events, offset + len(whole)


def _event(path: Path, line: bytes) -> dict[str, Any] | None:
    """None for a damaged line, without which the job can still be followed to its end."""
    try:
        event = json.loads(line)
        if isinstance(event, dict) and event.keys() >= EVENT:
            return event
    except (ValueError, RecursionError):
        pass
    log.warning("job %s wrote an event that cannot be read; it is left out", path.parent.name)
    return None


def lock_is_held(path: Path) -> bool:
    """Whether a live process holds the file lock."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def lock_holder(path: Path) -> int | None:
    """The process id that the holder wrote into its lock file, while it holds it."""
    if not lock_is_held(path):
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""


WORKER = module_command("fp8serve.train.job_process")
CANCEL_SECONDS = 60.0
ERROR_SECONDS = 5.0
MAX_CRASHES = 3


def worker_command(processes: int) -> tuple[str, ...]:
    """The command of a job's training process, which divides each step among at most `processes` processes: one for
    each microbatch is the limit."""
    return WORKER if processes == 1 else (*WORKER, "--procs", str(processes))


class JobRunner:
    """Takes jobs from the table and runs each to its end. `wait_idle` is awaited before a job starts.

    `command` starts a worker; the job's directory is appended to it.
    """

    def __init__(
        self, store: JobStore, data_dir: Path, wait_idle: Callable[[], Awaitable[None]], command: Sequence[str] = WORKER
    ) -> None:
        self.store = store
        self.command = tuple(command)
        self.root = data_dir / "jobs"
        make_private(self.root)
        self.busy = False
        self.closing = False
        self.closed = True
        self.changed = asyncio.Condition()
        self.after_each: Callable[[], None] = lambda: None  # called in a thread after each job
        self._wait_idle = wait_idle
        self._wake = asyncio.Event()
        self._worker: TrainingProcess | None = None
        self._task: asyncio.Task[None] | None = None

    def dir_of(self, job_id: str) -> Path:
        """The directory of a job; `job_id` is in the table."""
        return self.root / job_id

    def config_of(self, job_id: str) -> TrainConfig:
        """The configuration that its process was given. JobError if it cannot be read."""
        return job_config(self.dir_of(job_id))

    def result_dir(self, job: Job) -> Path:
        return self.dir_of(job.id) / "out" / "model"

    def discard(self, job_id: str) -> None:
        """Removes a directory made for a job that was not accepted."""
        shutil.rmtree(self.dir_of(job_id), ignore_errors=True)

    def look_again(self) -> None:
        """Look at the table now: a job was added, or was asked to end, pause or continue."""
        self._wake.set()

    def start(self) -> None:
        """Begins to take jobs."""
        self.closed = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self.closing:
            try:
                if waiting := await asyncio.to_thread(self.store.unfinished):
                    await self._run_one(waiting[0])
                    continue
                await self._wake.wait()
                self._wake.clear()
            except Exception:
                log.exception("jobs cannot be run now")
                await asyncio.sleep(ERROR_SECONDS)

    async def _run_one(self, job: Job) -> None:
        self.busy = True
        try:
            await self._wait_idle()
            await self._see_through(job)
            await asyncio.to_thread(self.after_each)
        finally:
            self.busy = False
            await self._notify()

    async def close(self, seconds: float) -> None:
        """Asks the running worker to stop at a checkpoint, and queues its job for the next server. Kills it after
        `seconds`.
        """
        self.closing = True
        self._wake.set()
        if self._worker is not None:
            await self._worker.stop(seconds)
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=1.0)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.closed = True

    # -- one job -------------------------------------------------------------------------------------------------------

    async def _see_through(self, job: Job) -> None:
        if job.status == "queued" and not await asyncio.to_thread(self._enter, job):
            return
        if self.closing or await asyncio.to_thread(self._paused_already, job):
            return
        self._worker = worker = await TrainingProcess.start(job.id, self.dir_of(job.id), self.command)
        await self._follow(worker)
        self._worker = None
        await asyncio.to_thread(self._settle, worker)
        await self._notify()

    def _enter(self, job: Job) -> bool:
        again = job.started_at is not None
        return self.store.move(
            job.id, "running", "The job goes on from its last checkpoint." if again else "The job is running."
        )

    def _paused_already(self, job: Job) -> bool:
        """Whether the job was asked to pause and has no process that would have to stop: then it is paused now."""
        is_pausing = self.store.get(job.id).pause_requested and not lock_is_held(self.dir_of(job.id) / "worker.lock")
        return is_pausing and self.store.move(job.id, "paused", "The job is paused.")

    async def _follow(self, worker: "TrainingProcess") -> None:
        """Until the worker has ended: write its events into the table, and pass requests to cancel or pause on to the
        worker."""
        while True:
            ended = worker.ended()
            job, is_new = await asyncio.to_thread(self._store_events, worker)
            if is_new:
                await self._notify()
            if ended:
                return
            if job.cancel_requested or job.pause_requested:
                await worker.stop(CANCEL_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()
            self._wake.clear()

    def _store_events(self, worker: "TrainingProcess") -> tuple[Job, bool]:
        """Stores what the worker has written since the last time; the job as it was before, and whether it has."""
        job = self.store.get(worker.job_id)
        events, offset = read_events(worker.directory / EVENTS, job.events_offset)
        if offset > job.events_offset:
            self.store.add_events(job, events, offset)
        return job, bool(events)

    def _settle(self, worker: "TrainingProcess") -> None:
        """Decides what the end of a worker means for its job."""
        if worker.code == EXIT_LOCKED:
            return  # a worker that an earlier front started holds the lock: the next turn looks for that one
        job = self.store.get(worker.job_id)
        if (worker.directory / "result.json").exists():
            self.store.move(job.id, "succeeded", "The job succeeded; its result can be activated.")
        elif job.cancel_requested:
            self.store.move(job.id, "cancelled", "The job was cancelled.")
        elif (reason := self._failure(worker)) is not None:
            self.store.move(
                job.id, "failed", "The job failed.", level="error", code="training_failed", error=safe_text(reason)
            )
        elif job.pause_requested:
            self.store.move(job.id, "paused", "The job is paused; it can go on from its last checkpoint.")
        elif self.closing or worker.code == EXIT_STOPPED:
            self.store.move(
                job.id, "queued", "The job stopped at a checkpoint and will go on from there.", code="stopped"
            )
        else:
            self._crashed(job, worker)

    def _failure(self, worker: "TrainingProcess") -> str | None:
        """The worker's own sentence if it gave up; None for one that was killed, also if an earlier one gave up."""
        last = self.store.newest_events(worker.job_id, 1)[0]
        if last.data.get("code") == "error" and worker.code in (None, EXIT_FAILED):
            return last.message
        if worker.code in (EXIT_FAILED, EXIT_USAGE):
            return last_line(worker.directory / "worker.log") or "The training process failed without saying why."
        return None

    def _crashed(self, job: Job, worker: "TrainingProcess") -> None:
        deaths = job.crashes + 1
        how = f"The training process died ({describe_exit(worker.code)})"
        if deaths < MAX_CRASHES:
            self.store.add_crash(job.id, f"{how}; it starts again from the last checkpoint.")
        else:
            reason = f"{how} {deaths} times without progress."
            self.store.move(job.id, "failed", "The job failed.", level="error", code="worker_died", error=reason)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
