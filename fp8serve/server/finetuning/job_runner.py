"""Runs fine-tune jobs, one at a time, each in its own process: `python -m fp8serve.train.job_process JOB_DIR`.

Only the training process writes the job's directory: `events.jsonl`, checkpoints, `result.json`, and `worker.lock`,
which it holds while it runs. Only the server writes the job database, which clients read and change through its routes.
The job's row stores how many bytes of `events.jsonl` are in the database. So no event is lost or stored twice,
whichever process dies.

If the server is killed, the training process continues. The next server finds the lock held and follows that process
instead of starting another one. A training process that dies without an error event is started again and resumes from
its last checkpoint; after MAX_CRASHES deaths without progress the job fails. When the server stops, the training
process is asked to stop at a checkpoint, and the job is queued again.

Servers that share a PostgreSQL database share its queue. A server claims a job whose files it can read, and owns it
until the job stops running or the server's lease ends (fronts.py). If the lease ends, another server claims the job; it
follows the training process if it still runs and the data directory is shared, or else starts a new one.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from fp8serve.model.storage.files import atomic_file
from fp8serve.processes import describe_exit, environment_without_group, module_command, pid_namespace
from fp8serve.server.faults import safe_text
from fp8serve.server.finetuning.artifacts import Artifacts, Bucket
from fp8serve.server.finetuning.database import Job
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.train.events import EVENTS, read_events
from fp8serve.train.job_process import EXIT_FAILED, EXIT_LOCKED, EXIT_STOPPED, EXIT_USAGE, STOP

log = logging.getLogger("fp8serve.server")

POLL_SECONDS = 0.1
NICENESS = 10


class TrainingProcess:
    """A job's training process. `process` is None if an earlier server started it; then only its lock is watched."""

    def __init__(self, job_id: str, directory: Path, process: asyncio.subprocess.Process | None) -> None:
        self.job_id = job_id
        self.directory = directory
        self.exit_code: int | None = None
        self._process = process

    @classmethod
    async def start(cls, job_id: str, directory: Path, command: Sequence[str]) -> "TrainingProcess":
        """Starts the process, unless one that an earlier server started still runs.

        The process has its own session, so that a Ctrl-C meant for the server does not reach it.
        """
        if is_lock_held(directory / "worker.lock"):
            log.info("the training process of job %s still runs since an earlier server; following it", job_id)
            return cls(job_id, directory, None)
        with (directory / "worker.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(directory),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment_without_group(),  # torchrun may have started this server
            )
        with contextlib.suppress(OSError):  # serving has priority on a shared CPU
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        return cls(job_id, directory, process)

    def has_ended(self) -> bool:
        if self._process is None:
            return not is_lock_held(self.directory / "worker.lock")
        self.exit_code = self._process.returncode
        return self.exit_code is not None

    async def stop(self, seconds: float) -> None:
        """Sends SIGTERM, so that the process writes a checkpoint and ends. Kills it after `seconds`, which loses the
        steps since the last checkpoint.

        A process on another machine gets a stop file instead, and is never killed.
        """
        lock = self.directory / "worker.lock"
        for number, timeout in ((signal.SIGTERM, seconds), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                if self._process is not None:
                    self._process.send_signal(number)
                elif (pid := lock_holder(lock)) is not None:
                    os.kill(pid, number)
                elif is_lock_held(lock):
                    lock.with_name(STOP).touch()
            for _ in range(max(1, int(timeout / POLL_SECONDS))):
                if self.has_ended():
                    return
                await asyncio.sleep(POLL_SECONDS)


def is_lock_held(path: Path) -> bool:
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
    """Returns the id of the process that holds the lock, or None if there is none on this machine.

    A lock file of an earlier version, which only one server used, has no namespace.
    """
    if not is_lock_held(path):
        return None
    pid, _, namespace = path.read_text().strip().partition(" ")
    return int(pid) if pid.isdigit() and namespace in ("", pid_namespace()) else None


TRAINING_COMMAND = module_command("fp8serve.train.job_process")
CANCEL_SECONDS = 60.0  # time limit for the checkpoint of a job that is cancelled or paused
STATUS_SECONDS = 1.0  # time limit for the status of a job whose process has ended, when the server stops
RETRY_SECONDS = 5.0  # pause after an unexpected error
SHARED_POLL_SECONDS = 1.0  # how often an idle server looks for jobs that another one has accepted or left
MAX_CRASHES = 3


def training_command(processes: int) -> tuple[str, ...]:
    """Returns the command of a training process that divides each step among at most `processes` processes."""
    return TRAINING_COMMAND if processes == 1 else (*TRAINING_COMMAND, "--procs", str(processes))


class JobRunner:
    """Runs the queued jobs of the database, one after the other.

    `wait_idle` is awaited before a job starts. `command` starts a training process; the job's directory is appended.
    """

    def __init__(
        self,
        store: JobStore,
        data_dir: Path,
        wait_idle: Callable[[], Awaitable[None]],
        command: Sequence[str] = TRAINING_COMMAND,
        bucket: Bucket | None = None,
    ) -> None:
        self.store = store
        self.command = tuple(command)
        self.artifacts = Artifacts(data_dir, bucket)
        self.root = self.artifacts.jobs
        self.is_busy = False
        self.is_closing = False
        self.is_closed = True
        self.changed = asyncio.Condition()
        self.on_job_end: Callable[[], None] = lambda: None  # called in a thread after each job
        self._wait_idle = wait_idle
        self._wake_event = asyncio.Event()
        self._process: TrainingProcess | None = None
        self._unprepared: dict[str, Job] = {}  # jobs of other servers, as they were before this server claimed them
        self._task: asyncio.Task[None] | None = None

    def job_dir(self, job_id: str) -> Path:
        return self.artifacts.job_dir(job_id)

    def result_dir(self, job: Job) -> Path:
        return self.job_dir(job.id) / "out" / "model"

    def wake(self) -> None:
        """Makes the runner read the database now, because a job was added, cancelled, paused or resumed."""
        self._wake_event.set()

    def start(self) -> None:
        """Starts to run jobs in the background."""
        self.is_closed = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self.is_closing:
            try:
                job = await asyncio.to_thread(self._claim)
                await self._release_left_process(job)
                if job is not None:
                    await self._run_one(job)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SHARED_POLL_SECONDS if self.store.is_shared else None):
                        await self._wake_event.wait()
                self._wake_event.clear()
            except Exception:
                log.exception("a fine-tune job could not be run; trying again in %g seconds", RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)

    def _claim(self) -> Job | None:
        """Claims the first job that this server may run and whose files it has. Returns the job as it was before."""
        for job in self.store.unfinished_jobs():
            if self.store.is_shared and not self.artifacts.has_job(job.id):
                continue
            if job.owner != self.store.front:
                self._unprepared[job.id] = job
            if (claimed := self.store.claim(job.id)) is not None:
                return claimed
        return None

    async def _run_one(self, job: Job) -> None:
        self.is_busy = True
        try:
            await self._wait_idle()
            await self._run_process(job)
            await asyncio.to_thread(self.on_job_end)
        finally:
            self.is_busy = False
            await self._notify()

    async def _release_left_process(self, claimed: Job | None) -> None:
        """Releases the process that was left when the database failed, unless this server still has its job."""
        process = self._process
        if process is None or (claimed is not None and claimed.id == process.job_id):
            return
        if claimed is not None or not await asyncio.to_thread(self.store.owns, process.job_id):
            await self._release(process)
            self._process = None

    async def close(self, seconds: float) -> None:
        """Stops the running job at a checkpoint and queues it for the next server. Kills its process after `seconds`.

        If there is a bucket, the checkpoint is copied there before the job is queued, in what is left of `seconds`.
        """
        deadline = time.monotonic() + seconds
        self.is_closing = True
        self._wake_event.set()
        if self._process is not None:
            await self._process.stop(seconds)
        if self._task is not None:
            rest = 0.0 if self.artifacts.bucket is None else deadline - time.monotonic()
            await asyncio.wait({self._task}, timeout=max(STATUS_SECONDS, rest))
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.is_closed = True

    # -- one job -------------------------------------------------------------------------------------------------------

    async def _run_process(self, job: Job) -> None:
        """Runs or follows the job's training process until it ends, and sets the job's status."""
        if job.status == "queued":
            message = "The job is running." if job.started_at is None else "The job continues from its last checkpoint."
            if not await asyncio.to_thread(self.store.set_status, job.id, "running", message):
                return
        if self.is_closing or await asyncio.to_thread(self._pause_without_process, job):
            return
        if self.store.is_shared and (before := self._unprepared.get(job.id)) is not None:
            await self._take_over(before)  # if it fails, the next pass tries again
            if self.is_closing:
                return
        self._unprepared.pop(job.id, None)
        self._process = process = await TrainingProcess.start(job.id, self.job_dir(job.id), self.command)
        has_result = await self._follow(process)
        self._process = None
        await asyncio.to_thread(self._set_final_status, process, has_result)
        await self._notify()

    async def _take_over(self, job: Job) -> None:
        """Fetches the files of a job that another server may have run. If that server's lease has ended, adds an event
        that says so."""
        if self.artifacts.bucket is not None:
            if is_lock_held(self.job_dir(job.id) / "worker.lock"):  # its events are not those of the database
                await TrainingProcess(job.id, self.job_dir(job.id), None).stop(CANCEL_SECONDS)
            await asyncio.to_thread(self._fetch, job)
        if job.owner is not None:
            await asyncio.to_thread(self._record_takeover, job)

    def _fetch(self, job: Job) -> None:
        """Copies the job's files from the bucket, and writes its events as the database has them."""
        directory = self.artifacts.fetch_job(job.id)
        self.artifacts.fetch_checkpoints(job.id)
        content = ""
        for number, event in enumerate(self.store.events(job.id, limit=2**31 - 1), 1):
            fields = {"type": event.type, "level": event.level, "message": event.message, **event.data}
            content += json.dumps({"id": number, "created_at": event.created_at, **fields}) + "\n"
        with atomic_file(directory / EVENTS) as temporary:
            temporary.write_bytes(content.encode())
        self.store.set_events_offset(job.id, len(content))  # JSON is ASCII

    def _record_takeover(self, job: Job) -> None:
        has_checkpoint = bool(self.artifacts.checkpoints(job.id))
        start = "from its last checkpoint" if has_checkpoint else "from its first step, because it has no checkpoint"
        message = f"The lease of the server that ran the job has ended; another server runs it {start}."
        self.store.add_message(job.id, message, "taken_over")

    def _pause_without_process(self, job: Job) -> bool:
        """Pauses a job that was asked to pause and has no running process. Returns whether the job is paused now."""
        is_pausing = self.store.get(job.id).pause_requested and not is_lock_held(self.job_dir(job.id) / "worker.lock")
        return is_pausing and self.store.set_status(job.id, "paused", "The job is paused.")

    async def _follow(self, process: TrainingProcess) -> bool:
        """Stores the process's events until it ends, and stops it if the job is cancelled, paused or no longer running.
        Returns early if another server has claimed the job.

        Returns whether the job has a result. It is looked up before the last events are stored, so all events of a
        result are stored, too. A process that an earlier server started may write another result in the meantime; the
        next call of `_run_process` finds it.
        """
        while True:
            has_ended = process.has_ended()
            has_result = has_ended and (process.directory / "result.json").exists()
            job, has_new_events = await asyncio.to_thread(self._store_events, process)
            if has_new_events:
                await self._notify()
            if has_ended:
                return has_result
            if job.owner not in (None, self.store.front):
                await self._release(process)
                return False
            if job.status != "running" or job.cancel_requested or job.pause_requested:
                await process.stop(CANCEL_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake_event.wait()
            self._wake_event.clear()

    async def _release(self, process: TrainingProcess) -> None:
        """Stops the process of a job that another server has claimed, unless that server follows it: without a bucket,
        servers share the data directory."""
        if self.artifacts.bucket is not None:
            await process.stop(CANCEL_SECONDS)

    def _store_events(self, process: TrainingProcess) -> tuple[Job, bool]:
        """Stores the process's new events. Returns the job as it was before, and whether there were new events."""
        job = self.store.get(process.job_id)
        events, offset = read_events(process.directory / EVENTS, job.events_offset)
        if offset > job.events_offset:
            self.store.add_events(job, events, offset)
        if any(event["type"] == "checkpoint" for event in events) and self.store.owns(job.id):
            self.artifacts.publish_checkpoints(job.id)
        return job, bool(events)

    def _set_final_status(self, process: TrainingProcess, has_result: bool) -> None:
        """Sets the status of the job whose training process has ended."""
        if process.exit_code == EXIT_LOCKED:
            return  # a process that an earlier server started holds the lock; the next pass follows that one
        job = self.store.get(process.job_id)
        if job.status != "running":
            return
        if job.owner != self.store.front:
            log.warning("job %s runs on another server, because the lease of this one had ended", job.id)
        elif has_result:
            self.artifacts.publish(self.result_dir(job))
            self.store.set_status(job.id, "succeeded", "The job succeeded; its result can be activated.")
        elif job.cancel_requested:
            self.store.set_status(job.id, "cancelled", "The job was cancelled.")
        elif (reason := self._failure_reason(process)) is not None:
            self.store.set_status(
                job.id, "failed", "The job failed.", level="error", code="training_failed", error=safe_text(reason)
            )
        elif job.pause_requested:
            self.store.set_status(job.id, "paused", "The job is paused; it can be resumed from its last checkpoint.")
        elif self.is_closing or process.exit_code == EXIT_STOPPED:
            self.store.set_status(
                job.id, "queued", "The job stopped at a checkpoint and will continue from there.", code="stopped"
            )
        else:
            self._record_crash(job, process)

    def _failure_reason(self, process: TrainingProcess) -> str | None:
        """Returns the error that the training process reported, or None if the process was killed."""
        last = self.store.newest_events(process.job_id, 1)[0]
        if last.data.get("code") == "error" and process.exit_code in (None, EXIT_FAILED):
            return last.message
        if process.exit_code in (EXIT_FAILED, EXIT_USAGE):
            log_path = process.directory / "worker.log"
            lines = log_path.read_text(errors="replace").strip().splitlines() if log_path.exists() else []
            return lines[-1] if lines else "The training process failed without a message."
        return None

    def _record_crash(self, job: Job, process: TrainingProcess) -> None:
        """Lets the job start again after a crash of its process, or fails it after MAX_CRASHES crashes."""
        crashes = job.crashes + 1
        crash = f"The training process died ({describe_exit(process.exit_code)})"
        if crashes < MAX_CRASHES:
            self.store.add_crash(job.id, f"{crash}; it starts again from the last checkpoint.")
        else:
            reason = f"{crash} {crashes} times without progress."
            self.store.set_status(job.id, "failed", "The job failed.", level="error", code="worker_died", error=reason)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
