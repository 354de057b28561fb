"""Messages from the engine process to its client: invalid ones end all waiting calls, and long ones arrive in
pieces."""

import asyncio
import itertools
import struct
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8serve.engine import client as client_module
from fp8serve.engine import worker as worker_module
from fp8serve.engine.client import EngineClient, Token
from fp8serve.engine.embedding import EncoderEngine
from fp8serve.engine.messages import MAX_MESSAGE_BYTES, MessageReader, encode_json
from fp8serve.engine.output import RequestOutput, Timing, TokenLogprob
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.sequence import StepOutput, to_request_output
from fp8serve.engine.worker import Worker
from fp8serve.errors import MachineError, RequestError
from tests.patience import eventually

# Stands for an engine process: it reports that it is ready, waits for two requests and a question, sends the bytes in
# its first argument, and closes the connection if the second argument is "close".
PROGRAM = """
import json, socket, struct, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[sys.argv.index("--socket") + 1])
commands = peer.makefile("rb")
limits = {"max_model_len": 99, "num_blocks": 99, "block_size": 16, "vocab_size": 99}
ready = json.dumps({"event": "ready", "info": {}, "limits": limits}).encode()
peer.sendall(struct.pack("<BI", 1, len(ready)) + ready)
for _ in range(3):
    commands.readline()
peer.sendall(bytes.fromhex(sys.argv[1]))
if sys.argv[2] == "close":
    peer.shutdown(socket.SHUT_WR)
for _ in commands:
    pass
"""
Start = Callable[..., Awaitable[EngineClient]]


@pytest.fixture
async def sender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Returns a function that starts a process which sends the given bytes once it has got three commands."""
    started: list[EngineClient] = []

    async def start(data: bytes, then: str = "wait") -> EngineClient:
        command = (sys.executable, "-c", PROGRAM, data.hex(), then)
        monkeypatch.setattr(client_module, "module_command", lambda _, *rest: (*command, *rest))
        started.append(await EngineClient.start(tmp_path))
        return started[-1]

    yield start
    for each in started:
        await each.close()


async def answer(client: EngineClient, name: str) -> RequestOutput:
    """Returns the last output of a request."""
    request = Request(name, (1, 2), SamplingParams(max_new_tokens=4))
    return [output async for output in client.generate(request)][-1]


def json_message(text: str) -> bytes:
    return struct.pack("<BI", 1, len(text)) + text.encode("latin-1")


def frame(*numbers: int, text: bytes = b"", kind: int = 2) -> bytes:
    payload = struct.pack(f"<{len(numbers)}I", *numbers) + text
    return struct.pack("<BI", kind, len(payload)) + payload


INVALID_MESSAGES = {
    "json": json_message("{"),
    "utf-8": json_message("\xff"),
    "list": json_message("[]"),
    "no event": json_message("{}"),
    "no outputs": json_message('{"event":"outputs"}'),
    "tokens": json_message('{"event":"outputs","outputs":[{"stream":0,"token_ids":7}]}'),
    "reply": json_message('{"event":"reply"}'),
    "ready": json_message('{"event":"ready","info":{},"limits":{}}'),
    "refused": json_message('{"event":"refused","stream":0}'),
    "no stream": json_message('{"event":"refused","request_id":"one"}'),
    "deep": json_message("[" * 60_000),
    "a line": b'{"event":"heartbeat","step_seconds":0}\n',
    "kind": frame(0, kind=3),
    "long": struct.pack("<BI", 1, MAX_MESSAGE_BYTES + 1),
    "no count": frame(),
    "count": frame(2**32 - 1),
    "arrays": frame(2, 0, 1, 7, 7, 1),
    "text": frame(1, 0, 7, 3, text=b"ab"),
    "more text": frame(1, 0, 7, 1, text=b"ab"),
    "a part of a character": frame(2, 0, 1, 7, 7, 1, 2, text="é!".encode()),
}


@pytest.mark.parametrize("data", INVALID_MESSAGES.values(), ids=INVALID_MESSAGES)
async def test_an_invalid_message_ends_all_waiting_calls(data: bytes, sender: Start) -> None:
    client = await sender(data)
    tasks = [asyncio.create_task(answer(client, name)) for name in ("one", "two")]
    question = asyncio.create_task(client.stats())
    for output in await asyncio.gather(*tasks):
        assert output.finish_reason == "error"
        assert "sent an invalid message" in (output.error or "")
    with pytest.raises(MachineError, match="sent an invalid message"):
        await question
    assert not client.alive  # so that the supervisor starts another process
    with pytest.raises(MachineError, match="sent an invalid message"):
        client.generate(Request("late", (1,)))


@pytest.mark.parametrize("length", [1, 5, 12])
async def test_a_truncated_message_ends_all_waiting_calls(length: int, sender: Start) -> None:
    client = await sender(frame(1, 0, 7, 1, text=b"a")[:length], "close")
    tasks = [asyncio.create_task(answer(client, name)) for name in ("one", "two")]
    with pytest.raises(MachineError, match="ended in the middle of a message"):
        await client.stats()
    for output in await asyncio.gather(*tasks):
        assert output.finish_reason == "error"
        assert output.error == "The engine process has ended in the middle of a message."


async def test_tokens_of_an_unknown_or_cancelled_request_are_dropped(sender: Start) -> None:
    client = await sender(frame(3, 0, 1, 99, 7, 8, 9, 1, 2, 1, text="aéb".encode()))
    request = Request("one", (1, 2), SamplingParams(max_new_tokens=4))
    first, second = list[Any](), list[Any]()
    client.submit(request, first.append)
    client.submit(replace(request, request_id="two"), second.append)
    client.cancel("one")  # cancel is the third command, after which the process sends the frame
    await eventually(lambda: second)
    assert first == []
    assert second == [RequestOutput("two", "é", (8,), num_prompt_tokens=2, num_generated=1)]


# -- numbers of requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["the end of the abort", "its last token", "a refusal"])
def test_a_message_of_a_cancelled_request_does_not_reach_a_new_one_with_the_same_id(late: str) -> None:
    def add_request(request: Request, arrived: float) -> None:
        if late == "a refusal" and request.params.max_new_tokens == 7:
            raise RequestError("The grammar is invalid.")

    def abort(request_id: str) -> RequestOutput | None:
        return RequestOutput(request_id, finish_reason="abort") if late == "the end of the abort" else None

    worker, wire = worker_and_wire(SimpleNamespace(add_request=add_request, abort=abort))
    client, commands = offline_client(), list[dict[str, Any]]()
    client._write = lambda op, **fields: commands.append({"op": op, "arrived": 0.0, **fields})  # type: ignore[method-assign]
    first, second = list[RequestOutput | Exception](), list[RequestOutput | Exception]()
    client._start(Request("same", (1,), SamplingParams(max_new_tokens=7)), first.append)
    worker._commands["generate"](commands.pop(0))
    if late == "its last token":
        worker._send_outputs([RequestOutput("same", "x", (5,), None, "length", 1, 7)])
    client.cancel("same")
    client._start(Request("same", (1,)), second.append)
    for command in commands:
        worker._commands[command["op"]](command)
    wire.read(client)
    assert (first, second) == ([], [])
    wire.messages.clear()
    last = RequestOutput("same", "y", (6,), None, "stop", 1, 1)
    worker._send_outputs([last])
    wire.read(client)
    assert (first, second) == ([], [last])
    assert not client._streams
    assert not client._streams_by_number
    assert not worker._streams


# -- frames ------------------------------------------------------------------------------------------------------------


def plain(name: str, text: str, token: int, count: int) -> RequestOutput:
    return RequestOutput(name, text, (token,), None, None, 1, count, 3)


def as_step_output(output: RequestOutput) -> StepOutput:
    """Returns the output as `Engine.run_step` returns it."""
    if not output.has_only_text or output.timing is not None:
        return output
    seq: Any = SimpleNamespace(request_id=output.request_id, num_prompt=1, num_cached=output.num_cached_tokens)
    plain_token = seq, 1 + output.num_generated, output.token_ids[0], output.text_delta
    assert to_request_output(plain_token) == output
    return plain_token


def step_outputs() -> list[RequestOutput]:
    """Returns outputs of every kind that a step may return; one request has several tokens, as with drafts."""
    first = RequestOutput("a", "x", (1,), None, None, 1, 1, 3, timing=Timing(0.5, 0.25, 0.125))
    other = RequestOutput("b", "y", (2**31,), (TokenLogprob(2, -0.5),), None, 1, 1, 3, settled_chars=(1,))
    last = RequestOutput("c", "", (5,), None, "stop", 1, 4, 3, "end", timing=Timing(0.5, 0.25, 0.125, 1.0))
    texts = ["é€😀", "", "\x00\n", "\ud7ff"]
    return [
        replace(first, request_id="c"), first, other, *(plain("a", text, i, i + 2) for i, text in enumerate(texts)),
        plain("c", "1", 2**32 - 1, 2), plain("c", "2", 0, 3), last,
        RequestOutput("b", finish_reason="abort", num_generated=1),
    ]  # fmt: skip


def outputs_of(outputs: Sequence[Any], name: str) -> list[Any]:
    return [output for output in outputs if output.request_id == name]


def test_a_stream_may_be_cancelled_while_its_tokens_are_written() -> None:
    """The last output of the stream, which arrived with the tokens, is dropped, and the connection stays open."""
    worker, wire = worker_and_wire(SimpleNamespace())
    client, received = offline_client(), list[Any]()

    def write_tokens(tokens: list[Token]) -> bool:
        client.cancel("a")
        return True

    client._start(Request("a", (1,)), received.append, write_tokens)
    client._start(Request("b", (1,)), received.append)
    for name in ("a", "b"):
        worker._streams[name] = client._streams[name].number
    worker._send_outputs([as_step_output(plain("a", "x", 1, 1))])
    last = RequestOutput("a", "", (9,), None, "stop", 1, 2)
    worker._send_outputs([last, as_step_output(plain("b", "y", 2, 1))])
    wire.read(client)
    assert [(output.request_id, output.text_delta) for output in received] == [("b", "y")]


@pytest.mark.parametrize("is_written", [True, False])
def test_tokens_of_several_frames_are_passed_on_together_before_later_outputs(is_written: bool) -> None:
    worker, wire = worker_and_wire(SimpleNamespace())
    client, received = offline_client(), list[Any]()

    def write_tokens(tokens: list[Token]) -> bool:
        received.append(tokens)
        return is_written

    client._start(Request("a", (1,)), received.append, write_tokens)
    worker._streams["a"] = client._streams["a"].number
    first, *outputs = [plain("a", text, token, token) for token, text in enumerate("xyz", 1)]
    last = RequestOutput("a", "", (9,), None, "stop", 1, 4, 3)
    for each in ([replace(first, timing=Timing(0.5, 0.25, 0.125))], outputs[:1], outputs[1:], [last]):
        worker._send_outputs(list(map(as_step_output, each)))
    wire.read(client)
    assert received == [first, [(2, "y"), (3, "z")], *([] if is_written else outputs), last]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_outputs_arrive_as_they_were_sent_however_the_bytes_are_divided(size: int) -> None:
    worker, wire = worker_and_wire(SimpleNamespace())
    client, delivered = offline_client(), list[RequestOutput | Exception]()
    for name in "abc":
        client._start(Request(name, (1,)), delivered.append)
        worker._streams[name] = client._streams[name].number
    worker._send_outputs(list(map(as_step_output, step_outputs())))
    data, reader = b"".join(wire.messages), MessageReader()
    for start in range(0, len(data), size):
        for message, _ in reader.feed(data[start : start + size]):
            client._handle(message)
    client._deliver_pending()
    assert reader.is_complete
    for name in "abc":  # the outputs of each request are in order
        assert outputs_of(delivered, name) == outputs_of(step_outputs(), name)
    assert len(delivered) == len(step_outputs())
    assert set(client._streams) == set(worker._streams) == {"a"}
    assert len(client._streams_by_number) == 1


def test_a_step_of_many_plain_tokens_is_one_short_frame() -> None:
    worker, wire = worker_and_wire(SimpleNamespace())
    names = [f"request-{number}" for number in range(128)]
    worker._streams = {name: number for number, name in enumerate(names)}
    worker._send_outputs([as_step_output(plain(name, " word", 7, 2)) for name in names])
    (message,) = wire.messages
    assert len(message) == 5 + 4 + 128 * (12 + 5)


# -- long answers go in pieces -----------------------------------------------------------------------------------------


class Wire:
    """A connection that stores its messages in `messages`."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def send(self, event: str, **fields: Any) -> None:
        self.messages.append(encode_json(event, fields))

    def send_bytes(self, messages: bytes) -> None:
        self.messages.append(messages)

    def read(self, client: EngineClient) -> list[int]:
        """Passes the stored messages to `client`. Returns their sizes in bytes."""
        reader, sizes = MessageReader(), []
        for message, size in reader.feed(b"".join(self.messages)):
            client._handle(message)
            sizes.append(size)
        client._deliver_pending()
        return sizes


def worker_and_wire(engine: Any) -> tuple[Worker, Wire]:
    wire = Wire()
    worker = Worker(wire, engine)  # type: ignore[arg-type]
    return worker, wire


def offline_client() -> EngineClient:
    """Returns a client without a process; tests pass messages to it."""
    client = EngineClient.__new__(EngineClient)
    client._streams, client._streams_by_number, client._replies, client._partial_replies = {}, {}, {}, {}
    client._ids, client._exit_message, client._pending = itertools.count(), None, []
    client._write = lambda op, **fields: None  # type: ignore[method-assign]
    return client


def logprobs(count: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(i, -0.25, tuple((i + k, -1.0 * k) for k in range(20))) for i in range(count))


@pytest.mark.parametrize("count", [1, 1000, 5000])
def test_log_probabilities_of_a_prompt_arrive_in_pieces_as_one_output(count: int) -> None:
    expected = RequestOutput("r", "a", (5,), num_generated=1, prompt_logprobs=logprobs(count))
    other = RequestOutput("s", "b", (6,), num_prompt_tokens=1, num_generated=1)
    worker, wire = worker_and_wire(SimpleNamespace())
    worker._streams = {"r": 0, "s": 1}
    worker._send_outputs([other, expected])
    client, delivered = offline_client(), list[RequestOutput | Exception]()
    for name in ("r", "s"):
        client._start(Request(name, (1,)), delivered.append)
    sizes = wire.read(client)
    assert max(sizes) < 2 * worker_module.PIECE_BYTES
    assert len(sizes) > count // 4000
    assert sorted(delivered, key=lambda output: output.request_id) == [expected, other]  # type: ignore[union-attr]


def test_the_outputs_of_a_step_arrive_in_their_order() -> None:
    first = RequestOutput("r", "a", (5,), num_generated=1, prompt_logprobs=logprobs(2000))
    second = RequestOutput("r", "b", (6,), (TokenLogprob(6, -0.5),), "length", 1, 2, settled_chars=(1,))
    others = [RequestOutput("s", "c", (7,), num_generated=1, timing=Timing(0.5, 0.25, 0.125)), first]
    worker, wire = worker_and_wire(SimpleNamespace())
    worker._streams = {"r": 0, "s": 1}
    worker._send_outputs([*others, second])
    client, delivered = offline_client(), list[RequestOutput | Exception]()
    for name in ("r", "s"):
        client._start(Request(name, (1,)), delivered.append)
    wire.read(client)
    assert delivered == [*others, second]


async def test_vectors_and_scores_arrive_in_pieces_as_one_reply() -> None:
    values = ["x" * 40_000 for _ in range(100)]
    engine = EncoderEngine.__new__(EncoderEngine)
    worker, wire = worker_and_wire(engine)
    engine.step = list  # type: ignore[method-assign]
    engine.pop_finished_calls = lambda: [SimpleNamespace(number=3, results=values)]  # type: ignore[method-assign,return-value,list-item]
    worker._step()
    client = offline_client()
    client._replies = {3: asyncio.get_running_loop().create_future()}
    sizes = wire.read(client)
    assert max(sizes) < 2 * worker_module.PIECE_BYTES
    assert len(sizes) > 3
    assert client._replies[3].result() == values
    assert not client._partial_replies
