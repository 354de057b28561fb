"""Runs fine-tunes under servers that are killed with SIGKILL. A separate program, so that no thread runs at a fork.

    python -m tests.server.finetuning.killed_servers FOLDER

Each seam is a commit to the job table, or the moment after the job's process was started. The server of the N-th job is
killed at its N-th seam, and another server then brings the job to its end. Prints the number of kills.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8serve.server.finetuning import database, job_runner
from fp8serve.server.finetuning.database import NewJob
from fp8serve.server.finetuning.job_store import FINAL_STATUSES, JobStore
from fp8serve.train.events import EVENTS
from tests.server.conftest import STUB
from tests.server.fakes import model_dir

JOB = "ftjob-1"
MOST = 100


async def nothing_runs() -> None:
    """Stands for the wait until no request runs, after which training begins."""


async def serve(data: Path) -> None:
    """Runs the job until it has ended."""
    store = JobStore(data / "jobs.sqlite3")
    runner = job_runner.JobRunner(store, data, nothing_runs, STUB)
    runner.start()
    while store.get(JOB).status not in FINAL_STATUSES:
        await asyncio.sleep(0.01)
    await runner.close(0.0)
    store.close()


def server(data: Path, seam: int | None = None) -> int:
    """Forks a server, which is killed at its seam of that number, if any; returns its exit status."""
    if (pid := os.fork()) == 0:
        if seam is not None:
            die_at(seam)
        asyncio.run(serve(data))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(seam: int) -> None:
    seams = iter(range(1, MOST))

    def pass_seam() -> None:
        if next(seams) == seam:
            os.kill(os.getpid(), signal.SIGKILL)

    write, start = database.Database.write, job_runner.TrainingProcess.start

    @contextmanager
    def before_commit(store: database.Database) -> Iterator[database.Connection]:
        with write(store) as db:
            yield db
            pass_seam()

    async def after_start(*arguments: Any) -> job_runner.TrainingProcess:
        process = await start(*arguments)
        pass_seam()
        return process

    database.Database.write = before_commit  # type: ignore[method-assign]
    job_runner.TrainingProcess.start = after_start  # type: ignore[method-assign]


def make_job(data: Path, model: Path) -> None:
    """Creates a queued job whose process dies at step 3 on its first start."""
    directory = data / "jobs" / JOB
    directory.mkdir(parents=True)
    (directory / "data.jsonl").write_text("die-once")
    (directory / "job.json").write_text(json.dumps({"data": [str(directory / "data.jsonl")], "model": str(model)}))
    store = JobStore(data / "jobs.sqlite3")
    store.create(NewJob(base="tiny", source="base", config={}), JOB, 1)
    store.close()


def expect_whole(data: Path, where: str) -> None:
    """Asserts that the job succeeded, its process was started twice, and the table has each event once, in order."""
    directory, store = data / "jobs" / JOB, JobStore(data / "jobs.sqlite3")
    job, stored_events = store.get(JOB), store.events(JOB)
    store.close()
    records = [json.loads(line) for line in (directory / EVENTS).read_text().splitlines()]
    expected = [(e["created_at"], e["type"], e.get("step"), e.get("code")) for e in records]
    codes = {"queued", "running", "restarted", "succeeded"}
    events = [e for e in stored_events if e.data.get("code") not in codes]
    assert [(e.created_at, e.type, e.data.get("step"), e.data.get("code")) for e in events] == expected, where
    assert [e.data["step"] for e in events if e.type == "metrics"] == [1, 2, 3, 4, 5, 6], where
    assert (job.status, job.progress["step"], job.crashes) == ("succeeded", 6, 0), (where, job)
    assert job.events_offset == (directory / EVENTS).stat().st_size, where
    assert (directory / "tries.txt").read_text() == "xx", where


def main(folder: Path) -> int:
    model = model_dir(folder / "tiny")
    for seam in range(1, MOST):
        data = folder / str(seam)
        make_job(data, model)
        killed = server(data, seam) == -signal.SIGKILL
        if killed and (status := server(data)):
            raise SystemExit(f"the server after seam {seam} ended with {status}")
        expect_whole(data, f"seam {seam}")
        if not killed:
            return seam - 1
    raise SystemExit("the job never ended")


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
