"""Helpers for servers that run as processes of their own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """One server process, and a client for it."""

    def __init__(self, log: Path, **options: Any) -> None:
        self.port = options.setdefault("port", free_port())
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "error", "-m", "tests.server.serve", json.dumps(options)]
        with log.open("ab") as output:
            self.popen = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def wait_ready(self, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health/ready").status_code == 200:
                    return
            if self.popen.poll() is not None:
                raise AssertionError(self.log.read_text())
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s: {self.log.read_text()}")

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(seconds)

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
