"""The process a job runs in: `python -m fp8serve.train.job_process JOB_DIR`.

    JOB_DIR/job.json      in   the TrainConfig
    JOB_DIR/events.jsonl  out  one event a line (`train.events`), `id` rising by one across restarts, and `created_at`
    JOB_DIR/result.json   out  the TrainResult, written whole when the job has succeeded
    JOB_DIR/worker.lock   a file lock held while the process lives: who can take it knows that no worker runs

Exit status: 0 the job is done, 1 it failed (the last event is the one-sentence error), 2 wrong usage, 3 it was told to
stop (SIGTERM or SIGINT), wrote a checkpoint and can be started again. Starting it again after any end, kill -9 and
power loss included, goes on from the last whole checkpoint with the same bits; steps that are taken again are not
logged again. An event is on the disk before the next step starts, so a reader never sees one that a crash takes back; a
line cut by a crash is removed at the next start.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from fp8serve.ending import end_process
from fp8serve.errors import Fp8ServeError, JobError
from fp8serve.model.storage.files import fsync
from fp8serve.model.storage.lock import take_lock
from fp8serve.train.config import TrainConfig
from fp8serve.train.events import Event, message

if TYPE_CHECKING:
    from fp8serve.train.trainer import TrainResult

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 0, 1, 2, 3


class EventLog:
    """Append-only events.jsonl: durable line by line, free of duplicates after a resume."""

    def __init__(self, path: Path) -> None:
        past = _whole_lines(path)
        self._next = past[-1]["id"] + 1 if past else 1
        self._logged = max((e["step"] for e in past if e["type"] == "metrics"), default=0)
        self._file = path.open("a", encoding="utf-8")
        fsync(path.parent)

    def __call__(self, event: Event) -> None:
        if event["type"] == "metrics" and event["step"] <= self._logged:
            return
        line = {"id": self._next, "created_at": int(time.time()), **event}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._next += 1

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The events in the file; what follows the last newline was cut by a crash and is removed."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


class _Stop:
    """True once the process was asked to stop; installed as the handler of SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def __call__(self) -> bool:
        return self.asked


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m fp8serve.train.job_process JOB_DIR (a directory that holds job.json)", file=sys.stderr)
        return EXIT_USAGE
    directory = Path(arguments[0])
    try:
        lock = _take_lock(directory / "worker.lock")
    except Fp8ServeError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    with lock:
        log = EventLog(directory / "events.jsonl")
        try:
            return _work(directory, log)
        finally:
            log.close()


def _take_lock(path: Path) -> IO[str]:
    lock = take_lock(path, f"Another worker is running the job in {path.parent}; wait for it or stop it first.")
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _work(directory: Path, log: EventLog) -> int:
    if (directory / "result.json").exists():
        return EXIT_DONE
    try:
        result = _train(directory, log)
    except Fp8ServeError as error:
        log(message("error", str(error), level="error"))
        return EXIT_FAILED
    except Exception as error:  # the owner is told in one sentence, the developer on standard error
        traceback.print_exc()
        log(message("error", f"The trainer failed: {type(error).__name__}: {error}".split("\n")[0], level="error"))
        return EXIT_FAILED
    if result.status == "stopped":
        return EXIT_STOPPED
    write_result(directory / "result.json", result.to_json())
    return EXIT_DONE


def _train(directory: Path, log: EventLog) -> "TrainResult":
    stop = _Stop()
    config = TrainConfig.from_json(_job_text(directory / "job.json"))
    from fp8serve.train.trainer import Trainer  # loads torch: after the lock is held and the job is read

    return Trainer(config).run(log, stop)


def _job_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"The job description {path} cannot be read: {error}.") from error


def write_result(path: Path, text: str) -> None:
    """Whole or not at all: temporary sibling, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.rename(path)
    fsync(path.parent)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
