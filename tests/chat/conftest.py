"""A fake server for each test."""

from collections.abc import Iterator

import pytest

from tests.client.fake import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer().running() as server:
        yield server
