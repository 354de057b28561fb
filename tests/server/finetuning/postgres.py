"""A PostgreSQL server for tests, which listens on a socket of its own directory."""

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'fp8serve[postgres]')")
PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
USER = "fp8serve"


class Postgres:
    """One cluster in `directory`. `url` creates a database and returns its URL."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count()
        self._user = "postgres" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
        self._run("initdb", "--auth=trust", f"--username={USER}", "--no-sync", "--encoding=UTF8", "--locale=C")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(PROGRAMS[-1] / program), f"--pgdata={self.directory / 'data'}", *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.directory, user=self._user
        )
        assert result.returncode == 0, result.stdout + result.stderr

    def start(self) -> None:
        options = f"-k {self.directory} -c listen_addresses= -c fsync=off -c max_connections=40"
        self._run("pg_ctl", "start", "--wait", f"--options={options}", f"--log={self.directory / 'log'}")

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate")

    def url(self) -> str:
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.directory}"


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A server until the end of the block; skips the test where PostgreSQL is missing."""
    if not PROGRAMS:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    directory = Path(tempfile.mkdtemp(prefix="pg-"))  # a short path, which a socket needs
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, "postgres")
        server = Postgres(directory)
        server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(AssertionError):  # a test may have stopped it
                server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
