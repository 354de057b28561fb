"""The front process's handle on an engine process. asyncio; imports no torch, so a front process starts at once.

`EngineClient.start` listens on an AF_UNIX socket (mode 0600, in a private directory), spawns `worker.py`, which
connects to it, and waits for the first message: ready, or one sentence that says why not. From then on one task reads
lines and hands each to the caller that waits for it. When the process dies for any reason, or sends what cannot be
read, every request in flight ends with finish_reason "error" and a sentence, and nothing waits for ever.

Nothing is ever unpickled: requests and outputs are JSON of plain dataclasses.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import tempfile
from asyncio.subprocess import Process
from base64 import b64decode
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8serve.engine.options import EngineOptions
from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.request import EngineLimits, Request
from fp8serve.errors import MachineError, RequestError
from fp8serve.logs import LogFormat
from fp8serve.processes import error_of, module_command, signal_name, without_interrupts

log = logging.getLogger("fp8serve.server")

MAX_LINE = 2**26  # bytes of a message from the engine; worker.py says what it divides
LONG_LINE = 2**16  # bytes of a message after which other tasks get their turn
CLOSE_SECONDS = 5.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class _Stream:
    """A request in flight, on this side."""

    request: Request
    arrived: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    num_generated: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of pieces that have arrived


class EngineClient:
    """One engine process. Made by `start`; all methods belong to the event loop that made it."""

    limits: EngineLimits
    info: dict[str, Any]

    def __init__(self, process: Process, connection: Connection) -> None:
        self._process = process
        self._reader, self._writer = connection
        self._streams: dict[str, _Stream] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._partial_replies: dict[int, list[Any]] = {}
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._last_sign = self._loop.time()
        self._ended: str | None = None  # the sentence that says how the process ended
        self._why: str | None = None  # the reason for which this process killed it
        self.step_seconds = 0.0  # seconds that the current step had taken at the last heartbeat
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, model_dir: str | Path, options: EngineOptions | None = None, log_format: LogFormat = "plain"
    ) -> "EngineClient":
        """Spawns the process and waits until it is ready; raises the worker's own error if it is not.

        Cancelling it, as a deadline does, ends the process.
        """
        process, connection = await _spawn(Path(model_dir), options or EngineOptions(), log_format)
        client = cls(process, connection)
        try:
            await asyncio.shield(client._ready)
        except BaseException:
            await client.kill("The engine was given up before it was ready.")
            client._ready.exception()  # asyncio warns about an exception that is never retrieved
            raise
        return client

    @property
    def alive(self) -> bool:
        """The process runs and its connection is open."""
        return self._ended is None and self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the process last gave a sign of life; it gives one every second, also while it is busy."""
        return self._loop.time() - self._last_sign

    @property
    def resident_bytes(self) -> int:
        """Memory that the process holds and that no file could give back; 0 where the system does not say."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        return 0

    def check(self, request: Request) -> None:
        """RequestError, before anything is sent, when the request could never run. The engine checks its form."""
        if request.request_id in self._streams:
            raise RequestError(f"A request with the id {request.request_id!r} is still running; use another id.")
        self.limits.check(request)

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs until one has a finish_reason; closing the iterator early aborts the request.

        Raises as `check` does, at once; MachineError when the process is not running.
        """
        self.check(request)
        self._require_life()
        return self._generate(request)

    async def abort(self, request_id: str) -> None:
        """Ends a request at the next step; its iterator then yields a last output with finish_reason "abort"."""
        await self._send("abort", request_id=request_id)

    async def stats(self) -> dict[str, Any]:
        """`Engine.stats`, between two steps."""
        return dict(await self._ask("stats"))

    async def scales(self) -> list[dict[str, Any]]:
        """`Engine.scales`, between two steps."""
        return list(await self._ask("scales"))

    async def save_scales(self, path: Path) -> int:
        """`Engine.save_scales`, between two steps."""
        return int(await self._ask("save_scales", path=str(path)))

    async def load_weights(self, directory: Path) -> int:
        """`Engine.load_weights` of a directory, between two steps; `info` says the version, too."""
        version = int(await self._ask("load_weights", directory=str(directory)))
        self.info["weights_version"] = version
        return version

    async def load_adapter(self, name: str, directory: Path) -> dict[str, Any]:
        """`Engine.load_adapter`, between two steps."""
        return dict(await self._ask("load_adapter", name=name, directory=str(directory)))

    async def unload_adapter(self, name: str) -> None:
        """`Engine.unload_adapter`, between two steps."""
        await self._ask("unload_adapter", name=name)

    async def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None = None) -> list[bytes]:
        """The vector of each list of token ids: FP32, little-endian. RequestError: see `Embedder.embed`, or the model
        writes text."""
        inputs = [list(ids) for ids in inputs]
        return [b64decode(text) for text in await self._ask("embed", inputs=inputs, dimensions=dimensions)]

    async def classify(self, inputs: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> list[list[float]]:
        """The score of every label for each list of token ids. RequestError: see `Classifier.classify_ids`, or the
        model has no labels."""
        rows = {"inputs": [list(ids) for ids in inputs], "segments": [list(parts) for parts in segments]}
        return [list(scores) for scores in await self._ask("classify", **rows)]

    async def drain(self, deadline: float) -> None:
        """Takes no new request, lets running ones finish for `deadline` seconds, then ends the process."""
        self._write("drain", deadline=deadline)
        await self._exit(deadline + CLOSE_SECONDS)

    async def close(self) -> None:
        """Ends the process now and aborts its requests."""
        self._write("close")  # without waiting: a process that hangs does not read
        await self._exit(CLOSE_SECONDS)

    async def kill(self, why: str) -> None:
        """Ends a process that does not answer; requests in flight end with the sentence `why`."""
        self._why = why
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._exit(CLOSE_SECONDS)

    async def _generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        stream = self._streams[request.request_id] = _Stream(request)
        finished = False
        try:
            await self._send("generate", request=request.to_json())
            if self._ended is not None:
                self._fail(stream)
            while not finished:
                output = await stream.arrived.get()
                finished = isinstance(output, Exception) or output.finish_reason is not None
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            del self._streams[request.request_id]
            if not finished:
                self._write("abort", request_id=request.request_id)

    async def _exit(self, seconds: float) -> None:
        """Waits for the process to end by itself, and kills it after `seconds`."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.wait({self._reading}, timeout=seconds)
        if not self._reading.done():  # the kernel holds the process, for example in a driver; do not wait for it
            self._reading.cancel()
            self._writer.close()
            self._end(self._why or "The engine process does not end.")

    async def _ask(self, op: str, **fields: Any) -> Any:
        self._require_life()
        number = next(self._ids)
        self._replies[number] = self._loop.create_future()
        try:
            await self._send(op, id=number, **fields)
            return await self._replies[number]
        except asyncio.CancelledError:
            self._write("forget", id=number)
            raise
        finally:
            del self._replies[number]
            self._partial_replies.pop(number, None)

    def _require_life(self) -> None:
        if self._ended is not None:
            raise MachineError(self._ended)

    def _write(self, op: str, **fields: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"op": op, **fields}, separators=(",", ":")).encode() + b"\n")

    async def _send(self, op: str, **fields: Any) -> None:
        self._write(op, **fields)
        with contextlib.suppress(ConnectionError):  # the reading task notices the same thing
            await self._writer.drain()

    async def _read(self) -> None:
        """Reads until the connection ends, or until a message cannot be read; then ends everything that waits."""
        try:
            while line := await self._reader.readline():
                self._last_sign = self._loop.time()
                self._take_line(line)
                if len(line) > LONG_LINE:
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        except Exception as error:
            log.exception("the engine process sent what this server cannot read; ending it")
            self._why = f"The engine process sent what this server cannot read ({type(error).__name__}), and was ended."
            self._end(self._why)  # at once: the process may be in a long step, or in a driver
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._writer.close()
        status = await self._process.wait()
        self._end(self._why or _ending(status))

    def _take_line(self, line: bytes) -> None:
        """Hands a message to whoever waits for it. Raises whatever an invalid one makes it raise."""
        message = json.loads(line)
        match message["event"]:
            case "outputs":
                for data in message["outputs"]:
                    self._deliver(RequestOutput.from_json(data))
            case "refused" if stream := self._streams.get(message["request_id"]):
                stream.arrived.put_nowait(error_of(message, MachineError))
            case "heartbeat":
                self.step_seconds = message["step_seconds"]
            case "part" if message["id"] in self._replies:
                self._partial_replies.setdefault(message["id"], []).extend(message["value"])
            case "reply" if waiting := self._replies.get(message["id"]):
                if not waiting.done() and "error" in message:
                    waiting.set_exception(error_of(message, MachineError))
                elif not waiting.done():
                    before = self._partial_replies.pop(message["id"], None)
                    waiting.set_result([*before, *message["value"]] if before else message["value"])
            case "ready":
                self.info, self.limits = message["info"], EngineLimits(**message["limits"])
                self._ready.set_result(None)
            case "failed":
                self._ready.set_exception(error_of(message, MachineError))

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.prompt_logprobs is not None:
            stream.prompt_logprobs += output.prompt_logprobs
            if not output.num_generated:
                return  # the output with the rest is still to come
            output = replace(output, prompt_logprobs=tuple(stream.prompt_logprobs))
        stream.num_generated = output.num_generated
        stream.arrived.put_nowait(output)

    def _end(self, sentence: str) -> None:
        self._ended = sentence
        if not self._ready.done():
            self._ready.set_exception(MachineError(sentence))
        for stream in self._streams.values():
            self._fail(stream)
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(MachineError(sentence))

    def _fail(self, stream: _Stream) -> None:
        """Gives a request whose process is gone its last output. A request that already has one ignores it."""
        request = stream.request
        stream.arrived.put_nowait(
            RequestOutput(
                request.request_id,
                finish_reason="error",
                num_prompt_tokens=len(request.prompt_token_ids),
                num_generated=stream.num_generated,
                error=self._ended,
            )
        )


async def _spawn(model_dir: Path, options: EngineOptions, log_format: LogFormat) -> tuple[Process, Connection]:
    """A worker process and its connection. MachineError when it ends before it connects."""
    folder = tempfile.mkdtemp(prefix="fp8serve-")  # mode 0700
    path = os.path.join(folder, "engine")
    connected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if connected.done():
            writer.close()
        else:
            connected.set_result((reader, writer))

    try:
        server = await asyncio.start_unix_server(accept, path, limit=MAX_LINE)
        os.chmod(path, 0o600)
        try:
            arguments = ["--options", options.to_json(), "--log-format", log_format]
            return await _spawned(path, model_dir, arguments, connected)
        finally:
            server.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _spawned(
    path: str, model_dir: Path, arguments: list[str], connected: asyncio.Future[Connection]
) -> tuple[Process, Connection]:
    command = module_command("fp8serve.engine.worker", "--model", str(model_dir), "--socket", path, *arguments)
    with without_interrupts():
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((connected, ended), return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            raise MachineError(_ending(ended.result()))
        return process, connected.result()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    finally:
        ended.cancel()


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return (
            "The engine process was killed (SIGKILL): by the kernel, if memory ran out (then use a smaller cache or "
            "model), or by somebody."
        )
    if status < 0:
        return f"The engine process was ended by signal {signal_name(-status)}."
    return "The engine process has ended." if status == 0 else f"The engine process failed with exit status {status}."
