"""Helpers for servers that run as processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from fp8serve.running import open_listener
from tests.patience import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """One server process, and a client for it. It listens on a socket that is open before it starts, unless `options`
    name a host or port."""

    def __init__(self, log: Path, **options: Any) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("ab") as output, open_listener() as listener:
            self.port: int = listener.getsockname()[1]
            fd = listener.fileno()
            inherited = {} if {"host", "port"} & set(options) else {"fd": fd}
            command = [sys.executable, "-W", "error", "-m", "tests.server.serve", json.dumps(options | inherited)]
            self.popen = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, cwd=ROOT, pass_fds=[fd] if inherited else []
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def wait_ready(self) -> None:
        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return self.client.get("/health/ready").status_code == 200
            assert self.popen.poll() is None, self.log.read_text()
            return False

        until(ready, "readiness")

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(PATIENCE)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


@contextlib.contextmanager
def serving(log: Path, **options: Any) -> Iterator[Process]:
    """A server that is ready; killed at the end if it has not ended by itself."""
    process = Process(log, **options)
    try:
        process.wait_ready()
        yield process
    finally:
        process.client.close()
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
