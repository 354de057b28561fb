"""Anthropic's /v1/messages. The engine repeats its prompt, so the model writes the last message."""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.server.api.anthropic_messages import to_chat_body
from fp8serve.server.schemas.anthropic_bodies import MessagesBody
from fp8serve.server.schemas.messages import plain_messages
from tests.server.api.talking import CALL, WEATHER, echo
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher

TOOL = {"name": "weather", "input_schema": WEATHER}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "18 degrees"}]}


@pytest.fixture
def talking(start: Start, settings: Any) -> Any:
    return lambda **changes: start(echo(settings.model), **({"tool_parser": "hermes"} | changes))


def body(text: Any, **further: Any) -> dict[str, Any]:
    max_tokens = len(text) if isinstance(text, str) else 16
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens} | further


async def ask(server: Server, text: Any, **further: Any) -> Any:
    return await server.client.post("/v1/messages", json=body(text, **further))


async def events(server: Server, text: Any, **further: Any) -> list[dict[str, Any]]:
    response = await ask(server, text, stream=True, **further)
    assert response.status_code == 200, response.text
    results = []
    for piece in response.text.strip().split("\n\n"):
        name, data = piece.split("\n")
        results.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {results[-1]['type']}"
    return results


async def test_a_text_message_has_content_usage_and_ids(talking: Any) -> None:
    async with talking() as server:
        response = await ask(server, "Hello", system=[{"type": "text", "text": "Be brief."}], metadata={"user_id": "u"})
        message = response.json()
        assert message["content"] == [{"type": "text", "text": "Hello", "citations": None}]
        assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
        cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        assert message["usage"] == {"input_tokens": 5, "output_tokens": 5} | cache
        assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_thinking_text_and_calls_are_blocks(talking: Any) -> None:
    async with talking(reasoning_parser="think") as server:
        message = (await ask(server, f"<think>Hm.</think>So: {CALL}{CALL}", tools=[TOOL])).json()
        thinking, text, *calls = message["content"]
        assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
        assert text["text"] == "So:"
        assert [(call["type"], call["name"], call["input"]) for call in calls] == [
            ("tool_use", "weather", {"city": "Paris"})
        ] * 2
        assert len({call["id"] for call in calls}) == 2
        one = {"type": "auto", "disable_parallel_tool_use": True}
        assert len((await ask(server, CALL + CALL, tools=[TOOL], tool_choice=one)).json()["content"]) == 1
        plain = (await ask(server, CALL, tools=[TOOL], tool_choice={"type": "none"})).json()
        assert plain["content"][0]["text"] == CALL


async def test_a_stream_has_the_sequence_of_anthropic(talking: Any) -> None:
    async with talking(reasoning_parser="think") as server:
        stream = await events(server, f"<think>Hm.</think>So: {CALL}", tools=[TOOL])
        assert [e["type"] for e in stream[:3]] == ["message_start", "ping", "content_block_start"]
        assert [e["type"] for e in stream[-2:]] == ["message_delta", "message_stop"]
        assert stream[0]["message"]["content"] == []
        blocks = [e["content_block"]["type"] for e in stream if e["type"] == "content_block_start"]
        assert blocks == ["thinking", "text", "tool_use"]
        assert [e["index"] for e in stream if e["type"] == "content_block_stop"] == [0, 1, 2]
        joined: dict[str, str] = {}
        for delta in (e["delta"] for e in stream if e["type"] == "content_block_delta"):
            kind = delta.pop("type")
            joined[kind] = joined.get(kind, "") + "".join(delta.values())
        assert joined == {"thinking_delta": "Hm.", "text_delta": "So:", "input_json_delta": '{"city": "Paris"}'}
        assert stream[-2]["usage"]["output_tokens"] > 0


class CachingEngine(FakeEngine):
    """An engine that reports two cached tokens for every prompt."""

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        async for output in super()._outputs(request):
            yield replace(output, num_cached_tokens=2)


async def test_usage_counts_cached_tokens_separately(start: Start) -> None:
    async with start(Launcher(CachingEngine)) as server:
        counted = await server.client.post("/v1/messages/count_tokens", json={"messages": body("Hello")["messages"]})
        stream = await events(server, "Hello")
        for usage in ((await ask(server, "Hello")).json()["usage"], stream[0]["message"]["usage"], stream[-2]["usage"]):
            assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (2, 0)
            assert usage["input_tokens"] + 2 == counted.json()["input_tokens"]


async def test_stop_reasons(talking: Any) -> None:
    async with talking() as server:
        stopped = (await ask(server, "one STOP two", stop_sequences=["a", "b", "c", "d", "STOP"])).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "STOP")
        assert stopped["content"][0]["text"] == "one "
        cut = (await ask(server, CALL, tools=[TOOL], max_tokens=len(CALL) - 25)).json()
        assert cut["stop_reason"] == "max_tokens"
        assert cut["content"][0]["input"].keys() == {"INVALID_JSON"}


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, USE]},
    {"role": "user", "content": [{"type": "text", "text": "So?"}, RESULT | {"is_error": True}]},
]


async def test_a_history_becomes_the_messages_of_a_chat(start: Start) -> None:
    chat = to_chat_body(MessagesBody.model_validate({"system": "Be brief.", "messages": TURNS, "max_tokens": 4}))
    system, user, assistant, result, again = plain_messages(chat.messages)
    assert (system["role"], system["content"], user["content"]) == ("system", "Be brief.", "Weather?")
    assert assistant["reasoning_content"] == "Hm."
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "weather", "Error: 18 degrees")
    assert (again["role"], again["content"]) == ("user", "So?")
    async with start() as server:
        counted = await server.client.post("/v1/messages/count_tokens", json={"messages": TURNS})
        request = {"messages": [message.model_dump(exclude_unset=True) for message in chat.messages[1:]]}
        assert counted.json() == {"input_tokens": (await server.client.post("/tokenize", json=request)).json()["count"]}


async def test_effort_and_thinking_become_template_variables() -> None:
    request = body("hi", thinking={"type": "disabled"}, output_config={"effort": "low"})
    chat = to_chat_body(MessagesBody.model_validate(request))
    assert chat.chat_template_kwargs == {"reasoning_effort": "low", "enable_thinking": False}


async def test_an_answer_that_fills_the_context_says_so(talking: Any) -> None:
    async with talking() as server:
        message = (await ask(server, "Hello" * 10, max_tokens=100_000)).json()
        assert message["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_can_be_forced(talking: Any, choice: dict[str, str]) -> None:
    async with talking() as server:
        message = (await ask(server, CALL, tools=[TOOL], tool_choice=choice)).json()
        assert message["content"][0]["name"] == "weather"
        assert "named_0" in server.launcher.engine.requests[-1].params.grammar


async def test_output_config_constrains_the_answer_to_a_schema(talking: Any) -> None:
    async with talking() as server:
        output_config = {"format": {"type": "json_schema", "schema": WEATHER}}
        assert (await ask(server, "hi", output_config=output_config)).status_code == 200
        assert json.loads(server.launcher.engine.requests[-1].params.json_schema) == WEATHER


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "document"}]}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0"),
        ({"system": 1}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n is not a field"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
async def test_an_invalid_field_is_refused_by_name(talking: Any, change: dict[str, Any], words: str) -> None:
    async with talking() as server:
        response = await ask(server, "hi", **change)
        assert response.status_code == 400, response.text
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert words in error["error"]["message"]
        assert error["request_id"] == response.headers["request-id"]


async def test_keys_and_models_are_checked_as_anthropics_client_sends_them(start: Start) -> None:
    async with start(api_key="secret") as server:
        headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        for key, status, kind in (("wrong", 401, "authentication_error"), ("secret", 404, "not_found_error")):
            request = body("hi", model="claude")
            response = await server.client.post("/v1/messages", json=request, headers=headers | {"x-api-key": key})
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert (await server.client.post("/v1/messages", json=body("hi"), headers=headers)).status_code == 200


async def test_a_long_request_that_a_parser_process_reads_gets_the_same_answer(talking: Any) -> None:
    """A parser process checks the body and serializes it again without empty fields."""
    async with talking() as server:
        turns = [*TURNS, {"role": "user", "content": "hi"}]
        tools = [TOOL | {"description": "Weather. " * 20_000}]
        output_config = {"format": {"type": "json_schema", "schema": WEATHER}}
        request = {"messages": turns, "tools": tools, "max_tokens": 2, "output_config": output_config}
        response = await server.client.post("/v1/messages", json=request)
        assert response.json()["content"][0]["text"] == "hi"
        turns[0] = {"role": "user", "content": [{"type": "image"}]}
        response = await server.client.post("/v1/messages", json=request)
        assert "image" in response.json()["error"]["message"]
