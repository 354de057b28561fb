"""Server-sent events, and the detection of clients that disconnect.

`EventStream` sends what an async generator yields. During a silence it sends comments, so that proxies keep the
connection open. It closes the generator when the client disconnects, which aborts the generation. The generator must
not raise: errors after the status 200 can only be sent as events. `until_disconnect` does the same for JSON responses.
`request.is_disconnected()` is not used, because behind middleware it detects a disconnect too late.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed the connection before the response was complete."""


def to_json(value: Any) -> str:
    """Returns compact JSON. Raises ValueError for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event(data: Any, *, name: str | None = None, id: int | None = None) -> bytes:  # noqa: A002 - the field's name
    """Returns a server-sent event with `data` as JSON."""
    head = (f"id: {id}\n" if id is not None else "") + (f"event: {name}\n" if name else "")
    return f"{head}data: {to_json(data)}\n\n".encode()


class EventStream(Response):
    """A `text/event-stream` response of the chunks that `events` yields. `on_close` is called when the response
    ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive: float,
        on_close: Callable[[], None],
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.keep_alive = keep_alive
        self.on_close = on_close
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"} | (headers or {}))

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks(disconnect):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await cancel(disconnect)
            with contextlib.suppress(RuntimeError):  # raised if this task was cancelled inside the generator
                await self.events.aclose()
            self.on_close()

    async def _chunks(self, disconnect: "asyncio.Task[None]") -> AsyncGenerator[bytes, None]:
        while True:
            step = asyncio.ensure_future(anext(self.events, None))
            try:
                while not step.done():
                    await asyncio.wait({step, disconnect}, timeout=self.keep_alive, return_when=asyncio.FIRST_COMPLETED)
                    if disconnect.done():
                        return
                    if not step.done():
                        yield KEEP_ALIVE
            finally:
                if not step.done():
                    await cancel(step)
            if (chunk := step.result()) is None:
                return
            yield chunk


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Cancels the task and waits until it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client closes the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await cancel(disconnect)
        if not task.done():
            await cancel(task)
