"""OpenAI's /v1/responses. The engine repeats its prompt, so the model writes the last message."""

import json
from typing import Any

import pytest

from fp8serve.server.api.chat_generation import template_variables
from fp8serve.server.api.responses import ResponseObject, to_chat_body
from fp8serve.server.schemas.messages import plain_messages
from fp8serve.server.schemas.responses_bodies import ResponsesBody
from tests.server.api.talking import CALL, WEATHER, echo
from tests.server.conftest import Server, Start

TOOL = {"type": "function", "name": "weather", "parameters": WEATHER}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "18 degrees"}


@pytest.fixture
def talking(start: Start, settings: Any) -> Any:
    return lambda **changes: start(echo(settings.model), **({"tool_parser": "hermes"} | changes))


async def ask(server: Server, prompt: str, /, **further: Any) -> Any:
    body = {"input": prompt, "max_output_tokens": len(prompt)} | further
    return await server.client.post("/v1/responses", json=body)


async def answer(server: Server, prompt: str, /, **further: Any) -> dict[str, Any]:
    response = await ask(server, prompt, **further)
    assert response.status_code == 200, response.text
    ResponseObject.model_validate(response.json())
    results: dict[str, Any] = response.json()
    return results


async def events(server: Server, prompt: str, /, **further: Any) -> list[dict[str, Any]]:
    response = await ask(server, prompt, stream=True, **further)
    assert response.status_code == 200, response.text
    results = []
    for piece in response.text.strip().split("\n\n"):
        name, data = piece.split("\n")
        results.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {results[-1]['type']}"
    assert [event["sequence_number"] for event in results] == list(range(len(results)))
    return results


async def test_a_message(talking: Any) -> None:
    async with talking() as server:
        result = await answer(server, "Hello", instructions="Be brief.", metadata={"a": "b"}, store=True)
        assert (result["object"], result["status"]) == ("response", "incomplete")
        assert result["incomplete_details"] == {"reason": "max_output_tokens"}
        assert result["output"][0]["content"][0]["text"] == "Hello"
        assert (result["store"], result["metadata"], result["instructions"]) == (False, {"a": "b"}, "Be brief.")
        assert result["usage"]["total_tokens"] == 10


async def test_reasoning_text_and_calls_are_items(talking: Any) -> None:
    async with talking(reasoning_parser="think") as server:
        result = await answer(server, f"<think>Hm.</think>So: {CALL}{CALL}", tools=[TOOL])
        thought, message, *calls = result["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert message["content"][0]["text"] == "So:"
        assert [(call["name"], call["arguments"]) for call in calls] == [("weather", '{"city": "Paris"}')] * 2
        assert len({call["call_id"] for call in calls}) == 2
        assert 0 < result["usage"]["output_tokens_details"]["reasoning_tokens"] < result["usage"]["output_tokens"]
        assert len((await answer(server, CALL + CALL, tools=[TOOL], parallel_tool_calls=False))["output"]) == 1
        plain = await answer(server, CALL, tools=[TOOL], tool_choice="none")
        assert plain["output"][0]["content"][0]["text"] == CALL


async def test_a_stream_builds_the_same_response(talking: Any) -> None:
    async with talking(reasoning_parser="think") as server:
        stream = await events(server, f"<think>Hm.</think>So: {CALL}", tools=[TOOL])
        assert [e["type"] for e in stream[:2]] == ["response.created", "response.in_progress"]
        assert stream[-1]["type"] == "response.incomplete"
        output = stream[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert [e["item"] for e in stream if e["type"] == "response.output_item.done"] == output
        added_ids = [e["item"]["id"] for e in stream if e["type"] == "response.output_item.added"]
        assert added_ids == [item["id"] for item in output]
        joined: dict[str, str] = {}
        for e in stream:
            if e["type"].endswith(".delta"):
                joined[e["type"]] = joined.get(e["type"], "") + e["delta"]
        assert joined == {
            "response.reasoning_text.delta": "Hm.",
            "response.output_text.delta": "So:",
            "response.function_call_arguments.delta": '{"city": "Paris"}',
        }
        event = next(e for e in stream if e["type"] == "response.output_text.done")
        assert (event["text"], event["content_index"], event["output_index"]) == ("So:", 0, 1)


async def test_a_text_format_becomes_a_schema_and_a_forced_call_a_grammar(talking: Any) -> None:
    async with talking() as server:
        text_format = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}}
        await answer(server, "hi", text=text_format)
        assert json.loads(server.launcher.engine.requests[-1].params.json_schema) == WEATHER
        await answer(server, "hi", text={"format": {"type": "json_object"}})
        assert server.launcher.engine.requests[-1].params.json_schema
        forced = await answer(server, CALL, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
        assert forced["output"][0]["name"] == "weather"
        assert "named_0" in server.launcher.engine.requests[-1].params.grammar
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
        result = await answer(server, CALL, tools=[TOOL], tool_choice=allowed)
        assert result["tool_choice"] == allowed
        assert "named_0" in server.launcher.engine.requests[-1].params.grammar


def test_items_become_the_messages_of_a_chat() -> None:
    text = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "In French."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [text]},
        CALLED,
        RESULT,
        {"role": "assistant", "content": "18."},
        {"role": "assistant", "content": "Degrees."},
    ]
    body = ResponsesBody.model_validate({"input": items, "instructions": "Be brief.", "reasoning": {"effort": "low"}})
    chat = to_chat_body(body)
    messages = plain_messages(chat.messages)
    roles = ["system", "system", "user", "assistant", "tool", "assistant", "assistant"]
    assert [message["role"] for message in messages] == roles
    assert (messages[3]["content"], messages[3]["reasoning_content"]) == ("I look.", "Hm.")
    assert messages[3]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert (messages[4]["name"], messages[4]["content"]) == ("weather", "18 degrees")
    variables = template_variables(chat)
    assert (variables["enable_thinking"], variables["reasoning_effort"]) == (True, "low")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: type must be"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL | {"parameters": {"type": "string"}}]}, "parameters"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"name": "other"}},
            'tool_choice: must be "none", "auto" or "required", {"type": "function", "name"',
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name is missing"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"reasoning": {"effort": "great"}}, "effort"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ],
)
async def test_an_invalid_field_is_refused_by_name(talking: Any, change: dict[str, Any], words: str) -> None:
    async with talking() as server:
        response = await ask(server, "hi", **change)
        assert response.status_code == 400, response.text
        assert words in response.json()["error"]["message"]


async def test_a_reference_to_a_stored_response_is_refused_by_name(start: Start) -> None:
    async with start() as server:
        error = (await ask(server, "hi", previous_response_id="resp_1")).json()["error"]
        assert error["param"] == "previous_response_id"


async def test_a_long_request_that_a_parser_process_reads_gets_the_same_answer(talking: Any) -> None:
    """A parser process checks the body and serializes it again without empty fields."""
    async with talking() as server:
        text_format = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}
        items = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, CALLED, RESULT]
        request = {"input": [*items, {"role": "user", "content": "hi"}], "text": text_format, "max_output_tokens": 2}
        tools = [TOOL | {"description": "Weather. " * 20_000}]
        response = await server.client.post("/v1/responses", json=request | {"tools": tools})
        assert response.json()["output"][0]["content"][0]["text"] == "hi"
        assert response.json()["text"]["format"]["schema"] == WEATHER
