"""The engine process: `python -m fp8serve.engine.worker --model DIR --socket PATH [--options JSON]`.

The process connects to the AF_UNIX socket of its client (`client.py`). It reads lines of JSON and sends the messages of
`messages.py`: JSON, and one frame for all tokens of a step that are nothing but text.

    in    generate {stream, request} | abort {stream, request_id} | stats {id} | scales {id} | drain {deadline} | close
          save_scales {id, path} | load_weights {id, directory}
          stage_weights {id, directory} | swap_weights {id} | discard_staged_weights {id}
          join_group {id, address, seconds} | leave_group {id, name} | receive_weights {id, group, tensors,
          packed_bytes, seconds} | read_shared_weights {id, name, tensors} | discard_received_weights {id}
          stage_received_weights {id, allow_incomplete}
          suspend {id} | resume {id} | abort_requests {id} | reset_prefix_cache {id}
          pop_block_changes {id}
          load_adapter {id, name, directory} | unload_adapter {id, name}
          embed {id, inputs, dimensions}
          classify {id, inputs, segments} | forget {id}
    out   heartbeat {step_seconds} | ready {info, limits} | failed {error, message} | draining
          outputs {outputs: [{stream, ...}]} | refused {stream, error, message}
          reply {id, value} | reply {id, error, message} | part {id, value} | a frame of tokens

`stream` is the client's number of a request. A client may use the id of a cancelled request again while messages about
that request are on their way, so the number, and not the id, says which request a message is about.

All messages are short, because the server's event loop reads them between other work. The log-probabilities of a prompt
are split over several outputs, of which only the last has a token. Long lists of vectors or scores are sent as several
parts; the reply has the last part.

The process has three threads, and one more while weights arrive from a trainer. The main thread loads the model and
steps the engine. The second thread reads commands into an inbox, so that a command waits for at most one step. The
third thread sends a heartbeat every second, with the duration of the current step. So the client can tell a dead
process from a long step, and a long step from an endless one. Loading and packing are not steps.

An engine with `tensor_parallel` has more processes (rank_group.py). If one of them is lost, this process sends
`failed`, which may also follow `ready`, and exits.

After SIGTERM, the worker refuses new requests, lets running requests finish, and exits with status 0. The message
`draining` tells the client, which may not have got the signal. A service manager or torchrun sends the signal to the
client, too, which has the deadline: the worker also exits when the client closes the connection. SIGINT is ignored,
because Ctrl-C reaches the client, too, which then ends the worker.
"""

import argparse
import contextlib
import json
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, get_args

from fp8serve import logs
from fp8serve.engine.defaults import worker_options
from fp8serve.engine.embedding import ClassifyingEngine, EmbeddingEngine, EncoderEngine, EncodingCall
from fp8serve.engine.engine import Engine
from fp8serve.engine.messages import encode_json, encode_tokens
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request, Task
from fp8serve.engine.sequence import StepOutput
from fp8serve.engine.task import task_of
from fp8serve.engine.weight_receiver import GroupAddress, TensorInfo, WeightReceiver
from fp8serve.errors import Fp8ServeError, MachineError, RequestError, one_line
from fp8serve.processes import describe_error, end_process, process_seconds

HEARTBEAT_SECONDS = 1.0
PIECE_TOKENS = 1024  # prompt tokens whose log-probabilities are in one message
PIECE_BYTES = 1 << 20  # of vectors or scores in one message; a single longer vector is not split
FLOAT_BYTES = 22  # the most that a number in JSON takes
PACK_SECONDS = 0.02  # that an idle engine packs weights before it looks at the inbox again
NO_SCALES = "Only a model that writes text updates its scales from requests, and this model does not write text."
NO_WEIGHTS = "Only the weights of a model that writes text can be replaced, and this model does not write text."
NO_PAUSE = "Only a model that writes text can be paused, and this model does not write text."
NO_BLOCKS = "Only a model that writes text has a prefix cache, and this model does not write text."
NO_ADAPTERS = "Only a model that writes text can load adapters, and this model does not write text."

Message = dict[str, Any]


class Connection:
    """The connection to the client. Any thread may send messages; a background thread reads commands into `inbox`. If
    the client is lost before an engine is loaded, that thread ends this process."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._send_lock = threading.Lock()
        self.is_loading = True  # whether the main thread does not read the inbox yet
        self.inbox: SimpleQueue[Message] = SimpleQueue()  # reentrant, because a signal handler calls put
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, event: str, **fields: Any) -> None:
        """Sends one JSON message."""
        self.send_bytes(encode_json(event, fields))

    def send_bytes(self, messages: bytes) -> None:
        """Sends encoded messages. A lost connection is ignored here, because `_read` ends the worker then."""
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(messages)

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
                for line in lines:
                    self.inbox.put(json.loads(line) | {"arrived": time.monotonic()})
        finally:
            self.inbox.put({"op": "close"})
            if self.is_loading:
                end_process(1)


class Worker:
    """Steps an engine and handles commands between steps."""

    def __init__(self, connection: Connection, engine: Engine | EncoderEngine) -> None:
        self._connection = connection
        self._engine = engine
        self._streams: dict[str, int] = {}  # the client's numbers of running requests, by request id
        self._is_closed = False
        self._step_start: float | None = None
        self._deadline: float | None = None  # of draining, on the monotonic clock
        self._commands: dict[str, Callable[[Message], None]] = {
            "generate": self._generate,
            "abort": self._abort,
            "stats": lambda message: self._reply(message, self._engine.stats()),
            "scales": lambda message: self._reply(message, self._engine.scales()),
            "save_scales": self._generative(NO_SCALES, lambda e, m: e.save_scales(m["path"])),
            "load_weights": self._generative(NO_WEIGHTS, lambda e, m: e.load_weights(Path(m["directory"]))),
            "stage_weights": self._generative(NO_WEIGHTS, lambda e, m: e.stage_weights(m["directory"])),
            "swap_weights": self._generative(NO_WEIGHTS, lambda e, m: e.swap_weights()),
            "discard_staged_weights": self._generative(NO_WEIGHTS, lambda e, m: e.discard_staged_weights()),
            "join_group": self._transfer(lambda r, m: r.join(GroupAddress(**m["address"]), m["seconds"])),
            "leave_group": self._transfer(lambda r, m: r.leave(m["name"]), checks=False),
            "receive_weights": self._transfer(
                lambda r, m: r.receive(m["group"], _tensor_infos(m), m["packed_bytes"], m["seconds"])
            ),
            "read_shared_weights": self._transfer(lambda r, m: r.read_shared(m["name"], _tensor_infos(m))),
            "discard_received_weights": self._transfer(lambda r, m: r.discard(), checks=False),
            "stage_received_weights": self._generative(
                NO_WEIGHTS, lambda e, m: e.stage_received_weights(m["allow_incomplete"])
            ),
            "suspend": self._generative(NO_PAUSE, lambda e, m: self._send_outputs(e.suspend())),
            "resume": self._generative(NO_PAUSE, lambda e, m: e.resume()),
            "abort_requests": self._generative(
                NO_PAUSE, lambda e, m: self._send_outputs(e.abort_requests_of_clients())
            ),
            "reset_prefix_cache": self._generative(NO_PAUSE, lambda e, m: e.reset_prefix_cache()),
            "pop_block_changes": self._generative(NO_BLOCKS, lambda e, m: e.pop_block_changes()),
            "load_adapter": self._generative(NO_ADAPTERS, lambda e, m: e.load_adapter(m["name"], m["directory"])),
            "unload_adapter": self._generative(NO_ADAPTERS, lambda e, m: e.unload_adapter(m["name"])),
            "embed": self._encode,
            "classify": self._encode,
            "forget": self._cancel,
            "drain": self._drain,
            "close": self._close,
        }

    def run(self) -> None:
        """Runs until the connection is closed or all requests are drained."""
        while not self._is_closed:
            self._handle_commands()
            if self._engine.has_work():
                self._step()
            if self._deadline is not None and (not self._engine.has_work() or time.monotonic() >= self._deadline):
                break
        self._send_outputs(self._engine.abort_all())
        self._engine.save_prefixes()

    @property
    def step_seconds(self) -> float:
        """The seconds that the current step has taken so far; 0 between steps. The heartbeat thread reads it."""
        start = self._step_start
        return 0.0 if start is None else time.monotonic() - start

    def _step(self) -> None:
        self._step_start = time.monotonic()
        if isinstance(self._engine, EncoderEngine):
            self._engine.step()
            for call in self._engine.pop_finished_calls():
                self._send_results(call.number, call.results)
        else:
            self._send_outputs(self._engine.run_step())
        self._step_start = None

    def _handle_commands(self) -> None:
        """Handles all commands in the inbox. Waits for a command if there is nothing else to do."""
        is_idle = not self._engine.has_work() and self._deadline is None and not self._engine.pack_weights(PACK_SECONDS)
        with contextlib.suppress(Empty):
            message = self._connection.inbox.get(block=is_idle)
            while True:
                self._commands[message["op"]](message)
                message = self._connection.inbox.get(block=False)

    def _send_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """Sends the outputs of a step at once and in order: those of text alone in frames, and the others as JSON. An
        output with log-probabilities of a prompt is sent in several messages."""
        messages: list[bytes] = []
        for kind, run in groupby(outputs, type):
            if kind is RequestOutput:
                messages += self._encode_other_outputs(run)  # type: ignore[arg-type]
            else:
                seqs, _, token_ids, texts = zip(*run, strict=True)
                messages.append(encode_tokens([self._streams[seq.request_id] for seq in seqs], token_ids, texts))
        if messages:
            self._connection.send_bytes(b"".join(messages))

    def _encode_other_outputs(self, outputs: Iterable[RequestOutput]) -> Iterator[bytes]:
        """Yields one message for consecutive outputs without log-probabilities of a prompt, and several messages for an
        output with them. Removes the requests that have ended."""
        for is_short, run in groupby(outputs, lambda output: output.prompt_logprobs is None):
            for part in [list(run)] if is_short else [[piece] for output in run for piece in _split_output(output)]:
                yield encode_json("outputs", {"outputs": [self._output_json(output) for output in part]})

    def _output_json(self, output: RequestOutput) -> dict[str, Any]:
        has_ended = output.finish_reason is not None
        number = self._streams.pop(output.request_id) if has_ended else self._streams[output.request_id]
        return {"stream": number, **output.to_json()}

    def _send_results(self, number: int, values: list[str | list[float]]) -> None:
        """Sends the results of a call: vectors as base64, or lists of scores."""
        part: list[str | list[float]] = []
        size = 0
        for value in values:
            if part and size > PIECE_BYTES:
                self._connection.send("part", id=number, value=part)
                part, size = [], 0
            part.append(value)
            size += len(value) if isinstance(value, str) else FLOAT_BYTES * len(value)
        self._connection.send("reply", id=number, value=part)

    def _generate(self, message: Message) -> None:
        try:
            if self._deadline is not None:
                raise MachineError("The engine is shutting down and takes no new requests.")
            request = Request.from_json(message["request"])
            self._engine.add_request(request, message["arrived"])
            self._streams[request.request_id] = message["stream"]
        except Fp8ServeError as problem:
            self._connection.send("refused", stream=message["stream"], **describe_error(problem))

    def _generative(self, refusal: str, call: Callable[[Engine, Message], Any]) -> Callable[[Message], None]:
        """Returns a command that replies with the result of `call`, or with an error. The error is `refusal` if the
        model does not write text."""

        def command(message: Message) -> None:
            try:
                if isinstance(self._engine, EncoderEngine):
                    raise RequestError(refusal)
                self._reply(message, call(self._engine, message))
            except Fp8ServeError as problem:
                self._connection.send("reply", id=message["id"], **describe_error(problem))

        return command

    def _transfer(
        self, call: Callable[[WeightReceiver, Message], None], *, checks: bool = True
    ) -> Callable[[Message], None]:
        """Returns a command that runs `call` in a thread, which replies, while the engine continues to generate. With
        `checks`, an engine whose weights cannot be exchanged refuses it, before gigabytes arrive."""

        def call_receiver(engine: Engine, message: Message) -> None:
            if checks:
                engine.check_can_swap()
            call(engine.receiver, message)

        transfer = self._generative(NO_WEIGHTS, call_receiver)

        def run(message: Message) -> None:
            try:
                transfer(message)
            except Exception as problem:  # a defect, for which the client would wait forever
                text = f"The transfer failed: {type(problem).__name__}: {one_line(problem)}."
                self._connection.send("reply", id=message["id"], **describe_error(MachineError(text)))
                raise

        return lambda message: threading.Thread(target=run, args=(message,), daemon=True).start()

    def _encode(self, message: Message) -> None:
        try:
            if not isinstance(self._engine, EncoderEngine):
                raise RequestError("This model writes text and makes no vectors; serve an embedding model.")
            call = EncodingCall(message["id"], message["inputs"], message.get("segments"), message.get("dimensions"))
            (self._engine.embed if message["op"] == "embed" else self._engine.classify)(call)
        except Fp8ServeError as problem:
            self._connection.send("reply", id=message["id"], **describe_error(problem))

    def _cancel(self, message: Message) -> None:
        if isinstance(self._engine, EncoderEngine):
            self._engine.cancel(message["id"])

    def _abort(self, message: Message) -> None:
        if self._streams.get(message["request_id"]) == message["stream"]:  # it has not ended
            output = self._engine.abort(message["request_id"])
            self._send_outputs([output] if output else [])

    def _reply(self, message: Message, value: Any) -> None:
        self._connection.send("reply", id=message["id"], value=value)

    def _drain(self, message: Message) -> None:
        deadline = time.monotonic() + message["deadline"]
        if self._deadline is None:
            self._connection.send("draining")
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _close(self, message: Message) -> None:
        self._is_closed = True


def _tensor_infos(message: Message) -> list[TensorInfo]:
    return [TensorInfo(*fields) for fields in message["tensors"]]


def _split_output(output: RequestOutput) -> Iterator[RequestOutput]:
    """Splits the log-probabilities of a prompt over several outputs. Only the last output has the other fields."""
    logprobs = output.prompt_logprobs or ()
    while len(logprobs) > PIECE_TOKENS:
        yield RequestOutput(output.request_id, prompt_logprobs=logprobs[:PIECE_TOKENS])
        logprobs = logprobs[PIECE_TOKENS:]
    yield replace(output, prompt_logprobs=logprobs)


class Heartbeat:
    """Sends a heartbeat every second until it is stopped. `step_seconds` returns the duration of the current step."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._stop = connection, threading.Event()
        self.step_seconds: Callable[[], float] = lambda: 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._connection.send("heartbeat", step_seconds=round(self.step_seconds(), 1))

    def stop(self) -> None:
        self._stop.set()


_ENGINES: dict[Task, Callable[..., Engine | EncoderEngine]] = {
    "generate": Engine, "embed": EmbeddingEngine, "classify": ClassifyingEngine
}  # fmt: skip


def _load(connection: Connection, model: Path, options: EngineOptions) -> Engine | EncoderEngine | None:
    """Loads the engine. If that fails, sends the error to the client and returns None."""

    def end(loss: Fp8ServeError) -> None:
        """Ends this process, because a rank is lost and the main thread may wait for it."""
        connection.send("failed", **describe_error(loss))
        end_process(1)

    try:
        create = _ENGINES[task_of(model, options.task)]
        arguments = asdict(worker_options(options, model))
        return create(model, on_loss=end, **arguments) if create is Engine else create(model, **arguments)
    except Fp8ServeError as problem:
        connection.send("failed", **describe_error(problem))
    except Exception as problem:
        connection.send("failed", error="", message=f"The engine failed to start: {type(problem).__name__}: {problem}")
        raise
    return None


def serve(
    connection: Connection, heartbeat: Heartbeat, model: Path, options: EngineOptions, import_seconds: float
) -> int:
    """Loads the engine and serves the client. Returns the exit status of the process.

    The message `ready` has `Engine.info` and, as `start_seconds`, the seconds of each phase of the start.
    """
    engine = _load(connection, model, options)
    if engine is None:
        return 1
    connection.is_loading = False
    worker = Worker(connection, engine)
    heartbeat.step_seconds = lambda: worker.step_seconds
    signal.signal(signal.SIGTERM, lambda *_: connection.inbox.put({"op": "drain", "deadline": math.inf}))
    start_seconds = {"imports": round(import_seconds, 3), **engine.phases.seconds}
    connection.send("ready", info=engine.info() | {"start_seconds": start_seconds}, limits=asdict(engine.limits))
    try:
        worker.run()
    except MachineError as problem:  # a step has failed on one rank of several
        connection.send("failed", **describe_error(problem))
        return 1
    if isinstance(engine, Engine):
        engine.close()
    return 0


def main(arguments: list[str] | None = None) -> int:
    import_seconds = process_seconds()
    parser = argparse.ArgumentParser(prog="python -m fp8serve.engine.worker", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--socket", required=True, help="AF_UNIX socket to connect to")
    parser.add_argument("--options", default="{}", help="EngineOptions as JSON")
    parser.add_argument("--log-format", choices=get_args(logs.LogFormat), default="plain")
    parsed = parser.parse_args(arguments)
    logs.configure(parsed.log_format, "engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(parsed.socket)
    heartbeat = Heartbeat(connection)
    try:
        return serve(connection, heartbeat, parsed.model, EngineOptions.from_json(parsed.options), import_seconds)
    finally:
        heartbeat.stop()


if __name__ == "__main__":
    end_process(main())
