"""Computes the rewards of completions with `reward(prompt, completion, row)` in a Python file, or with a URL.

The file runs in a child process (reward_process.py). The run ends with JobError, which names the row, if a reward
function raises, takes too long, ends its process, or returns no finite number. This module needs no torch.
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
from typing import Any

from fp8serve.errors import JobError, one_line, shown
from fp8serve.processes import describe_exit, module_command
from fp8serve.train.config import TrainConfig

MAX_REPLY_BYTES = 16 << 20
MAX_ATTEMPTS = 3  # requests to a URL that cannot be reached or fails
RETRY_SECONDS = 1.0  # before the second attempt; twice as long before the third
_COMMAND = module_command("fp8serve.train.methods.grpo.reward_process")


@dataclass(frozen=True)
class RewardInput:
    """The arguments of a reward function. `prompt` is the row's `prompt` or `messages`; `where` is "file:line"."""

    prompt: Any
    completion: str
    row: Any
    where: str

    @property
    def payload(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "where"}


def _checked_reward(value: Any, grader: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise JobError(f"{grader} returned {shown(value)} for a completion of {where}; a reward is a finite number.")
    return float(value)


class FileGrader:
    """Calls `reward` of a Python file in a child process. `seconds` limits each call, and the import of the file."""

    def __init__(self, file: Path, seconds: float) -> None:
        if not file.is_file():
            raise JobError(f"The reward file {file} does not exist; name a Python file with a function `reward`.")
        self._file, self.seconds = file, seconds
        self._process = subprocess.Popen(
            [*_COMMAND, str(file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._unread = b""
        reply = self._read_reply("when it was imported")
        if "error" in reply:
            self.close()
            raise JobError(f"The reward file {file} cannot be used: {one_line(reply['error'])}.")

    def rewards(self, inputs: Sequence[RewardInput]) -> list[float]:
        return [self._reward(input_) for input_ in inputs]

    def _reward(self, input_: RewardInput) -> float:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_read_reply` reports a process that has ended
            stdin.write(json.dumps(input_.payload, default=str).encode() + b"\n")
            stdin.flush()
        reply = self._read_reply(f"on a completion of {input_.where}")
        if "error" in reply:
            self.close()
            error = one_line(reply["error"])
            raise JobError(f"reward in {self._file} failed on a completion of {input_.where}: {error}.")
        return _checked_reward(reply["reward"], f"reward in {self._file}", input_.where)

    def _read_reply(self, when: str) -> dict[str, Any]:
        stdout, deadline = self._process.stdout, time.monotonic() + self.seconds
        assert stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise JobError(f"reward in {self._file} took more than {self.seconds:g} seconds {when}.")
            if not (chunk := os.read(stdout.fileno(), 1 << 16)):
                self.close()
                raise JobError(f"The process of {self._file} ended {when} ({describe_exit(self._process.returncode)}).")
            self._unread += chunk
            if len(self._unread) > MAX_REPLY_BYTES:
                self.close()
                raise JobError(f"The process of {self._file} wrote more than {MAX_REPLY_BYTES} bytes {when}.")
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            self.close()
            raise JobError(f"The process of {self._file} sent an invalid reply {when}: {shown(line[:80])}.") from None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, so that only the allowed address receives requests."""

    def redirect_request(self, *_: Any) -> None:
        return None


class UrlGrader:
    """POSTs {"answers": [{"prompt", "completion", "row"}, ...]} and expects {"rewards": [number, ...]} of equal length.

    `seconds` limits each response. Requests that fail to connect or return a status of 5xx are repeated.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

    def rewards(self, inputs: Sequence[RewardInput]) -> list[float]:
        body = json.dumps({"answers": [input_.payload for input_ in inputs]}, default=str).encode()
        rewards = self._parse_rewards(self._post(body))
        if len(rewards) != len(inputs):
            raise JobError(f"{self._url} returned {len(rewards)} rewards for {len(inputs)} completions.")
        return [_checked_reward(value, self._url, i.where) for value, i in zip(rewards, inputs, strict=True)]

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with self._opener.open(request, timeout=self._seconds) as response:
                    return self._read_body(response)
            except urllib.error.HTTPError as problem:
                reason, is_retryable = f"it answered with status {problem.code}", problem.code >= 500
            except (OSError, HTTPException, UnicodeError) as problem:
                reason, is_retryable = one_line(getattr(problem, "reason", None) or problem), True
            if not is_retryable or attempt == MAX_ATTEMPTS:
                raise JobError(f"The grader {self._url} returned no rewards: {reason}.")
            time.sleep(RETRY_SECONDS * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _read_body(self, response: HTTPResponse) -> bytes:
        """Returns the body. The time limit also holds for a body that arrives slowly."""
        deadline, chunks = time.monotonic() + self._seconds, [b""]
        while chunk := response.read1(1 << 16):
            chunks.append(chunk)
            if time.monotonic() > deadline or sum(map(len, chunks)) > MAX_REPLY_BYTES:
                raise JobError(
                    f"The response of the grader {self._url} took more than {self._seconds:g} seconds, or has more "
                    f"than {MAX_REPLY_BYTES} bytes."
                )
        return b"".join(chunks)

    def _parse_rewards(self, body: bytes) -> list[Any]:
        try:
            rewards = json.loads(body)["rewards"]
        except (ValueError, TypeError, KeyError, RecursionError):
            rewards = None
        if not isinstance(rewards, list):
            raise JobError(f'{self._url} did not answer with JSON such as {{"rewards": [0.5, 1]}}.')
        return rewards

    def close(self) -> None:
        """Does nothing: no connection stays open between two calls."""


Grader = FileGrader | UrlGrader
"""Computes rewards. Raises JobError if a completion cannot be graded."""


def grader_of(config: TrainConfig) -> Grader:
    """Returns the job's grader. Raises JobError if the reward file cannot be read or run."""
    if config.reward is not None:
        return FileGrader(Path(config.reward), config.reward_seconds)
    return UrlGrader(str(config.grader_url), config.reward_seconds)
