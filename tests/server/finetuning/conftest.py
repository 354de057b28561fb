"""A PostgreSQL server for the tests of one process, and a new database of it for each test."""

from collections.abc import Iterator
from typing import Any

import pytest

from fp8serve.server.finetuning import activation, job_runner, replication


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    from tests.server.finetuning.postgres import running_postgres  # skips where psycopg is missing

    with running_postgres() as server:
        yield server


@pytest.fixture
def database(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty database, which the servers of this process look at ten times as often as others do."""
    for module in (activation, replication):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(job_runner, "SHARED_POLL_SECONDS", 0.1)
    url: str = postgres.url()
    return url
