"""Event streams during silence, with slow clients, and with clients that disconnect."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.requests import Request

from fp8serve.server.http import streams
from fp8serve.server.http.streams import (
    KEEP_ALIVE,
    WRITE_CHUNK,
    ClientGoneError,
    EventStream,
    WriteChunk,
    until_disconnect,
)
from tests.patience import eventually


class Client:
    """An ASGI client that records what is sent to it. `accepts` is clear while it reads nothing."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.direct: list[bytes] = []
        self.is_complete = False
        self.accepts, self.gone = asyncio.Event(), asyncio.Event()
        self.accepts.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.accepts.wait()
        if message["type"] == "http.response.body":
            self.chunks.append(message["body"])
            self.is_complete = not message["more_body"]

    def write_chunk(self, data: bytes) -> bool:
        if self.accepts.is_set():
            self.direct.append(data)
        return self.accepts.is_set()

    def start(self, write: WriteChunk) -> None:
        self.write = write

    async def read(self, stream: EventStream, *, direct: bool = False) -> None:
        extensions = {"extensions": {WRITE_CHUNK: self.write_chunk}} if direct else {}
        await stream({"type": "http", **extensions}, self.receive, self.send)


class Source:
    """Yields the chunks that are put into it; None ends it."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = 0
        self.delivered = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            while (chunk := await self.chunks.get()) is not None:
                self.delivered += 1
                yield chunk
        finally:
            self.closed += 1

    def stream(self, keep_alive: float = 600.0, on_close: Callable[[], None] = lambda: None) -> EventStream:
        return EventStream(self.events(), keep_alive, on_close)


@pytest.mark.parametrize("direct", [False, True])
async def test_chunks_arrive_in_order_and_the_end_follows_them(direct: bool) -> None:
    client, source = Client(), Source()
    for chunk in (b"a", b"b", None):
        source.chunks.put_nowait(chunk)
    await client.read(source.stream(), direct=direct)
    assert (client.direct if direct else client.chunks[:-1]) == [b"a", b"b"]
    assert client.is_complete
    assert source.closed == 1


async def test_a_chunk_creates_no_task() -> None:
    client, source = Client(), Source()
    reading = asyncio.create_task(client.read(source.stream(), direct=True))
    source.chunks.put_nowait(b"x")
    await eventually(lambda: len(client.direct) == 1)
    created: list[asyncio.Task[Any]] = []

    def create(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        created.append(asyncio.Task(work, loop=loop, **options))
        return created[-1]

    loop = asyncio.get_running_loop()
    loop.set_task_factory(create)
    try:
        for number in range(2, 20):
            source.chunks.put_nowait(b"x")
            await eventually(lambda count=number: len(client.direct) == count)
    finally:
        loop.set_task_factory(None)
    assert created == []
    source.chunks.put_nowait(None)
    await reading


async def test_a_chunk_is_written_at_once_while_the_generator_waits_unless_the_client_is_slow() -> None:
    client, source = Client(), Source()
    stream = EventStream(source.events(), 600.0, lambda: None, on_start=client.start)
    reading = asyncio.create_task(client.read(stream, direct=True))
    await eventually(lambda: hasattr(client, "write"))
    assert client.write(b"a")
    client.accepts.clear()
    assert not client.write(b"b")
    client.accepts.set()
    assert client.write(b"c")
    assert client.direct == [b"a", b"c"]
    source.chunks.put_nowait(None)
    await reading


async def test_a_client_that_leaves_ends_the_generator() -> None:
    client, source, closed = Client(), Source(), asyncio.Event()
    reading = asyncio.create_task(client.read(source.stream(on_close=closed.set)))
    source.chunks.put_nowait(b"a")
    await eventually(lambda: client.chunks == [b"a"])
    client.gone.set()
    await reading
    assert (source.closed, closed.is_set(), client.is_complete) == (1, True, False)


async def test_a_client_that_leaves_while_it_reads_nothing_ends_the_generator() -> None:
    client, source = Client(), Source()
    reading = asyncio.create_task(client.read(source.stream(), direct=True))
    source.chunks.put_nowait(b"a")
    await eventually(lambda: client.direct == [b"a"])
    client.accepts.clear()
    source.chunks.put_nowait(b"b")
    await eventually(lambda: source.delivered == 2)
    client.gone.set()
    await reading
    assert (source.closed, client.chunks) == (1, [])


async def test_a_slow_client_stops_the_generator_and_loses_nothing() -> None:
    client, source = Client(), Source()
    reading = asyncio.create_task(client.read(source.stream(), direct=True))
    source.chunks.put_nowait(b"0 ")
    await eventually(lambda: client.direct)
    client.accepts.clear()
    for number in range(1, 50):
        source.chunks.put_nowait(b"%d " % number)
    source.chunks.put_nowait(None)
    await eventually(lambda: source.delivered == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert source.delivered == 2
    client.accepts.set()
    await reading
    assert sorted(b"".join(client.chunks + client.direct).split(), key=int) == [b"%d" % number for number in range(50)]


async def test_silence_is_filled_with_comments_and_a_flow_of_chunks_is_not() -> None:
    client, source = Client(), Source()
    reading = asyncio.create_task(client.read(source.stream(keep_alive=0.02), direct=True))
    await eventually(lambda: client.chunks.count(KEEP_ALIVE) >= 2)
    source.chunks.put_nowait(None)
    await reading
    assert client.chunks[-1] == b""
    busy, steady = Client(), Source()
    reading = asyncio.create_task(busy.read(steady.stream(keep_alive=600.0), direct=True))
    for _ in range(5):
        steady.chunks.put_nowait(b"x")
    steady.chunks.put_nowait(None)
    await reading
    assert busy.chunks == [b""]


async def test_a_comment_for_a_client_that_reads_nothing_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client, source, ticks = Client(), Source(), list[int]()
    tick = streams._KeepAlive._tick
    monkeypatch.setattr(streams._KeepAlive, "_tick", lambda each: (ticks.append(0), tick(each)))
    reading = asyncio.create_task(client.read(source.stream(keep_alive=0.002)))
    before = len(asyncio.all_tasks())
    await eventually(lambda: client.chunks)
    client.accepts.clear()
    ticks_before = len(ticks)
    await eventually(lambda: len(ticks) > ticks_before + 10)
    assert len(asyncio.all_tasks()) == before + 2  # the watch for a disconnect, and one comment that waits
    client.accepts.set()
    source.chunks.put_nowait(None)
    await reading
    assert client.is_complete


async def test_an_error_of_the_connection_is_raised_and_everything_is_closed() -> None:
    client, source, closed = Client(), Source(), asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the connection is gone")

    source.chunks.put_nowait(b"a")
    with pytest.raises(OSError, match="the connection is gone"):
        await source.stream(on_close=closed.set)({"type": "http"}, client.receive, send)
    assert (source.closed, closed.is_set()) == (1, True)


@pytest.mark.parametrize("error", [None, TimeoutError("of the work"), ValueError("of the work")], ids=str)
async def test_an_error_of_cancelled_work_is_not_taken_for_the_disconnect(error: Exception | None) -> None:
    client, started = Client(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
            raise

    request = Request({"type": "http"}, client.receive)
    answer = asyncio.create_task(until_disconnect(request, work()))
    await started.wait()
    client.gone.set()
    with pytest.raises(ClientGoneError if error is None else type(error)) as raised:
        await answer
    assert error is None or raised.value is error


async def test_a_cancelled_request_stays_cancelled() -> None:
    """Not every cancellation is a disconnect: uvicorn cancels requests when it shuts down."""
    client, source = Client(), Source()
    reading = asyncio.create_task(client.read(source.stream()))
    source.chunks.put_nowait(b"a")
    await eventually(lambda: client.chunks == [b"a"])
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert source.closed == 1
