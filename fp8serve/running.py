"""A server in a separate process, and a small client for it, for the demonstration.

`with RunningServer(model, log=...) as server:` waits until the server is ready, and ends it in every case together with
its engine and its jobs. The socket is opened here and passed to the server, so that no other program can take the port
in between. The client is the standard library's: no proxy, no retries; an error is one sentence with the server's own
words.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fp8serve.errors import MachineError
from fp8serve.processes import module_command

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_STOP_SECONDS = 60.0  # the server's own drain takes at most 30


def listen() -> socket.socket:
    """A socket that listens on a free port of this machine."""
    return socket.create_server(("127.0.0.1", 0))


class RunningServer:
    """`fp8serve serve MODEL OPTIONS...` on a free port of this machine, from entering the block to leaving it."""

    def __init__(self, model: Path, options: Sequence[str] = (), *, log: Path, ready_seconds: float = 600.0) -> None:
        self.log = log
        self.ready_seconds = ready_seconds
        self._command = module_command("fp8serve.cli", "serve", str(model), *options)

    def __enter__(self) -> Self:
        with self.log.open("wb") as log, listen() as listener:
            self.url = "http://{}:{}".format(*listener.getsockname())
            self._process = subprocess.Popen(
                [*self._command, "--fd", str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # ctrl-C in the terminal is ours to handle
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The id of the process that answers HTTP; the engine is its child."""
        return self._process.pid

    def stop(self) -> int:
        """Sends SIGTERM and returns the server's exit status. Kills it when it takes too long."""
        self._process.terminate()
        try:
            return self._process.wait(_STOP_SECONDS)
        except BaseException:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.ready_seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._is_ready():
                return
            time.sleep(0.05)
        text = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise MachineError(f"The server did not become ready; the last line of {self.log} is: {text or '(nothing)'}")

    def _is_ready(self) -> bool:
        try:
            self.get("/health/ready")
        except (MachineError, OSError):
            return False
        return True

    def get(self, path: str) -> Any:
        """The JSON that GET answers."""
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON that POST answers."""
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, json.dumps(body or {}).encode(), headers))

    def _ask(self, request: urllib.request.Request) -> Any:
        try:
            with _OPENER.open(request, timeout=300) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise MachineError(f"{request.get_method()} {request.selector} answered {error.code}: {text}") from None
