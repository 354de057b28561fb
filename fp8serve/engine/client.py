"""The server's client of an engine process, for asyncio. It does not import torch, so that the server starts fast.

`EngineClient.start` listens on an AF_UNIX socket (mode 0600, in a private directory) and spawns `worker.py`, which
connects to the socket. The first message of the worker says that the engine is ready, or why it could not start. After
that, one task reads the worker's messages (`messages.py`) and passes each to the request or the coroutine that waits
for it. A request gets all tokens of one read in one call, however many frames they came in. If the process dies or
sends an invalid message, every request in flight ends with finish_reason "error" and a message, so nothing waits
forever.
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
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8serve.engine.messages import JsonMessage, MessageReader, TokenFrame
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.request import EngineLimits, Request
from fp8serve.errors import MachineError, RequestError
from fp8serve.logs import LogFormat
from fp8serve.processes import module_command, signal_name, to_exception, without_interrupts

log = logging.getLogger("fp8serve.server")

READ_BYTES = 2**18  # the most that one read from the engine process returns
LONG_MESSAGE_BYTES = 2**16  # after a message of this size, other tasks of the event loop get a turn
CLOSE_SECONDS = 5.0  # that the engine process may take to exit; then it is killed

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
TensorInfos = Sequence[tuple[str, str, Sequence[int]]]  # name, dtype and shape of each tensor
Deliver = Callable[[RequestOutput | Exception], None]
"""Receives the outputs of a request, or the exception that ended it. It must not raise."""
Token = tuple[int, str]  # its id, and the text that it released
WriteTokens = Callable[[list[Token]], bool]
"""Receives tokens of a request that are nothing but text, and returns True. If it returns False, it has changed
nothing, and the tokens are passed to `Deliver` as outputs. It must not raise."""


@dataclass(slots=True)
class _Stream:
    """A request in flight, with the counts of its last output."""

    request: Request
    deliver: Deliver
    number: int  # identifies the request in messages; unlike the request id, it is not used again
    write_tokens: WriteTokens | None = None
    tokens: list[Token] = field(default_factory=list)  # received and not passed on yet
    num_generated: int = 0
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # received so far


class EngineClient:
    """Controls one engine process. `start` creates it; call its methods only in the event loop that called `start`."""

    limits: EngineLimits
    info: dict[str, Any]

    def __init__(self, process: Process, connection: Connection) -> None:
        self._process = process
        self._reader, self._writer = connection
        self._streams: dict[str, _Stream] = {}  # by request id
        self._streams_by_number: dict[int, _Stream] = {}
        self._pending: list[_Stream] = []  # those that had tokens in the current read
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._partial_replies: dict[int, list[Any]] = {}
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._last_message_time = self._loop.time()
        self._exit_message: str | None = None  # how the engine process ended; None while it runs
        self._kill_reason: str | None = None  # why the connection ended, if the exit status does not say it
        self.is_draining = False  # whether the process refuses new requests and exits after those that run
        self.step_seconds = 0.0  # the duration of the current step, as of the last heartbeat
        self._read_task = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, model_dir: str | Path, options: EngineOptions | None = None, log_format: LogFormat = "plain"
    ) -> "EngineClient":
        """Spawns an engine process and returns when the engine is ready. If the engine cannot start, raises the error
        of the worker. If this coroutine is cancelled, the process is killed."""
        process, connection = await _spawn(Path(model_dir), options or EngineOptions(), log_format)
        client = cls(process, connection)
        try:
            await asyncio.shield(client._ready)
        except BaseException:
            await client.kill("The start of the engine was cancelled.")
            client._ready.exception()  # asyncio warns about an exception that is never retrieved
            raise
        return client

    @property
    def alive(self) -> bool:
        """Whether the process runs and its connection is open."""
        return self._exit_message is None and self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the last message of the process, which sends a heartbeat every second, even while it is
        busy."""
        return self._loop.time() - self._last_message_time

    @property
    def resident_bytes(self) -> int:
        """The anonymous memory of the process (RssAnon), in bytes; 0 if the system does not report it."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        return 0

    def check(self, request: Request) -> None:
        """Raises RequestError if the engine could never run this request, and MachineError if the engine process does
        not run. Nothing is sent. A grammar is checked later, by the engine process."""
        if request.request_id in self._streams:
            raise RequestError(f"A request with the id {request.request_id!r} is still running; use another id.")
        self.limits.check(request)
        self._check_running()

    def submit(self, request: Request, deliver: Deliver, write_tokens: WriteTokens | None = None) -> None:
        """Starts a request and calls `deliver` with each output, until one has a finish_reason or is an exception.
        Tokens that are nothing but text are first offered to `write_tokens`.

        Raises the errors of `check`.
        """
        self.check(request)
        self._start(request, deliver, write_tokens)

    def cancel(self, request_id: str) -> None:
        """Aborts a request whose outputs are no longer read. Does nothing if the request has ended."""
        if (stream := self._streams.get(request_id)) is not None:
            self._abort(stream)

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a request until one has a finish_reason. Closing the iterator early aborts the request.

        Raises, when called, the errors of `check`.
        """
        self.check(request)
        return self._generate(request)

    async def stats(self) -> dict[str, Any]:
        """Calls `Engine.stats` between two steps."""
        return dict(await self._call("stats"))

    async def scales(self) -> list[dict[str, Any]]:
        """Calls `Engine.scales` between two steps."""
        return list(await self._call("scales"))

    async def save_scales(self, path: Path) -> int:
        """Calls `Engine.save_scales` between two steps."""
        return int(await self._call("save_scales", path=str(path)))

    async def load_weights(self, directory: Path) -> int:
        """Calls `Engine.load_weights` with a directory, between two steps, and updates `info["weights_version"]`."""
        version = int(await self._call("load_weights", directory=str(directory)))
        self.info["weights_version"] = version
        return version

    async def stage_weights(self, directory: Path) -> None:
        """Calls `Engine.stage_weights` between two steps."""
        await self._call("stage_weights", directory=str(directory))

    async def swap_weights(self) -> None:
        """Calls `Engine.swap_weights` between two steps, and updates `info`."""
        self.info |= await self._call("swap_weights")

    async def discard_staged_weights(self) -> None:
        """Calls `Engine.discard_staged_weights` between two steps."""
        await self._call("discard_staged_weights")

    async def join_group(self, address: dict[str, Any], seconds: float) -> None:
        """Calls `WeightReceiver.join` in a thread of the engine's process. `address` has the fields of GroupAddress."""
        await self._call("join_group", address=address, seconds=seconds)

    async def leave_group(self, name: str) -> None:
        """Calls `WeightReceiver.leave`."""
        await self._call("leave_group", name=name)

    async def receive_weights(self, group: str, tensors: TensorInfos, packed_bytes: int | None, seconds: float) -> None:
        """Calls `WeightReceiver.receive` in a thread of the engine's process."""
        await self._call("receive_weights", group=group, tensors=tensors, packed_bytes=packed_bytes, seconds=seconds)

    async def read_shared_weights(self, name: str, tensors: TensorInfos) -> None:
        """Calls `WeightReceiver.read_shared` in a thread of the engine's process."""
        await self._call("read_shared_weights", name=name, tensors=tensors)

    async def discard_received_weights(self) -> None:
        """Drops the tensors that a trainer has sent."""
        await self._call("discard_received_weights")

    async def stage_received_weights(self, allow_incomplete: bool) -> str | None:
        """Calls `Engine.stage_received_weights` between two steps."""
        value = await self._call("stage_received_weights", allow_incomplete=allow_incomplete)
        return None if value is None else str(value)

    async def suspend(self) -> None:
        """Calls `Engine.suspend` between two steps."""
        await self._call("suspend")

    async def resume(self) -> None:
        """Calls `Engine.resume` between two steps."""
        await self._call("resume")

    async def abort_requests(self) -> None:
        """Ends all requests with finish_reason "abort", except the server's own."""
        await self._call("abort_requests")

    async def reset_prefix_cache(self) -> None:
        """Calls `Engine.reset_prefix_cache` between two steps."""
        await self._call("reset_prefix_cache")

    async def pop_block_changes(self) -> list[tuple[str, str | None, list[int], str]]:
        """Calls `Engine.pop_block_changes` between two steps."""
        return [tuple(change) for change in await self._call("pop_block_changes")]

    async def load_adapter(self, name: str, directory: Path) -> dict[str, Any]:
        """Calls `Engine.load_adapter` between two steps."""
        return dict(await self._call("load_adapter", name=name, directory=str(directory)))

    async def unload_adapter(self, name: str) -> None:
        """Calls `Engine.unload_adapter` between two steps."""
        await self._call("unload_adapter", name=name)

    async def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None = None) -> list[bytes]:
        """Returns the vector of every list of token ids, as little-endian FP32. Raises the errors of `Embedder.embed`,
        and RequestError if the model generates text."""
        inputs = [list(ids) for ids in inputs]
        return [b64decode(text) for text in await self._call("embed", inputs=inputs, dimensions=dimensions)]

    async def classify(self, inputs: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the scores of all labels for every list of token ids. Raises the errors of `Classifier.classify_ids`,
        and RequestError if the model has no labels."""
        arguments = {"inputs": [list(ids) for ids in inputs], "segments": [list(numbers) for numbers in segments]}
        return [list(scores) for scores in await self._call("classify", **arguments)]

    async def drain(self, deadline: float) -> None:
        """Refuses new requests, lets the running ones finish for up to `deadline` seconds, then ends the process."""
        self._write("drain", deadline=deadline)
        await self._exit(deadline + CLOSE_SECONDS)

    async def close(self) -> None:
        """Aborts all requests and ends the process now."""
        self._write("close")  # without `drain`, because a process that hangs does not read
        await self._exit(CLOSE_SECONDS)

    async def kill(self, reason: str) -> None:
        """Kills the process. Requests in flight end with the error message `reason`."""
        self._kill_reason = reason
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._exit(CLOSE_SECONDS)

    async def _generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        stream = self._start(request, items.put_nowait)
        try:
            while True:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if stream.number in self._streams_by_number:
                self._abort(stream)

    def _start(self, request: Request, deliver: Deliver, write_tokens: WriteTokens | None = None) -> _Stream:
        stream = _Stream(request, deliver, next(self._ids) % 2**32, write_tokens)
        self._streams[request.request_id] = self._streams_by_number[stream.number] = stream
        if self._exit_message is None:
            self._write("generate", stream=stream.number, request=request.to_json())
        else:
            self._fail(stream)
        return stream

    def _abort(self, stream: _Stream) -> None:
        self._forget(stream)
        self._write("abort", stream=stream.number, request_id=stream.request.request_id)

    def _forget(self, stream: _Stream) -> None:
        """Removes a request that has ended."""
        stream.tokens = []
        del self._streams_by_number[stream.number]
        if self._streams.get(stream.request.request_id) is stream:  # and no later request with the same id
            del self._streams[stream.request.request_id]

    async def _exit(self, seconds: float) -> None:
        """Waits `seconds` for the process to exit, and kills it if it has not."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.wait({self._read_task}, timeout=seconds)
        if not self._read_task.done():  # even a killed process may hang in the kernel, for example in a driver
            self._read_task.cancel()
            self._writer.close()
            self._end(self._kill_reason or "The engine process was killed but does not exit.")

    async def _call(self, op: str, **fields: Any) -> Any:
        """Sends a command and returns its reply."""
        self._check_running()
        number = next(self._ids)
        self._replies[number] = self._loop.create_future()
        try:
            self._write(op, id=number, **fields)
            with contextlib.suppress(ConnectionError):  # `_read` notices the lost connection, too
                await self._writer.drain()
            return await self._replies[number]
        except asyncio.CancelledError:
            self._write("forget", id=number)
            raise
        finally:
            del self._replies[number]
            self._partial_replies.pop(number, None)

    def _check_running(self) -> None:
        if self._exit_message is not None:
            raise MachineError(self._exit_message)

    def _write(self, op: str, **fields: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"op": op, **fields}, separators=(",", ":")).encode() + b"\n")

    async def _read(self) -> None:
        """Reads messages until the connection ends or a message is invalid; then fails all requests and calls."""
        messages = MessageReader()
        try:
            while data := await self._reader.read(READ_BYTES):
                self._last_message_time = self._loop.time()
                try:
                    for message, size in messages.feed(data):
                        self._handle(message)
                        if size > LONG_MESSAGE_BYTES:
                            self._deliver_pending()
                            await asyncio.sleep(0)
                finally:
                    self._deliver_pending()
        except ConnectionError:
            pass
        except Exception as error:
            log.exception("The engine process sent an invalid message and will be killed.")
            self._kill_reason = f"The engine process sent an invalid message ({type(error).__name__}) and was killed."
            self._end(self._kill_reason)  # before the process exits, because it may be in a long step or in a driver
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._writer.close()
        status = await self._wait_for_exit()
        if status == 0 and not messages.is_complete:
            self._kill_reason = self._kill_reason or "The engine process has ended in the middle of a message."
        self._end(self._kill_reason or _describe_exit(status))

    async def _wait_for_exit(self) -> int:
        """Returns the exit status. A process that has closed its connection and does not exit is killed."""
        try:
            return await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._kill_reason = self._kill_reason or "The engine process closed its connection and was killed."
            self._end(self._kill_reason)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            return await self._process.wait()

    def _handle(self, message: JsonMessage | TokenFrame) -> None:
        """Passes a message to the request or the coroutine that waits for it. An invalid message may raise any
        exception."""
        if isinstance(message, TokenFrame):
            self._collect_tokens(message)
            return
        match message["event"]:
            case "outputs":
                for data in message["outputs"]:
                    self._deliver(data.pop("stream"), RequestOutput.from_json(data))
            case "refused" if stream := self._streams_by_number.get(message["stream"]):
                refusal = to_exception(message, MachineError)
                self._forget(stream)
                stream.deliver(refusal)
            case "heartbeat":
                self.step_seconds = message["step_seconds"]
            case "draining":
                self.is_draining = True
            case "part" if message["id"] in self._replies:
                self._partial_replies.setdefault(message["id"], []).extend(message["value"])
            case "reply" if reply := self._replies.get(message["id"]):
                if not reply.done() and "error" in message:
                    reply.set_exception(to_exception(message, MachineError))
                elif not reply.done():
                    parts = self._partial_replies.pop(message["id"], None)
                    reply.set_result([*parts, *message["value"]] if parts else message["value"])
            case "ready":
                self.info, self.limits = message["info"], EngineLimits(**message["limits"])
                self._ready.set_result(None)
            case "failed" if self._ready.done():
                self._kill_reason = message["message"]
            case "failed":
                self._ready.set_exception(to_exception(message, MachineError))

    def _collect_tokens(self, frame: TokenFrame) -> None:
        """Appends the tokens of a frame to those that their streams have not passed on."""
        find, pending = self._streams_by_number.get, self._pending
        tokens = zip(frame.token_ids, frame.texts, strict=True)
        for number, token in zip(frame.streams, tokens, strict=True):
            if (stream := find(number)) is not None:
                if not stream.tokens:
                    pending.append(stream)
                stream.tokens.append(token)

    def _deliver_pending(self) -> None:
        """Passes on the tokens of all frames since the last call. A stream that has ended since then has no tokens."""
        for stream in self._pending:
            if stream.tokens:
                self._deliver_tokens(stream)
        self._pending.clear()

    def _deliver_tokens(self, stream: _Stream) -> None:
        """Passes on the tokens of a stream: all together, or as an output for each."""
        tokens, stream.tokens = stream.tokens, []
        count = stream.num_generated
        stream.num_generated += len(tokens)
        if stream.write_tokens is not None and stream.write_tokens(tokens):
            return
        request = stream.request
        for token_id, text in tokens:
            count += 1
            counts = len(request.prompt_token_ids), count, stream.num_cached
            stream.deliver(RequestOutput(request.request_id, text, (token_id,), None, None, *counts))

    def _deliver(self, number: int, output: RequestOutput) -> None:
        stream = self._streams_by_number.get(number)
        if stream is None:
            return
        if stream.tokens:
            self._deliver_tokens(stream)
            if self._streams_by_number.get(number) is not stream:
                return  # its receiver has cancelled it
        if output.prompt_logprobs is not None:
            stream.prompt_logprobs += output.prompt_logprobs
            if not output.num_generated:
                return  # the first token's output, with the last of these log-probabilities, follows
            output = replace(output, prompt_logprobs=tuple(stream.prompt_logprobs))
        stream.num_generated, stream.num_cached = output.num_generated, output.num_cached_tokens
        if output.finish_reason is not None:
            self._forget(stream)
        stream.deliver(output)

    def _end(self, message: str) -> None:
        """Fails all requests and calls with `message`, because the engine process has ended."""
        self._exit_message = message
        if not self._ready.done():
            self._ready.set_exception(MachineError(message))
        for stream in list(self._streams_by_number.values()):
            self._fail(stream)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(MachineError(message))

    def _fail(self, stream: _Stream) -> None:
        """Ends a request with finish_reason "error"."""
        request = stream.request
        self._forget(stream)
        stream.deliver(
            RequestOutput(
                request.request_id,
                finish_reason="error",
                num_prompt_tokens=len(request.prompt_token_ids),
                num_generated=stream.num_generated,
                error=self._exit_message,
            )
        )


async def _spawn(model_dir: Path, options: EngineOptions, log_format: LogFormat) -> tuple[Process, Connection]:
    """Starts a worker process and returns it with its connection. Raises MachineError if it ends before it connects."""
    folder = tempfile.mkdtemp(prefix="fp8serve-")  # mode 0700
    path = os.path.join(folder, "engine")
    connected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if connected.done():
            writer.close()
        else:
            connected.set_result((reader, writer))

    try:
        server = await asyncio.start_unix_server(accept, path)
        os.chmod(path, 0o600)
        try:
            arguments = ["--options", options.to_json(), "--log-format", log_format]
            return await _start_process(path, model_dir, arguments, connected)
        finally:
            server.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _start_process(
    path: str, model_dir: Path, arguments: list[str], connected: asyncio.Future[Connection]
) -> tuple[Process, Connection]:
    command = module_command("fp8serve.engine.worker", "--model", str(model_dir), "--socket", path, *arguments)
    with without_interrupts():
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((connected, ended), return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            raise MachineError(_describe_exit(ended.result()))
        return process, connected.result()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    finally:
        ended.cancel()


def _describe_exit(status: int) -> str:
    if status == -signal.SIGKILL:
        return (
            "The engine process was killed (SIGKILL). If the kernel killed it because memory ran out, use a smaller "
            "cache or model."
        )
    if status == -signal.SIGBUS:
        return (
            "The engine process was ended by SIGBUS: a file of the model became shorter, or its disk failed, while the "
            "file was read."
        )
    if status < 0:
        return f"Signal {signal_name(-status)} ended the engine process."
    return "The engine process has ended." if status == 0 else f"The engine process failed with exit status {status}."
