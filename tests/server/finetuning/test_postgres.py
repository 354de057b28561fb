"""Connections to PostgreSQL: timeouts, a newer database, one that cannot be reached; and the server of these tests."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fp8serve.errors import MachineError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.connections import PostgresConnection
from fp8serve.server.finetuning.database import NewJob
from fp8serve.server.finetuning.job_store import JobStore
from tests.patience import until

psycopg = pytest.importorskip("psycopg")
NEW = NewJob(base="tiny", source="base", config={})
USER_OF_A_SERVER = """
from tests.server.finetuning.postgres import running_postgres
with running_postgres() as server:
    print(server.directory, flush=True)
    input()
"""


def test_a_server_whose_wait_for_another_was_cancelled_writes_again(database: str) -> None:
    with closing(JobStore(database)) as first, closing(JobStore(database)) as second:
        with second.write() as db:
            db.execute("SET lock_timeout = '1ms'")
        with first.write(), pytest.raises(Fault) as caught, second.write():
            pass
        assert caught.value.code is Code.STORAGE_UNAVAILABLE
        second.create(NEW, "ftjob-1", 100)
        assert first.get("ftjob-1").status == "queued"


def test_a_connection_has_timeouts_that_the_url_may_change(database: str) -> None:
    """Without them, a server would wait for minutes for a database whose machine is gone."""
    for url, idle in ((database, "5"), (f"{database}&keepalives_idle=7", "7")):
        with closing(PostgresConnection(url)) as connection:
            assert connection._db is not None
            parameters = connection._db.info.get_parameters()
        expected = {"connect_timeout": "10", "keepalives_idle": idle, "keepalives_interval": "5",
                    "keepalives_count": "3", "tcp_user_timeout": "15000"}  # fmt: skip
        assert {name: parameters.get(name) for name in expected} == expected


def test_the_password_of_the_environment_reaches_no_child_process(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresConnection, "_password", None)
    monkeypatch.setenv("PGPASSWORD", "secret")

    def password(connection: PostgresConnection) -> str | None:
        assert connection._db is not None
        return connection._db.info.password

    with closing(PostgresConnection(database)) as first, closing(PostgresConnection(f"{database}&password=own")) as own:
        assert "PGPASSWORD" not in os.environ
        with closing(PostgresConnection(database)) as second:
            assert [password(connection) for connection in (first, second, own)] == ["secret", "secret", "own"]
        first.close()
        first.execute("SELECT 1")  # opens the connection again
        assert password(first) == "secret"


def test_a_database_of_a_newer_version_is_refused_and_not_changed(database: str) -> None:
    with closing(JobStore(database)) as store, store.write() as db:
        db.execute("UPDATE schema_version SET version = 9")
    with pytest.raises(MachineError, match="has schema version 9, but this fp8serve reads version 6; start the"):
        JobStore(database)
    with psycopg.connect(database) as db:
        assert db.execute("SELECT version FROM schema_version").fetchone() == (9,)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://fp8serve:secret@/x?host=/nowhere", "No such file or directory"),
        ("postgresql://fp8serve:secret@/x?nonsense=1", "the URL is invalid"),
    ],
)
def test_a_database_that_cannot_be_reached_is_refused_in_one_sentence(url: str, reason: str) -> None:
    with pytest.raises(MachineError) as caught:
        JobStore(url)
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_server_of_a_killed_process_ends_and_leaves_no_files(database: str) -> None:
    """`database` skips the test where PostgreSQL is missing."""
    command, root = [sys.executable, "-c", USER_OF_A_SERVER], Path(__file__).parents[3]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        server = int((directory / "data" / "postmaster.pid").read_text().split()[0])
        assert is_running(server)
        process.kill()
    until(lambda: not is_running(server), "the end of PostgreSQL")
    until(lambda: not directory.exists(), "the removal of its files")


def is_running(pid: int) -> bool:
    """Whether the process runs. One that has ended may still have an entry, until its parent reads the exit status."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
