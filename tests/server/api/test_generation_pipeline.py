"""Rules of all routes that generate."""

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.server.settings import ServerLimits
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher

BODIES = {
    "/generate_stream": {"inputs": "hello"},
    "/v1/completions": {"prompt": "hello", "n": 2, "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "stream": True},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("last", ["http.response.start", "http.response.body"])
def test_a_stream_that_cannot_be_sent_frees_its_places(start: Start, path: str, last: str) -> None:
    """Even before the first output of the engine was read."""

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == last:
            raise OSError("the connection is gone")

    async def body() -> None:
        async with start() as server:
            await post(server, path, BODIES[path], send)
            admission = server.state.models.default.admission
            assert (admission.in_flight, admission.capacity.reserved, server.state.streams.count) == (0, 0, 0)

    asyncio.run(body())


class HeldEngine(FakeEngine):
    """Gives no output while `released` is clear."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.released.set()

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        await self.released.wait()
        async for output in super()._outputs(request):
            yield output


STREAMS = BODIES | {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "n": 2, "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True},
    "/v1/responses": {"input": "hello", "stream": True},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_nothing_that_counts_as_a_token_comes_before_the_first(start: Start, path: str) -> None:
    """Clients take a chunk with a choice, `message_start` or a delta for the first token."""
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    limits = ServerLimits(keep_alive_seconds=0.01)
    async with start(Launcher(HeldEngine), limits=limits) as server:
        server.launcher.engine.released.clear()  # type: ignore[attr-defined]
        stream = asyncio.create_task(post(server, path, STREAMS[path], send))
        await eventually(lambda: any(b": keep-alive" in piece for piece in sent), "a sign of life")
        early = [line for line in b"".join(sent).splitlines() if line.startswith(b"data: ")]
        server.launcher.engine.released.set()  # type: ignore[attr-defined]
        await stream
    kinds = {json.loads(line.removeprefix(b"data: ")).get("type") for line in early}
    assert kinds <= {"response.created", "response.in_progress"}
    assert len(b"".join(sent).splitlines()) > len(early) + 3


async def post(server: Server, path: str, body: Any, send: Any) -> None:
    """Hands one request to the application; httpx would collect a stream before it shows any of it."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await server.app(scope | {"http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
