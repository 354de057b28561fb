"""Grades answers by `reward(prompt, completion, row)` of a Python file, or by a URL. No torch here.

The file runs in a process of its own (reward_process.py). A reward that fails, hangs, ends its process or is not a
number ends the run with one sentence that names the row.
"""

import contextlib
import json
import math
import os
import select
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Protocol

from fp8serve.errors import JobError, one_line, shown
from fp8serve.processes import describe_exit, module_command
from fp8serve.train.config import TrainConfig

MAX_REPLY = 16 << 20  # bytes
TRIES, PAUSE = 3, 1.0  # of a URL, seconds
_COMMAND = module_command("fp8serve.train.methods.grpo.reward_process")


@dataclass(frozen=True)
class Answer:
    """An answer to grade: the row's own `prompt` or `messages`, the answer's text, and the row. where: "file:line"."""

    prompt: Any
    completion: str
    row: Any
    where: str

    @property
    def payload(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "where"}


class Grader(Protocol):
    """Grades answers. JobError: an answer cannot be graded."""

    def rewards(self, answers: Sequence[Answer]) -> list[float]: ...
    def close(self) -> None: ...


def grader_of(config: TrainConfig) -> Grader:
    """The job's grader. JobError: its file cannot be read or run."""
    if config.reward is not None:
        return FileGrader(Path(config.reward), config.reward_seconds)
    return UrlGrader(str(config.grader_url), config.reward_seconds)


def _number(value: Any, who: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise JobError(f"{who} gave {shown(value)} for an answer to {where}; a reward is a finite number.")
    return float(value)


class FileGrader:
    """seconds: for one answer, and to import the file."""

    def __init__(self, file: Path, seconds: float) -> None:
        if not file.is_file():
            raise JobError(f"There is no reward file {file}; name a Python file with a function `reward`.")
        self._file, self.seconds = file, seconds
        self._process = subprocess.Popen(
            [*_COMMAND, str(file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._unread = b""
        reply = self._reply("when it was imported")
        if "error" in reply:
            self.close()
            raise JobError(f"The reward file {file} cannot be used: {one_line(reply['error'])}.")

    def rewards(self, answers: Sequence[Answer]) -> list[float]:
        return [self._reward(answer) for answer in answers]

    def _reward(self, answer: Answer) -> float:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reply says that it has ended
            stdin.write(json.dumps(answer.payload, default=str).encode() + b"\n")
            stdin.flush()
        reply = self._reply(f"on an answer to {answer.where}")
        if "error" in reply:
            self.close()
            raise JobError(f"reward in {self._file} failed on an answer to {answer.where}: {one_line(reply['error'])}.")
        return _number(reply["reward"], f"reward in {self._file}", answer.where)

    def _reply(self, when: str) -> dict[str, Any]:
        stdout, end = self._process.stdout, time.monotonic() + self.seconds
        assert stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise JobError(f"reward in {self._file} took more than {self.seconds:g} seconds {when}.")
            if not (more := os.read(stdout.fileno(), 1 << 16)):
                self.close()
                raise JobError(f"The process of {self._file} ended {when} ({describe_exit(self._process.returncode)}).")
            self._unread += more
            if len(self._unread) > MAX_REPLY:
                self.close()
                raise JobError(f"The process of {self._file} wrote more than {MAX_REPLY} bytes {when}.")
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            self.close()
            raise JobError(f"The process of {self._file} sent an invalid reply {when}: {shown(line[:80])}.") from None

    @property
    def exit_status(self) -> int | None:
        """The exit status of its process; None: it is running."""
        return self._process.poll()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: only the allowed address is asked."""

    def redirect_request(self, *_: Any) -> None:
        return None


class UrlGrader:
    """POSTs {"answers": [{"prompt", "completion", "row"}, ...]} and wants {"rewards": [number, ...]} of equal length.

    seconds: for a reply. It is asked again when it cannot be reached or fails (5xx).
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

    def rewards(self, answers: Sequence[Answer]) -> list[float]:
        body = json.dumps({"answers": [answer.payload for answer in answers]}, default=str).encode()
        result = self._rewards_of(self._ask(body))
        if len(result) != len(answers):
            raise JobError(f"{self._url} gave {len(result)} rewards for {len(answers)} answers.")
        return [_number(value, self._url, answer.where) for value, answer in zip(result, answers, strict=True)]

    def _ask(self, body: bytes) -> bytes:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        for attempt in range(1, TRIES + 1):
            try:
                with self._opener.open(request, timeout=self._seconds) as reply:
                    return self._read(reply)
            except urllib.error.HTTPError as problem:
                why, again = f"it answered with status {problem.code}", problem.code >= 500
            except (OSError, HTTPException, UnicodeError) as problem:
                why, again = one_line(getattr(problem, "reason", None) or problem), True
            if not again or attempt == TRIES:
                raise JobError(f"The grader {self._url} gave no rewards: {why}.")
            time.sleep(PAUSE * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _read(self, reply: HTTPResponse) -> bytes:
        """Reads a reply, within the time even if it arrives slowly."""
        end, parts = time.monotonic() + self._seconds, [b""]
        while part := reply.read1(1 << 16):
            parts.append(part)
            if time.monotonic() > end or sum(map(len, parts)) > MAX_REPLY:
                raise JobError(
                    f"The grader {self._url} took more than {self._seconds:g} seconds, or {MAX_REPLY} bytes."
                )
        return b"".join(parts)

    def _rewards_of(self, reply: bytes) -> list[Any]:
        try:
            result = json.loads(reply)["rewards"]
        except (ValueError, TypeError, KeyError, RecursionError):
            result = None
        if not isinstance(result, list):
            raise JobError(f'{self._url} did not answer with JSON such as {{"rewards": [0.5, 1]}}.')
        return result

    def close(self) -> None:
        """Does nothing: nothing is open between two calls."""
