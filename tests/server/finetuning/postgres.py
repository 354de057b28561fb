"""A PostgreSQL server for tests, which listens on a socket of its own directory.

A shell (`GUARD`) waits for the end of the process that uses the server, then stops the server and removes its
directory. The process may be killed: the shell waits for the end of a pipe, which the kernel closes.
"""

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
GUARD = 'read -r _; "$1/pg_ctl" stop --pgdata="$2/data" --mode=immediate; until rm -rf "$2"; do sleep 1; done'
"""Its arguments are the directory of PostgreSQL's programs and that of the server. `rm` fails while a program that was
started just before the end still writes files."""


class Postgres:
    """One cluster in `directory`. `url` creates a database and returns its URL."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count()
        self._run("initdb", "--auth=trust", f"--username={USER}", "--no-sync", "--encoding=UTF8", "--locale=C")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(PROGRAMS[-1] / program), f"--pgdata={self.directory / 'data'}", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.directory, user=owner())
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


def owner() -> str | None:
    """Returns the user who runs the programs if it is not this one: PostgreSQL refuses to run as root."""
    return "postgres" if os.geteuid() == 0 else None


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A server until the end of the block, or of this process; skips the test where PostgreSQL is missing."""
    if not PROGRAMS:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    directory = Path(tempfile.mkdtemp(prefix="pg-"))  # a short path, which a socket needs
    if (user := owner()) is not None:
        shutil.chown(directory, user)
    command = ["sh", "-c", GUARD, "sh", str(PROGRAMS[-1]), str(directory)]
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", user=user,
        start_new_session=True,  # so that a signal to the process group does not reach it
    )  # fmt: skip
    with guard:  # which closes the pipe at its end, and waits
        server = Postgres(directory)
        server.start()
        yield server
