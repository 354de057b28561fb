"""The process a job runs in: `python -m fp8serve.train.job_process [--procs N] JOB_DIR`.

    JOB_DIR/job.json      in   the TrainConfig
    JOB_DIR/events.jsonl  out  one event a line (`train.events`), `id` rising by one across restarts, and `created_at`
    JOB_DIR/result.json   out  the TrainResult, written whole when the job has succeeded
    JOB_DIR/worker.lock   a file lock held while the process lives: who can take it knows that no worker runs

Exit status: 0 the job is done, 1 it failed (the last event is the one-sentence error), 2 wrong usage, 3 it was told to
stop (SIGTERM or SIGINT), wrote a checkpoint and can be started again, 4 processes of it died too often, 5 another
process runs the job. Starting it again after any end, kill -9 and power loss included, goes on from the last whole
checkpoint with the same bits; steps that are taken again are not logged again, unless a run that diverged went back to
take them in another way. An event is on the disk before the next step starts, so a reader never sees one that a crash
takes back; a line cut by a crash is removed at the next start.

With --procs, N further processes take the steps together (`train.group`), or as many as a step has microbatches. This
process holds worker.lock and passes signals on; rank 0 writes the rest. The next start may use another N.
"""

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from fp8serve.errors import Fp8ServeError, GroupError, JobError
from fp8serve.model.storage.files import MAX_JSON_BYTES, read_text, take_lock, whole_file
from fp8serve.processes import end_process
from fp8serve.train.config import TrainConfig
from fp8serve.train.events import EVENTS, Event, OnEvent, logged, message

if TYPE_CHECKING:
    from fp8serve.train.trainer import TrainResult

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED, EXIT_DIED, EXIT_LOCKED = range(6)


class _Stop:
    """True once the process was asked to stop; installed as the handler of SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.is_stopping = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_stopping = True

    def __call__(self) -> bool:
        return self.is_stopping


def main(arguments: list[str]) -> int:
    *options, name = arguments or [""]
    count = options[1] if len(options) == 2 and options[0] == "--procs" else "" if options else "1"
    if not count.isdecimal() or int(count) < 1 or not (name and Path(name).is_dir()):
        usage = "usage: python -m fp8serve.train.job_process [--procs N] JOB_DIR (a directory that holds job.json)"
        print(usage, file=sys.stderr)
        return EXIT_USAGE
    directory = Path(name)
    try:
        lock = _take_lock(directory / "worker.lock")
    except Fp8ServeError as error:
        print(error, file=sys.stderr)
        return EXIT_LOCKED if isinstance(error, JobError) else EXIT_FAILED
    with lock:
        if (directory / "result.json").exists():
            return EXIT_DONE
        used = processes(directory, int(count))
        return as_rank([name]) if used == 1 else _group(name, used)


def processes(directory: Path, most: int) -> int:
    """At most `most`, and one for each microbatch of a step; one for a broken job, which then reports what is wrong."""
    try:
        return job_config(directory).processes(most)
    except Fp8ServeError:
        return 1


def _group(job: str, count: int) -> int:
    from fp8serve.train.group import run_group

    try:
        status = run_group(count, "fp8serve.train.job_process:as_rank", [job])
    except GroupError as error:
        print(error, file=sys.stderr)
        return EXIT_DIED
    return EXIT_STOPPED if status is None else status


def as_rank(arguments: list[str]) -> int:
    """JOB_DIR: run the job, alone or as one of the ranks that torch's launcher has started."""
    directory = Path(arguments[0])
    if os.environ.get("RANK", "0") != "0":
        return _work(directory, _ignore)
    with logged(directory / EVENTS) as log:
        return _work(directory, log)


def _take_lock(path: Path) -> IO[str]:
    lock = take_lock(path, f"Another worker is running the job in {path.parent}; wait for it or stop it first.")
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _ignore(event: Event) -> None:
    """Only rank 0 reports events."""


def _work(directory: Path, log: OnEvent) -> int:
    try:
        result = _train(directory, log)
    except GroupError:  # the group starts again
        raise
    except Fp8ServeError as error:
        log(message("error", str(error), level="error"))
        return EXIT_FAILED
    except Exception as error:  # the owner is told in one sentence, the developer on standard error
        if "RANK" in os.environ:
            raise
        traceback.print_exc()
        log(message("error", f"The trainer failed: {type(error).__name__}: {error}".split("\n")[0], level="error"))
        return EXIT_FAILED
    if result.status == "stopped":
        return EXIT_STOPPED
    if log is not _ignore:
        with whole_file(directory / "result.json") as file:
            file.write_text(result.to_json(), encoding="utf-8")
    return EXIT_DONE


def _train(directory: Path, log: OnEvent) -> "TrainResult":
    stop = _Stop()
    config = job_config(directory)
    from fp8serve.ranks import torchrun  # loads torch, so not before the lock is held and the job is read
    from fp8serve.train.trainer import Trainer

    with torchrun(config.device) as ranks:
        return Trainer(config, ranks).run(log, stop)


def job_config(directory: Path) -> TrainConfig:
    """The configuration in a job's directory. JobError if it cannot be read or understood."""
    return TrainConfig.from_json(read_text(directory / "job.json", MAX_JSON_BYTES, JobError))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
