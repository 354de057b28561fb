"""The process that one job runs in: started, followed through its files, and asked to stop.

It may outlive the server that started it. The next server finds its lock held and follows it instead of starting a
second process.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("fp8serve.server")

POLL_SECONDS = 0.1
NICE = 10
EVENT = {"id", "created_at", "level", "type", "message"}
"""Fields that every event has."""
EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 3


class TrainingProcess:
    """A job's process: one we started, or one that outlived an earlier front and is only followed."""

    def __init__(self, job_id: str, directory: Path, process: asyncio.subprocess.Process | None) -> None:
        self.job_id = job_id
        self.directory = directory
        self.code: int | None = None
        self._process = process
        self._offset = 0
        self._last: dict[str, Any] = {}

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

    def new_events(self) -> list[dict[str, Any]]:
        """Whole lines that were added to events.jsonl since the last call."""
        try:
            with (self.directory / "events.jsonl").open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = [event for line in whole.splitlines() if (event := self._event(line)) is not None]
        self._last = events[-1] if events else self._last
        return events

    def _event(self, line: bytes) -> dict[str, Any] | None:
        """None for a damaged line, without which the job can still be followed to its end."""
        try:
            event = json.loads(line)
            if isinstance(event, dict) and event.keys() >= EVENT:
                return event
        except (ValueError, RecursionError):
            pass
        log.warning("job %s wrote an event that cannot be read; it is left out", self.job_id)
        return None

    def failure(self) -> str | None:
        """The worker's own sentence if it gave up, otherwise None. A worker that was killed says nothing: its last
        event may be from an earlier attempt.
        """
        if self._last.get("code") == "error" and self.code in (None, EXIT_FAILED):
            return str(self._last["message"])
        if self.code in (EXIT_FAILED, EXIT_USAGE):
            return last_line(self.directory / "worker.log") or "The training process failed without saying why."
        return None

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
