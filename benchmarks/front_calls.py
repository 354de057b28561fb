"""The server's work for a token, counted in one process: python -m benchmarks.front_calls

front_time measures processes that other programs disturb. Here the application, its HTTP protocol and its connection to
an engine process run in this process, on real sockets, and every frame of tokens is handed to that connection by hand.
So the number of functions that a token calls is exact, and the processor time of a token can be the least of many
rounds:

    calls      Python and C functions that one more stream calls for a token and its event
    us         microseconds of the processor for it, with the kernel's part: the fastest of `--rounds` rounds

Both are the slope between two numbers of streams; all streams get a token in every frame. Prints JSON. `--profile`
prints what a token's time is spent on instead.
"""

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import pstats
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState as HttpState

from benchmarks.front_time import INFO, LIMITS, ROUTES, request_bytes
from fp8serve.engine.client import EngineClient
from fp8serve.engine.messages import encode_json, encode_tokens
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from fp8serve.server.app import create_app
from fp8serve.server.http.connections import timed_protocol
from fp8serve.server.serving.served_weights import WeightSource
from fp8serve.server.settings import ServerLimits, Settings

STREAMS = (16, 48)
STEPS = 32  # frames of a round
TOKENS = 1 << 14  # of a stream, more than it gets
STATS = {"running": 0, "waiting": 0, "kv_usage": 0.0, "prefilling": []}


class EngineStandIn:
    """Stands for an engine process, and for the connection on which it receives commands. It answers a request with one
    token, which is the last one unless the request asks for `TOKENS`."""

    pid, returncode = os.getpid(), None

    def __init__(self) -> None:
        self.messages = asyncio.StreamReader()
        self.streams: list[int] = []  # the numbers of the requests that run
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def kill(self) -> None:
        self._ended.set()

    def write(self, line: bytes) -> None:
        command = json.loads(line)
        match command["op"]:
            case "generate":
                request, number = command["request"], command["stream"]
                output = {"stream": number, "request_id": request["request_id"], "text_delta": "a", "token_ids": [97]}
                if request["params"].get("max_new_tokens") == TOKENS:
                    self.streams.append(number)
                else:
                    output["finish_reason"] = "length"
                self.send("outputs", outputs=[output | {"num_generated": 1}])
            case "stats":
                self.send("reply", id=command["id"], value=STATS)
            case "scales":
                self.send("reply", id=command["id"], value=[])
            case "close" | "drain":
                self._ended.set()
                self.messages.feed_eof()

    def send(self, event: str, **fields: Any) -> None:
        self.messages.feed_data(encode_json(event, fields))

    def is_closing(self) -> bool:
        return False

    async def drain(self) -> None: ...

    def close(self) -> None: ...


class InstantFront:
    """A server in this process whose streams all decode, with an engine that is driven by hand."""

    def __init__(self, directory: Path, route: str) -> None:
        from tests.server.fakes import model_dir

        self._route, self._sockets = route, list[socket.socket]()
        self._engine = EngineStandIn()
        queue = 4 * max(STREAMS)
        limits = ServerLimits(queue=queue, streams=queue)
        model = model_dir(directory / "model")
        self._settings = Settings(model=model, data_dir=directory / "data", train_on="share", limits=limits)

    async def _start_engine(self, _: WeightSource) -> tuple[EngineClient, TokenizerFacts]:
        from tests.server.fakes import byte_tokenizer

        client = EngineClient(self._engine, (self._engine.messages, self._engine))  # type: ignore[arg-type]
        self._engine.send("ready", info=INFO, limits=LIMITS)
        await client._ready
        return client, TokenizerFacts.from_tokenizer(byte_tokenizer())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["InstantFront"]:
        app = create_app(self._settings, self._start_engine, ("false",))
        protocol = timed_protocol(self._settings.limits, 1 << 10)
        config = uvicorn.Config(app, http=protocol, ws="none", log_config=None, access_log=False)
        config.load()
        loop, state = asyncio.get_running_loop(), HttpState()
        async with app.router.lifespan_context(app):
            listener = await loop.create_server(lambda: protocol(config, state, {}, loop), "127.0.0.1", 0)
            self._address = listener.sockets[0].getsockname()
            model = app.state.server.models.default
            while not model.ready:
                if model.problem is not None:
                    raise model.problem
                await asyncio.sleep(0.01)
            try:
                yield self
            finally:
                for each in self._sockets:
                    each.close()
                listener.close()
                while state.connections:
                    await asyncio.sleep(0.01)

    async def open(self, count: int) -> None:
        """Opens streams until there are `count`, each with its first token."""
        loop = asyncio.get_running_loop()
        request = request_bytes(self._route, TOKENS)
        while len(self._sockets) < count:
            client = socket.socket()
            client.setblocking(False)
            await loop.sock_connect(client, self._address)
            await loop.sock_sendall(client, request)
            self._sockets.append(client)
        while len(self._engine.streams) < count or await self.read():
            await asyncio.sleep(0.01)

    async def step(self) -> None:
        """Sends a token to every stream, and lets the server write the events."""
        count = len(self._engine.streams)
        self._engine.messages.feed_data(encode_tokens(self._engine.streams, [7] * count, [" word"] * count))
        for _ in range(4):  # turns of the event loop: the read, and tasks or callbacks that write
            await asyncio.sleep(0)

    async def read(self) -> int:
        """Reads what has arrived. Returns the number of events."""
        events = 0
        await asyncio.sleep(0.01)
        for client in self._sockets:
            with contextlib.suppress(BlockingIOError):
                while data := client.recv(1 << 16):
                    events += data.count(b"data: {")
        return events


async def measure(route: str, rounds: int, streams: tuple[int, int] = STREAMS) -> dict[str, Any]:
    """Returns the calls and the microseconds of a token."""
    figures: dict[str, list[float]] = {"calls": [], "us": []}
    with tempfile.TemporaryDirectory() as directory:
        async with InstantFront(Path(directory), route).running() as front:
            for count in streams:
                await front.open(count)
                profiler = cProfile.Profile()
                profiler.enable()
                for _ in range(STEPS):
                    await front.step()
                profiler.disable()
                figures["calls"].append(pstats.Stats(profiler).total_calls / STEPS)  # type: ignore[attr-defined]
                assert await front.read() == STEPS * count
                figures["us"].append(min([await _step_us(front) for _ in range(rounds)]))
    slopes = {name: (large - small) / (streams[1] - streams[0]) for name, (small, large) in figures.items()}
    return {"route": route, "streams": list(streams)} | {name: round(slope, 2) for name, slope in slopes.items()}


async def _step_us(front: InstantFront) -> float:
    start = time.process_time()
    for _ in range(STEPS):
        await front.step()
    seconds = time.process_time() - start
    await front.read()
    return seconds / STEPS * 1e6


async def profile(route: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with InstantFront(Path(directory), route).running() as front:
            await front.open(STREAMS[1])
            with cProfile.Profile() as profiler:
                for _ in range(STEPS):
                    await front.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--route", choices=ROUTES, default="/v1/completions")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        asyncio.run(profile(options.route))
    else:
        print(json.dumps(asyncio.run(measure(options.route, options.rounds)), indent=1))


if __name__ == "__main__":
    main()
