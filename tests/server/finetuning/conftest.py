"""A PostgreSQL server for the tests of one process, and a new database of it for each test."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    from tests.server.finetuning.postgres import running_postgres  # skips where psycopg is missing

    with running_postgres() as server:
        yield server


@pytest.fixture
def database(postgres: Any) -> str:
    """The URL of an empty database."""
    url: str = postgres.url()
    return url
