"""What an engine's process sends, however long or wrong it is: nobody waits for ever, and other requests go on."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8serve.engine import client as client_module
from fp8serve.engine import worker as worker_module
from fp8serve.engine.client import MAX_LINE_BYTES, EngineClient
from fp8serve.engine.embedding_engine import EncoderEngine
from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.worker import Worker
from fp8serve.errors import MachineError

# An engine's process that is ready, waits for two requests and a question, and sends the line in its first argument.
PROGRAM = """
import json, socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[sys.argv.index("--socket") + 1])
commands = peer.makefile("rb")
limits = {"max_model_len": 99, "num_blocks": 99, "block_size": 16, "vocab_size": 99}
peer.sendall(json.dumps({"event": "ready", "info": {}, "limits": limits}).encode() + b"\\n")
for _ in range(3):
    commands.readline()
line = sys.argv[1]
peer.sendall((b"x" * int(line) if line.isdigit() else line.encode()) + b"\\n")
for _ in commands:
    pass
"""
Start = Callable[[str], Awaitable[EngineClient]]


@pytest.fixture
async def sender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Starts an engine's process that sends one line when it has three commands."""
    started: list[EngineClient] = []

    async def start(line: str) -> EngineClient:
        monkeypatch.setattr(
            client_module, "module_command", lambda _, *rest: (sys.executable, "-c", PROGRAM, line, *rest)
        )
        started.append(await EngineClient.start(tmp_path))
        return started[-1]

    yield start
    for each in started:
        await each.close()


async def answer(client: EngineClient, name: str) -> RequestOutput:
    """Its last output."""
    request = Request(name, (1, 2), SamplingParams(max_new_tokens=4))
    return [output async for output in client.generate(request)][-1]


@pytest.mark.parametrize(
    "line",
    [
        str(MAX_LINE_BYTES + 1),
        "{",
        "\xff",
        "[]",
        "{}",
        '{"event":"outputs"}',
        '{"event":"outputs","outputs":[{"token_ids":7}]}',
        '{"event":"reply"}',
        '{"event":"ready","info":{},"limits":{}}',
        '{"event":"refused","request_id":"one"}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:40],
)
async def test_what_cannot_be_read_ends_everything_that_waits(line: str, sender: Start) -> None:
    client = await sender(line)
    tasks = [asyncio.create_task(answer(client, name)) for name in ("one", "two")]
    question = asyncio.create_task(client.stats())
    for output in await asyncio.gather(*tasks):
        assert output.finish_reason == "error"
        assert "sent an invalid message" in (output.error or "")
    with pytest.raises(MachineError, match="sent an invalid message"):
        await question
    assert not client.alive  # so that the supervisor starts another
    with pytest.raises(MachineError, match="sent an invalid message"):
        client.generate(Request("late", (1,)))


# -- long answers go in pieces -----------------------------------------------------------------------------------------


class Wire:
    """A connection that hands each line to a client."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def send(self, event: str, **fields: Any) -> None:
        self.lines.append(worker_module.encode(event, fields))


def in_pieces(engine: Any) -> tuple[Worker, Wire]:
    wire = Wire()
    worker = Worker(wire, engine)  # type: ignore[arg-type]
    return worker, wire


def taker() -> EngineClient:
    """A client without a process, which is handed messages."""
    client = EngineClient.__new__(EngineClient)
    client._streams, client._replies, client._partial_replies = {}, {}, {}
    return client


def logprobs(count: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(i, -0.25, tuple((i + k, -1.0 * k) for k in range(20))) for i in range(count))


@pytest.mark.parametrize("count", [1, 1000, 5000])
def test_log_probabilities_of_a_prompt_arrive_in_pieces_as_one_output(count: int) -> None:
    expected = RequestOutput("r", "a", (5,), num_generated=1, prompt_logprobs=logprobs(count))
    other = RequestOutput("s", "b", (6,), num_generated=1)
    worker, wire = in_pieces(SimpleNamespace())
    worker._send_outputs([other, expected])
    assert max(map(len, wire.lines)) < 2 * worker_module.PIECE_BYTES
    assert len(wire.lines) > count // 4000
    client = taker()
    delivered: list[RequestOutput | Exception] = []
    client._streams = {name: client_module._Stream(Request(name, (1,)), delivered.append) for name in ("r", "s")}
    for line in wire.lines:
        client._handle_line(line)
    assert delivered == [other, expected]


async def test_vectors_and_scores_arrive_in_pieces_as_one_reply() -> None:
    values = ["x" * 40_000 for _ in range(100)]
    engine = EncoderEngine.__new__(EncoderEngine)
    worker, wire = in_pieces(engine)
    engine.step = list  # type: ignore[method-assign]
    engine.pop_finished_calls = lambda: [SimpleNamespace(number=3, results=values)]  # type: ignore[method-assign,return-value,list-item]
    worker._step()
    assert max(map(len, wire.lines)) < 2 * worker_module.PIECE_BYTES
    assert len(wire.lines) > 3
    client = taker()
    client._replies = {3: asyncio.get_running_loop().create_future()}
    for line in wire.lines:
        client._handle_line(line)
    assert client._replies[3].result() == values
    assert not client._partial_replies
