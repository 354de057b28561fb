"""The engine's own process: `python -m fp8serve.engine.worker --model DIR --socket PATH [--options JSON]`.

It connects to the AF_UNIX socket on which its owner listens (`client.py`). Messages are lines of JSON.

    in    generate {request} | abort {request_id} | stats {id} | scales {id} | drain {deadline} | close
          save_scales {id, path} | load_weights {id, directory}
          embed {id, inputs, dimensions}
          classify {id, inputs, segments} | forget {id}
    out   heartbeat {step_seconds} | ready {info, limits} | failed {error, message} | outputs {outputs}
          refused {request_id, error, message} | reply {id, value} | reply {id, error, message}
          part {id, value}

Nothing that it sends is long, because the front reads it between the answers of others. Log-probabilities of a prompt
are divided among outputs that have nothing else; the last of them is in the output of the first token. Vectors and
scores come in any number of parts, whose lists precede the list of the reply.

There are three threads. This one loads the model and steps the engine. One reads the socket into an inbox, so that a
command never waits for more than the current step. One reports every second that the process lives, also during a long
step, and how long that step has taken so far, so that a stuck thread can be distinguished from a busy one. Loading
and packing are not steps.
SIGTERM drains: the worker takes nothing new, running requests may finish for `DRAIN_SECONDS`, and the rest is aborted;
the exit status is 0. When the owner disappears, the process ends. SIGINT is handled by the owner (Ctrl-C reaches the
whole group).
"""

import argparse
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, get_args

from fp8serve import logs
from fp8serve.engine.embedding_engine import ClassifyingEngine, EmbeddingEngine, EncoderEngine, EncodingCall
from fp8serve.engine.engine import Engine
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request, Task
from fp8serve.engine.task import task_of
from fp8serve.errors import Fp8ServeError, RequestError
from fp8serve.processes import describe_error, end_process

HEARTBEAT_SECONDS = 1.0
DRAIN_SECONDS = 30.0
PIECE_TOKENS = 1024  # of a prompt whose log-probabilities are in one message
PIECE_BYTES = 1 << 20  # of the vectors or scores in one message; one alone may be longer
FLOAT_BYTES = 22  # of a number in JSON, at most
PACK_SECONDS = 0.02  # packing time of an idle engine between two looks at the inbox
NO_SCALES = "Scales follow the traffic of models that write text, and of no other."
NO_WEIGHTS = "Weights are replaced in models that write text, and this one does not."
NO_ADAPTERS = "Adapters are for models that write text, and this one does not."

Message = dict[str, Any]


class Connection:
    """The socket: any thread sends whole lines; a thread of its own reads lines into an inbox."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self.inbox: SimpleQueue[Message] = SimpleQueue()  # its put may be called in a signal handler
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, event: str, **fields: Any) -> None:
        """Sends one line; an owner that is gone is noticed by the reader, not here."""
        line = encoded(event, fields)
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
                for line in lines:
                    self.inbox.put(json.loads(line) | {"arrived": time.monotonic()})
        finally:
            self.inbox.put({"op": "close"})


def encoded(event: str, fields: dict[str, Any]) -> bytes:
    """A line of the protocol."""
    return json.dumps({"event": event, **fields}, separators=(",", ":")).encode() + b"\n"


class Worker:
    """Steps an engine, and handles the commands of the inbox between steps."""

    def __init__(self, connection: Connection, engine: Engine | EncoderEngine) -> None:
        self._connection = connection
        self._engine = engine
        self._closed = False
        self._step_began: float | None = None
        self._deadline: float | None = None  # of draining, on the monotonic clock
        self._commands: dict[str, Callable[[Message], None]] = {
            "generate": self._generate,
            "abort": self._abort,
            "stats": lambda message: self._reply(message, self._engine.stats()),
            "scales": lambda message: self._reply(message, self._engine.scales()),
            "save_scales": self._writing(NO_SCALES, lambda e, m: e.save_scales(m["path"])),
            "load_weights": self._writing(NO_WEIGHTS, lambda e, m: e.load_weights(Path(m["directory"]))),
            "load_adapter": self._writing(NO_ADAPTERS, lambda e, m: e.load_adapter(m["name"], m["directory"])),
            "unload_adapter": self._writing(NO_ADAPTERS, lambda e, m: e.unload_adapter(m["name"])),
            "embed": self._encode,
            "classify": self._encode,
            "forget": self._forget,
            "drain": self._drain,
            "close": self._close,
        }

    def run(self) -> None:
        """Until closed, or drained."""
        while not self._closed:
            self._handle_commands()
            if self._engine.has_work():
                self._step()
            if self._deadline is not None and (not self._engine.has_work() or time.monotonic() >= self._deadline):
                break
        self._send_outputs(self._engine.abort_all())
        self._engine.save_prefixes()

    @property
    def step_seconds(self) -> float:
        """How long the current step has taken so far; 0 between steps. Read by another thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _step(self) -> None:
        self._step_began = time.monotonic()
        self._send_outputs(self._engine.step())
        if isinstance(self._engine, EncoderEngine):
            for call in self._engine.take_answered():
                self._send_values(call.number, call.answers)
        self._step_began = None

    def _handle_commands(self) -> None:
        """Handles all waiting commands; waits for one when there is nothing else to do."""
        idle = not self._engine.has_work() and self._deadline is None and not self._engine.pack_weights(PACK_SECONDS)
        with contextlib.suppress(Empty):
            message = self._connection.inbox.get(block=idle)
            while True:
                self._commands[message["op"]](message)
                message = self._connection.inbox.get(block=False)

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        short = [output.to_json() for output in outputs if output.prompt_logprobs is None]
        if short:
            self._connection.send("outputs", outputs=short)
        if len(short) == len(outputs):
            return
        for output in outputs:
            if output.prompt_logprobs is not None:
                for piece in _pieces(output):
                    self._connection.send("outputs", outputs=[piece.to_json()])

    def _send_values(self, number: int, values: list[str | list[float]]) -> None:
        """Replies with the values of an encoder's call: vectors as base64, or lists of scores."""
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
                raise RequestError("The engine is shutting down and takes no new requests.")
            self._engine.add_request(Request.from_json(message["request"]), message["arrived"])
        except Fp8ServeError as problem:
            self._connection.send("refused", request_id=message["request"]["request_id"], **describe_error(problem))

    def _writing(self, refusal: str, call: Callable[[Engine, Message], Any]) -> Callable[[Message], None]:
        """Replies with the result of `call`, or with an error: `refusal` if the model does not write text."""

        def command(message: Message) -> None:
            try:
                if isinstance(self._engine, EncoderEngine):
                    raise RequestError(refusal)
                self._reply(message, call(self._engine, message))
            except Fp8ServeError as problem:
                self._connection.send("reply", id=message["id"], **describe_error(problem))

        return command

    def _encode(self, message: Message) -> None:
        try:
            if not isinstance(self._engine, EncoderEngine):
                raise RequestError("This model writes text and makes no vectors; serve an embedding model.")
            call = EncodingCall(message["id"], message["inputs"], message.get("segments"), message.get("dimensions"))
            (self._engine.embed if message["op"] == "embed" else self._engine.classify)(call)
        except Fp8ServeError as problem:
            self._connection.send("reply", id=message["id"], **describe_error(problem))

    def _forget(self, message: Message) -> None:
        if isinstance(self._engine, EncoderEngine):
            self._engine.forget(message["id"])

    def _abort(self, message: Message) -> None:
        output = self._engine.abort(message["request_id"])
        self._send_outputs([output] if output else [])

    def _reply(self, message: Message, value: Any) -> None:
        self._connection.send("reply", id=message["id"], value=value)

    def _drain(self, message: Message) -> None:
        deadline = time.monotonic() + message["deadline"]
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _close(self, message: Message) -> None:
        self._closed = True


def _pieces(output: RequestOutput) -> Iterator[RequestOutput]:
    """An output whose log-probabilities of the prompt are divided; the last piece has everything else, too."""
    values = output.prompt_logprobs or ()
    while len(values) > PIECE_TOKENS:
        yield RequestOutput(output.request_id, prompt_logprobs=values[:PIECE_TOKENS])
        values = values[PIECE_TOKENS:]
    yield replace(output, prompt_logprobs=values)


class Heartbeat:
    """Sends a heartbeat every second until it is stopped. `step_seconds`: how long the current step has taken."""

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
    """The engine; None if it cannot be loaded, which is reported to the owner."""
    try:
        return _ENGINES[task_of(model, options.task)](model, **asdict(options))
    except Fp8ServeError as problem:
        connection.send("failed", **describe_error(problem))
    except Exception as problem:
        connection.send("failed", error="", message=f"The engine failed to start: {type(problem).__name__}: {problem}")
        raise
    return None


def serve(connection: Connection, heartbeat: Heartbeat, model: Path, options: EngineOptions) -> int:
    """Exit status of the process."""
    engine = _load(connection, model, options)
    if engine is None:
        return 1
    worker = Worker(connection, engine)
    heartbeat.step_seconds = lambda: worker.step_seconds
    signal.signal(signal.SIGTERM, lambda *_: connection.inbox.put({"op": "drain", "deadline": DRAIN_SECONDS}))
    connection.send("ready", info=engine.info(), limits=asdict(engine.limits))
    worker.run()
    return 0


def main(arguments: list[str] | None = None) -> int:
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
        return serve(connection, heartbeat, parsed.model, EngineOptions.from_json(parsed.options))
    finally:
        heartbeat.stop()


if __name__ == "__main__":
    end_process(main())
