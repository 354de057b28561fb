"""Many streams at once from a real engine, with clients that leave, that read slowly, and an engine that dies."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import write_model
from tests.patience import eventually
from tests.server.process import Process, serving

pytestmark = pytest.mark.slow
STREAMS = 128
TOKENS = 24
PROMPTS = ["Once upon a time", "The scale of a tensor", "A history", "Numbers", "Why?", "é€😀"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    place = tmp_path_factory.mktemp("streams")
    write_model(place / "tiny", max_position_embeddings=4096)
    options: dict[str, Any] = {"model": str(place / "tiny"), "data_dir": str(place / "data"), "recipe": "bf16"}
    with serving(place / "log", **options, max_num_seqs=32, num_blocks=2000) as process:
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


def body_of(number: int, **more: Any) -> dict[str, Any]:
    prompt = PROMPTS[number % len(PROMPTS)]
    fixed = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return {"prompt": prompt, "stream": True, **fixed, **more}


class Stream:
    """A request whose stream is read from a socket, with a small buffer if it is `slow`."""

    def __init__(self, port: int, body: dict[str, Any], *, slow: bool = False) -> None:
        self._port, self._slow = port, slow
        self._body = json.dumps(body).encode()
        self.events: list[Any] = []

    async def open(self) -> "Stream":
        client = socket.socket()
        if self._slow:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self._port))
        self.reader, self.writer = await asyncio.open_connection(sock=client, limit=1024 if self._slow else 1 << 16)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(self._body)}\r\n"
        self.writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + self._body)
        return self

    async def read(self) -> "Stream":
        data = await self.reader.read(-1)
        self.writer.close()
        head, _, rest = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), data
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        self.events = [json.loads(line) for line in lines[:-1]]
        return self

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))

    @property
    def finish_reasons(self) -> list[Any]:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]

    @property
    def usage(self) -> int:
        return int(self.events[-1]["usage"]["completion_tokens"])


async def stream(server: Process, body: dict[str, Any], *, slow: bool = False) -> Stream:
    return await (await Stream(server.port, body, slow=slow).open()).read()


def whole(server: Process, body: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    answer = server.client.post("/v1/completions", json=plain)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_many_streams_at_once_have_the_text_of_whole_answers(server: Process) -> None:
    """Some of them stop at a string that several tokens complete, and a few clients read slowly."""
    texts = [whole(server, body_of(number))["choices"][0]["text"] for number in range(len(PROMPTS))]
    stops = [text[len(text) // 2 :][:5] for text in texts]
    bodies = [body_of(n, **({"stop": [stops[n % len(PROMPTS)]]} if n % 2 else {})) for n in range(STREAMS)]
    streams = await asyncio.gather(*(stream(server, body, slow=n % 16 == 0) for n, body in enumerate(bodies)))
    expected = [whole(server, body) for body in bodies[: 2 * len(PROMPTS)]]
    for number, each in enumerate(streams):
        answer = expected[number % (2 * len(PROMPTS))]
        (choice,) = answer["choices"]
        assert (each.text, each.finish_reasons) == (choice["text"], [choice["finish_reason"]])
        assert each.usage == answer["usage"]["completion_tokens"]
        assert (choice["finish_reason"] == "stop") is (number % 2 == 1)


@pytest.mark.smoke
async def test_choices_and_log_probabilities_are_those_of_one_answer(server: Process) -> None:
    body = body_of(0, n=3, logprobs=2, seed=7, temperature=1.0)
    streamed, answer = await stream(server, body), whole(server, body)
    choices = [choice for event in streamed.events for choice in event["choices"]]
    for expected in answer["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        tokens = [token for choice in mine if choice["logprobs"] for token in choice["logprobs"]["token_logprobs"]]
        assert tokens == expected["logprobs"]["token_logprobs"]
    assert streamed.usage == 3 * TOKENS


async def test_clients_that_leave_free_their_slots(server: Process) -> None:
    endless = body_of(0, max_tokens=4000)
    streams = [await Stream(server.port, endless).open() for _ in range(16)]
    for each in streams:
        await each.reader.readuntil(b"data: ")
    others = asyncio.gather(*(stream(server, body_of(number)) for number in range(4)))
    for each in streams:
        each.writer.transport.abort()
    assert {each.usage for each in await others} == {TOKENS}
    await eventually(lambda: server.metric("fp8serve_requests_in_flight") == 0)


async def test_cancelled_streams_end_with_an_error_and_the_others_go_on(server: Process) -> None:
    endless = body_of(1, max_tokens=4000)
    opened = [await Stream(server.port, endless).open() for _ in range(8)]
    for each in opened:
        await each.reader.readuntil(b"data: ")
    rows = (await asyncio.to_thread(server.client.get, "/requests")).json()["requests"]
    assert len(rows) == 8
    posts = [asyncio.to_thread(server.client.post, f"/requests/{row['id']}/cancel") for row in rows]
    other, *answers = await asyncio.gather(stream(server, body_of(2)), *posts)
    assert {answer.status_code for answer in answers} == {200}  # type: ignore[union-attr]
    assert isinstance(other, Stream)
    assert other.usage == TOKENS
    for each in opened:
        rest = await each.reader.read(-1)
        assert b"request_cancelled" in rest
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        each.writer.close()


async def test_an_engine_that_dies_ends_every_stream_with_one_error(server: Process) -> None:
    endless = body_of(3, max_tokens=4000)
    opened = [await Stream(server.port, endless).open() for _ in range(16)]
    for each in opened:
        await each.reader.readuntil(b"data: ")
    os.kill(engine_of(server), signal.SIGKILL)
    for each in opened:
        rest = await each.reader.read(-1)
        assert rest.count(b'"error"') == 1
        assert b"was killed (SIGKILL)" in rest
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        each.writer.close()
    await asyncio.to_thread(server.wait_ready)
    assert (await stream(server, body_of(0))).usage == TOKENS


def engine_of(server: Process) -> int:
    children = Path(f"/proc/{server.popen.pid}/task/{server.popen.pid}/children").read_text().split()
    (engine,) = [p for p in children if b"fp8serve.engine.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return int(engine)
