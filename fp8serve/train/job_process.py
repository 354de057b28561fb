"""The process of a job: `python -m fp8serve.train.job_process [--procs N] JOB_DIR`.

    JOB_DIR/job.json      input   the TrainConfig
    JOB_DIR/events.jsonl  output  the log, one event a line (`train.events`)
    JOB_DIR/result.json   output  the TrainResult, written atomically after the job has succeeded
    JOB_DIR/worker.lock           a file lock that the process holds, so that others can see whether it runs
    JOB_DIR/stop          input   stops the job like SIGTERM, from another machine; the next start removes the file

Exit status:
    0   the job has succeeded
    1   the job failed; its last event has the error
    2   the arguments are invalid
    3   SIGTERM, SIGINT or the file `stop` stopped the job after it had written a checkpoint
    4   the processes of the group died too often
    5   another process runs the job

A job that is started again after any end, kill -9 and power loss included, resumes from its newest complete checkpoint
and gives the same bits.

With --procs, N child processes share the steps (`train.group`), but not more than a step has microbatches. This process
then holds worker.lock and forwards signals, and rank 0 writes the files. The next start may use another N.
"""

import os
import signal
import sys
import traceback
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from fp8serve.errors import Fp8ServeError, GroupError, JobError
from fp8serve.model.storage.files import MAX_JSON_BYTES, acquire_lock, atomic_file, read_text
from fp8serve.processes import end_process, pid_namespace
from fp8serve.train.config import TrainConfig
from fp8serve.train.events import EVENTS, EventLog, OnEvent, ignore, message

if TYPE_CHECKING:
    from fp8serve.train.trainer import TrainResult

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED, EXIT_DIED, EXIT_LOCKED = range(6)
STOP = "stop"  # name of a file in the job's directory


class _StopSignals:
    """Handles SIGTERM and SIGINT. Calling it returns whether one of them has arrived or the job's stop file exists."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / STOP
        self.is_stopping = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_stopping = True

    def __call__(self) -> bool:
        return self.is_stopping or self._file.exists()


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
        usable = usable_processes(directory, int(count))
        return run_rank([name]) if usable == 1 else _run_group(name, usable)


def usable_processes(directory: Path, count: int) -> int:
    """Returns how many of `count` processes the job can use, and 1 if its configuration is invalid: that process then
    reports the error."""
    try:
        return job_config(directory).usable_processes(count)
    except Fp8ServeError:
        return 1


def _run_group(job: str, count: int) -> int:
    from fp8serve.train.group import run_group

    try:
        status = run_group(count, "fp8serve.train.job_process:run_rank", [job])
    except GroupError as error:
        print(error, file=sys.stderr)
        return EXIT_DIED
    return EXIT_STOPPED if status is None else status


def run_rank(arguments: list[str]) -> int:
    """Runs the job in the directory `arguments[0]`, alone or as one of the ranks of torch's launcher. Returns the exit
    status."""
    directory = Path(arguments[0])
    if os.environ.get("RANK", "0") != "0":
        return _run_job(directory, ignore)
    with closing(EventLog(directory / EVENTS)) as log:
        return _run_job(directory, log)


def _take_lock(path: Path) -> IO[str]:
    lock = acquire_lock(path, f"Another worker runs the job in {path.parent}; wait for it, or stop it first.")
    lock.truncate(0)
    lock.write(f"{os.getpid()} {pid_namespace()}\n")
    lock.flush()
    path.with_name(STOP).unlink(missing_ok=True)
    return lock


def _run_job(directory: Path, log: OnEvent) -> int:
    try:
        result = _train(directory, log)
    except GroupError:  # `train.group` restarts the group
        raise
    except Fp8ServeError as error:
        log(message("error", str(error), level="error"))
        return EXIT_FAILED
    except Exception as error:  # users read the message in the log, developers the traceback
        if "RANK" in os.environ:
            raise
        traceback.print_exc()
        log(message("error", f"The trainer failed: {type(error).__name__}: {error}".split("\n")[0], level="error"))
        return EXIT_FAILED
    if result.status == "stopped":
        return EXIT_STOPPED
    if log is not ignore:
        with atomic_file(directory / "result.json") as file:
            file.write_text(result.to_json(), encoding="utf-8")
    return EXIT_DONE


def _train(directory: Path, log: OnEvent) -> "TrainResult":
    stop = _StopSignals(directory)
    config = job_config(directory)
    from fp8serve.ranks import torchrun  # imports torch, so only after the lock and the configuration
    from fp8serve.train.trainer import Trainer

    with torchrun(config.device) as ranks:
        return Trainer(config, ranks).run(log, stop)


def job_config(directory: Path) -> TrainConfig:
    """Returns the configuration in a job's directory. Raises JobError if it cannot be read or is invalid."""
    return TrainConfig.from_json(read_text(directory / "job.json", MAX_JSON_BYTES, JobError))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
