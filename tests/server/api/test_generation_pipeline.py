"""Behaviour that all routes that generate have in common."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.api.openai.chat_routes import ChatRenderer
from fp8serve.server.api.openai.completion_routes import CompletionRenderer, TextRenderer
from fp8serve.server.http.streams import WRITE_CHUNK
from fp8serve.server.schemas.openai_bodies import ChatBody, CompletionBody
from fp8serve.server.serving.admission import Reservation
from fp8serve.server.serving.generation import Generation, build_requests
from fp8serve.server.serving.served_weights import ServedWeights
from fp8serve.server.settings import ServerLimits
from fp8serve.server.usage import Usage
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher

BODIES = {
    "/generate": {"inputs": "hello", "stream": True},
    "/v1/completions": {"prompt": "hello", "n": 2, "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "stream": True},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("last", ["http.response.start", "http.response.body"])
def test_a_stream_that_cannot_be_sent_frees_its_slots(start: Start, path: str, last: str) -> None:
    """Sending may fail even before the first output of the engine is read."""

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == last:
            raise OSError("the connection is gone")

    async def body() -> None:
        async with start() as server:
            await post(server, path, BODIES[path], send)
            admission = server.state.models.default.admission
            assert (admission.in_flight, admission.capacity.reserved, server.state.streams.count) == (0, 0, 0)

    asyncio.run(body())


class HeldEngine(FakeEngine):
    """Gives no output while `released` is clear."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.released.set()

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        await self.released.wait()
        async for output in super()._outputs(request):
            yield output


STREAMS = BODIES | {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "n": 2, "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True},
    "/v1/responses": {"input": "hello", "stream": True},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_no_event_that_clients_take_for_a_token_precedes_the_first_token(start: Start, path: str) -> None:
    """Clients take a chunk with a choice, `message_start` or a delta for the first token."""
    chunks: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        chunks.append(message.get("body", b""))

    limits = ServerLimits(keep_alive_seconds=0.01)
    async with start(Launcher(HeldEngine), limits=limits) as server:
        server.launcher.engine.released.clear()  # type: ignore[attr-defined]
        stream = asyncio.create_task(post(server, path, STREAMS[path], send))
        await eventually(lambda: any(b": keep-alive" in piece for piece in chunks), "a sign of life")
        early = [line for line in b"".join(chunks).splitlines() if line.startswith(b"data: ")]
        server.launcher.engine.released.set()  # type: ignore[attr-defined]
        await stream
    kinds = {json.loads(line.removeprefix(b"data: ")).get("type") for line in early}
    assert kinds <= {"response.created", "response.in_progress"}
    assert len(b"".join(chunks).splitlines()) > len(early) + 3


MESSAGE = {"messages": [{"role": "user", "content": "hello"}]}
PLAIN: list[tuple[type[CompletionRenderer[Any]], Any, bool]] = [
    (TextRenderer, CompletionBody(prompt="hello"), True),
    (TextRenderer, CompletionBody(prompt="hello", stream=True, stream_options={"include_usage": True}), True),
    (TextRenderer, CompletionBody(prompt="hello", logprobs=1), False),
    (TextRenderer, CompletionBody(prompt="hello", n=2), False),
    (
        TextRenderer,
        CompletionBody(
            prompt="hello", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        ),
        False,
    ),
    (ChatRenderer, ChatBody(**MESSAGE), True),
    (ChatRenderer, ChatBody(**MESSAGE, model='a "content":"" b'), True),
    (ChatRenderer, ChatBody(**MESSAGE, tools=[{"type": "function", "function": {"name": "f"}}]), False),
]


def admitted(served: ServedWeights, params: SamplingParams, reservation: Reservation, n: int = 1) -> Generation:
    return Generation(served, build_requests(served, [(97,)], params, n), n, reservation, Usage())


@pytest.mark.parametrize(("renderer_class", "body", "is_plain"), PLAIN)
async def test_the_fast_path_for_plain_text_writes_the_same_bytes(
    start: Start, renderer_class: type[CompletionRenderer[Any]], body: Any, is_plain: bool
) -> None:
    """The bytes of each output are those of a chunk that is made from its parts."""
    texts = ["a", '"\\\n\x00', "", "é€😀", "<tool_call>", "</s>"]
    async with start() as server:
        n, served = body.num_choices, server.state.served(None)
        with served.admission.reserve(n) as reservation:
            params = SamplingParams(logprobs=getattr(body, "logprobs", None) or None)
            generation = admitted(served, params, reservation, n)
        fast, slow = (renderer_class(body, generation) for _ in range(2))
        slow.created = fast.created
        for count, text in enumerate(texts, 1):
            output = RequestOutput("r", text, (7,), num_generated=count)
            events = slow.events(0, output, slow.add(0, output))
            assert fast.encode_outputs([(0, output)]) == b"".join(map(slow.encode, events))
        assert fast.has_plain_chunks is is_plain
        generation.discard()


@pytest.mark.parametrize("renderer_class", [TextRenderer, ChatRenderer])
async def test_outputs_that_arrive_together_are_one_chunk(
    start: Start, renderer_class: type[CompletionRenderer[Any]]
) -> None:
    body: Any = CompletionBody(prompt="a") if renderer_class is TextRenderer else ChatBody(**MESSAGE)
    async with start() as server:
        served = server.state.served(None)
        with served.admission.reserve(1) as reservation:
            generation = admitted(served, SamplingParams(), reservation)
        renderer = renderer_class(body, generation)
        outputs = [(0, RequestOutput("r", text, (7,), num_generated=count)) for count, text in enumerate("abcd", 1)]
        renderer.encode_outputs(outputs[:1])  # in a chat the first output brings the role
        (line,) = renderer.encode_outputs(outputs[1:]).decode().split("\n\n")[:-1]
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        assert (choice["delta"]["content"] if "delta" in choice else choice["text"]) == "bcd"
        generation.discard()


CHAT = {**MESSAGE, "stream": True}
DIRECT: dict[str, tuple[str, Any]] = {
    "completion": ("/v1/completions", {"prompt": "hello", "stream": True}),
    "usage": ("/v1/completions", {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}}),
    "stop": ("/v1/completions", {"prompt": "hello", "stream": True, "stop": ["ohel"]}),
    "logprobs": ("/v1/completions", {"prompt": "hello", "stream": True, "logprobs": 2}),
    "echo": ("/v1/completions", {"prompt": "hello", "stream": True, "echo": True}),
    "prompts": ("/v1/completions", {"prompt": ["ab", "cd"], "stream": True}),
    "n": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "chat": ("/v1/chat/completions", CHAT),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    "message": ("/v1/messages", {**CHAT, "max_tokens": 12}),
    "response": ("/v1/responses", {"input": "hello", "stream": True}),
    "native": ("/generate", {"inputs": "hello", "stream": True}),
}


@pytest.mark.parametrize("name", DIRECT)
async def test_directly_written_chunks_carry_the_same_events(start: Start, name: str) -> None:
    """The order is the same, too, although some chunks bypass `send`."""
    path, body = DIRECT[name]
    direct, mixed, refusals = list[bytes](), list[bytes](), itertools.cycle([False, False, True])

    async def send(message: MutableMapping[str, Any]) -> None:
        direct.append(message.get("body", b""))

    async def send_mixed(message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(0)  # outputs arrive while a slow client is served
        mixed.append(message.get("body", b""))

    def write_chunk(data: bytes) -> bool:
        if is_slow := next(refusals):
            return not is_slow
        mixed.append(data)
        return True

    async with start() as server:
        await post(server, path, body, send)
        await post(server, path, body, send_mixed, {"extensions": {WRITE_CHUNK: write_chunk}})
    assert normalized_events(b"".join(mixed)) == normalized_events(b"".join(direct))


async def test_an_error_of_direct_writing_ends_the_stream_with_a_message(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = list[bytes]()

    async def send(message: MutableMapping[str, Any]) -> None:
        chunks.append(message.get("body", b""))

    def write(text: str) -> bool:
        raise ValueError("a defect")

    writer = property(lambda generation: write, lambda generation, value: None)
    monkeypatch.setattr(Generation, "write_directly", writer, raising=False)
    async with start() as server:
        path, body = DIRECT["chat"]
        await post(server, path, body, send)
        assert b"The server failed while it was generating." in b"".join(chunks)
        assert "a stream could not be written" in caplog.text
        assert (await server.client.get("/requests")).json()["requests"] == []


VARYING = ("id", "created", "created_at", "item_id", "request_id", "sequence_number", "index", "output_index")


def normalized_events(stream: bytes) -> list[Any]:
    """The events of a stream without their ids; neighbours that differ only in their text are joined into one."""
    result: list[Any] = []
    for line in stream.decode().splitlines():
        if not line.startswith("data: {"):
            result += [line] if line.startswith("data: ") else []
            continue
        text = list[str]()
        event = without_text(json.loads(line.removeprefix("data: ")), text)
        if result and text and result[-1][0] == event and "choices" in event:
            result[-1][1].extend(text)
        else:
            result.append((event, text))
    return [(item[0], "".join(item[1])) if isinstance(item, tuple) else item for item in result]


def without_text(value: Any, texts: list[str]) -> Any:
    if isinstance(value, list):
        return [without_text(each, texts) for each in value]
    if not isinstance(value, dict):
        return value
    texts += [value[key] for key in ("text", "content") if isinstance(value.get(key), str)]
    fields = {key: each for key, each in value.items() if key not in (*VARYING, "text", "content")}
    return {key: without_text(each, texts) for key, each in fields.items()} | (
        {"choice": value["index"]} if "finish_reason" in value and "index" in value else {}
    )


async def post(server: Server, path: str, body: Any, send: Any, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Sends one request to the application without httpx, which would collect a whole stream first."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await server.app({**scope, "http_version": "1.1", "scheme": "http", "root_path": "", **more}, receive, send)
