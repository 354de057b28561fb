"""Server-sent events, and the detection of clients that disconnect.

`EventStream` sends what an async generator yields. During a silence it sends comments, so that proxies keep the
connection open. It closes the generator when the client disconnects, which aborts the generation. The generator must
not raise: errors after the status 200 can only be sent as events. `until_disconnect` aborts the work for a JSON
response when the client disconnects. `request.is_disconnected()` is not used, because behind middleware it detects a
disconnect too late.

A chunk costs no task and no timer: the generator runs in the task of the request, and one timer looks twice per
`keep_alive` whether the stream was silent. fp8serve's own HTTP protocol (connections.py) puts two functions into the
scope: `write_chunk` writes a chunk to the socket without h11, and `on_disconnect` calls back when the client
disconnects. On other servers, a task waits for the disconnect.
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
WRITE_CHUNK = "fp8serve.write_chunk"
"""The extension of the ASGI scope with the server's function of the type WriteChunk."""
ON_DISCONNECT = "fp8serve.on_disconnect"
"""The extension of the ASGI scope with the server's function of the type OnDisconnect."""
OnDisconnect = Callable[[Callable[[], None]], Callable[[], None]]
"""Registers a function that is called when the client disconnects, and returns a function that revokes this."""
WriteChunk = Callable[[bytes], bool]
"""Writes a part of a response's body and returns True, or returns False if the part must be passed to `send`."""


class ClientGoneError(Exception):
    """The client closed the connection before the response was complete."""


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


string_to_json = json.encoder.encode_basestring
"""Returns a string as JSON, as `to_json` does, in one call of C."""


def to_json(value: Any) -> str:
    """Returns compact JSON. Raises ValueError for NaN and infinity."""
    return _ENCODER.encode(value)


def event(data: Any, *, name: str | None = None, id: int | None = None) -> bytes:  # noqa: A002 - the field's name
    """Returns a server-sent event with `data` as JSON."""
    head = (f"id: {id}\n" if id is not None else "") + (f"event: {name}\n" if name else "")
    return f"{head}data: {to_json(data)}\n\n".encode()


class EventStream(Response):
    """A `text/event-stream` response of the chunks that `events` yields. `on_close` is called when the response ends.

    `on_start` gets a function that writes a chunk at once, even while `events` waits, and returns True. If the function
    returns False, nothing was written, and `events` must yield the chunk.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive: float,
        on_close: Callable[[], None],
        headers: dict[str, str] | None = None,
        on_start: Callable[[WriteChunk], None] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.events = events
        self.keep_alive = keep_alive
        self.on_close = on_close
        self.on_start = on_start
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"} | (headers or {}))

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write_chunk: WriteChunk | None = scope.get("extensions", {}).get(WRITE_CHUNK)
        keep_alive = _KeepAlive(send, self.keep_alive)

        def write(chunk: bytes) -> bool:
            if write_chunk is None or not write_chunk(chunk):
                return False
            keep_alive.is_silent = False
            return True

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with _until_disconnect(scope, receive) as limit:
                keep_alive.start()
                if self.on_start is not None and write_chunk is not None:
                    self.on_start(write)
                async for chunk in self.events:
                    if not write(chunk):
                        await keep_alive.send_chunk(chunk)
            await keep_alive.stop()
            if not limit.expired():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await keep_alive.stop()
            with contextlib.suppress(RuntimeError):  # raised if this task was cancelled inside the generator
                await self.events.aclose()
            self.on_close()


class _KeepAlive:
    """Sends a comment whenever a stream was silent for between half of `seconds` and `seconds`."""

    def __init__(self, send: Send, seconds: float) -> None:
        self.is_silent = True
        self._send, self._seconds = send, seconds
        self._is_sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / 2, self._tick)

    async def send_chunk(self, chunk: bytes) -> None:
        """Sends a chunk, which may wait for a slow client."""
        self.is_silent, self._is_sending = False, True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_sending = False

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comment is not None:
            await cancel(self._comment)
            self._comment = None

    def _tick(self) -> None:
        is_idle = self._comment is None or self._comment.done()
        if self.is_silent and not self._is_sending and is_idle:
            self._comment = asyncio.create_task(self.send_chunk(KEEP_ALIVE))
        self.is_silent = True
        self.start()


@contextlib.asynccontextmanager
async def _until_disconnect(scope: Scope, receive: Receive) -> AsyncGenerator[asyncio.Timeout, None]:
    """Runs a block until the client disconnects. Then the block is cancelled, and the yielded timeout has `expired`.
    The request's body must have been read."""

    def expire() -> None:
        limit.reschedule(asyncio.get_running_loop().time())

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        expire()

    on_disconnect: OnDisconnect | None = scope.get("extensions", {}).get(ON_DISCONNECT)
    failure: Exception | None = None
    try:
        async with asyncio.timeout(None) as limit:
            revoke = None if on_disconnect is None else on_disconnect(expire)
            watcher = asyncio.create_task(watch()) if on_disconnect is None else None
            try:
                yield limit
            except Exception as error:  # a TimeoutError of the block itself is not that of the disconnect
                failure = error
                raise
            finally:
                if revoke is not None:
                    revoke()
                if watcher is not None:
                    await cancel(watcher)
    except TimeoutError as error:
        if error is failure:
            raise


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Cancels the task and waits until it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises ClientGoneError."""
    async with _until_disconnect(request.scope, request.receive):
        return await work
    raise ClientGoneError
