"""A server in a child process, and a small HTTP client for it.

`with RunningServer(model, log=...) as server:` waits until the server is ready. At the end of the block it stops the
server with its engine and its jobs. The parent opens the listening socket and passes it to the server, so that no other
program can take the port in the meantime. The client uses no proxy and does not retry.
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
_STOP_SECONDS = 60.0  # twice the 30 seconds for which a server drains


def open_listener() -> socket.socket:
    """Returns a socket that listens on a free port of 127.0.0.1."""
    return socket.create_server(("127.0.0.1", 0))


class RunningServer:
    """A context manager that runs `fp8serve serve MODEL OPTIONS...` on a free port of 127.0.0.1."""

    def __init__(self, model: Path, options: Sequence[str] = (), *, log: Path, ready_seconds: float = 600.0) -> None:
        self.log = log
        self.ready_seconds = ready_seconds
        self._command = module_command("fp8serve.cli", "serve", str(model), *options)

    def __enter__(self) -> Self:
        with self.log.open("wb") as log, open_listener() as listener:
            self.url = "http://{}:{}".format(*listener.getsockname())
            self._process = subprocess.Popen(
                [*self._command, "--fd", str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal reaches only the parent
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
        """The id of the server process. The engine is a child of it."""
        return self._process.pid

    def stop(self) -> int:
        """Stops the server with SIGTERM and returns its exit status. Kills a server that does not stop in time."""
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
        line = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise MachineError(f"The server did not become ready; the last line of {self.log} is: {line or '(nothing)'}")

    def _is_ready(self) -> bool:
        try:
            self.get("/health/ready")
        except (MachineError, OSError):
            return False
        return True

    def get(self, path: str) -> Any:
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._send(urllib.request.Request(self.url + path, json.dumps(body or {}).encode(), headers))

    def _send(self, request: urllib.request.Request) -> Any:
        try:
            with _OPENER.open(request, timeout=300) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise MachineError(f"{request.get_method()} {request.selector} answered {error.code}: {text}") from None
