"""Rules of all routes that generate."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from tests.server.conftest import Start

BODIES = {
    "/generate_stream": {"inputs": "hello"},
    "/v1/completions": {"prompt": "hello", "n": 2, "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "stream": True},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("last", ["http.response.start", "http.response.body"])
def test_a_stream_that_cannot_be_sent_frees_its_places(start: Start, path: str, last: str) -> None:
    """Even before the first output of the engine was read."""

    async def body() -> None:
        async with start() as server:
            messages = [{"type": "http.request", "body": json.dumps(BODIES[path]).encode(), "more_body": False}]

            async def receive() -> dict[str, Any]:
                if not messages:
                    await asyncio.Event().wait()
                return messages.pop()

            async def send(message: MutableMapping[str, Any]) -> None:
                if message["type"] == last:
                    raise OSError("the connection is gone")

            headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
            await server.app(scope | {"http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
            admission = server.state.models.default.admission
            assert (admission.in_flight, admission.room.reserved, server.state.streams.open) == (0, 0, 0)

    asyncio.run(body())
