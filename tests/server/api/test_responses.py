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


async def ask(server: Server, said: str, /, **further: Any) -> Any:
    body = {"input": said, "max_output_tokens": len(said)} | further
    return await server.client.post("/v1/responses", json=body)


async def answer(server: Server, said: str, /, **further: Any) -> dict[str, Any]:
    told = await ask(server, said, **further)
    assert told.status_code == 200, told.text
    ResponseObject.model_validate(told.json())
    found: dict[str, Any] = told.json()
    return found


async def events(server: Server, said: str, /, **further: Any) -> list[dict[str, Any]]:
    told = await ask(server, said, stream=True, **further)
    assert told.status_code == 200, told.text
    found = []
    for piece in told.text.strip().split("\n\n"):
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_message(talking: Any) -> None:
    async with talking() as server:
        found = await answer(server, "Hello", instructions="Be brief.", metadata={"a": "b"}, store=True)
        assert (found["object"], found["status"]) == ("response", "incomplete")
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found["output"][0]["content"][0]["text"] == "Hello"
        assert (found["store"], found["metadata"], found["instructions"]) == (False, {"a": "b"}, "Be brief.")
        assert found["usage"]["total_tokens"] == 10


async def test_reasoning_text_and_calls_are_items(talking: Any) -> None:
    async with talking(reasoning_parser="think") as server:
        found = await answer(server, f"<think>Hm.</think>So: {CALL}{CALL}", tools=[TOOL])
        thought, message, *calls = found["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert message["content"][0]["text"] == "So:"
        assert [(call["name"], call["arguments"]) for call in calls] == [("weather", '{"city": "Paris"}')] * 2
        assert len({call["call_id"] for call in calls}) == 2
        assert 0 < found["usage"]["output_tokens_details"]["reasoning_tokens"] < found["usage"]["output_tokens"]
        assert len((await answer(server, CALL + CALL, tools=[TOOL], parallel_tool_calls=False))["output"]) == 1
        plain = await answer(server, CALL, tools=[TOOL], tool_choice="none")
        assert plain["output"][0]["content"][0]["text"] == CALL


async def test_a_stream_builds_the_same_response(talking: Any) -> None:
    async with talking(reasoning_parser="think") as server:
        found = await events(server, f"<think>Hm.</think>So: {CALL}", tools=[TOOL])
        assert [e["type"] for e in found[:2]] == ["response.created", "response.in_progress"]
        assert found[-1]["type"] == "response.incomplete"
        output = found[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert [e["item"] for e in found if e["type"] == "response.output_item.done"] == output
        begun = [e["item"]["id"] for e in found if e["type"] == "response.output_item.added"]
        assert begun == [item["id"] for item in output]
        joined: dict[str, str] = {}
        for e in found:
            if e["type"].endswith(".delta"):
                joined[e["type"]] = joined.get(e["type"], "") + e["delta"]
        assert joined == {
            "response.reasoning_text.delta": "Hm.",
            "response.output_text.delta": "So:",
            "response.function_call_arguments.delta": '{"city": "Paris"}',
        }
        done = next(e for e in found if e["type"] == "response.output_text.done")
        assert (done["text"], done["content_index"], done["output_index"]) == ("So:", 0, 1)


async def test_the_form_of_an_answer_and_a_call_that_has_to_come(talking: Any) -> None:
    async with talking() as server:
        form = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}}
        await answer(server, "hi", text=form)
        assert json.loads(server.launcher.engine.requests[-1].params.json_schema) == WEATHER
        await answer(server, "hi", text={"format": {"type": "json_object"}})
        assert server.launcher.engine.requests[-1].params.json_schema
        forced = await answer(server, CALL, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
        assert forced["output"][0]["name"] == "weather"
        assert "named_0" in server.launcher.engine.requests[-1].params.grammar
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
        said = await answer(server, CALL, tools=[TOOL], tool_choice=allowed)
        assert said["tool_choice"] == allowed
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
    said = plain_messages(chat.messages)
    roles = ["system", "system", "user", "assistant", "tool", "assistant", "assistant"]
    assert [message["role"] for message in said] == roles
    assert (said[3]["content"], said[3]["reasoning_content"]) == ("I look.", "Hm.")
    assert said[3]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert (said[4]["name"], said[4]["content"]) == ("weather", "18 degrees")
    variables = template_variables(chat)
    assert (variables["enable_thinking"], variables["reasoning_effort"]) == (True, "low")


@pytest.mark.parametrize(
    ("change", "named"),
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
async def test_nonsense_is_refused_by_name(talking: Any, change: dict[str, Any], named: str) -> None:
    async with talking() as server:
        said = await ask(server, "hi", **change)
        assert said.status_code == 400, said.text
        assert named in said.json()["error"]["message"]


async def test_what_is_not_stored_is_named(start: Start) -> None:
    async with start() as server:
        error = (await ask(server, "hi", previous_response_id="resp_1")).json()["error"]
        assert error["param"] == "previous_response_id"


async def test_a_long_request_says_the_same(talking: Any) -> None:
    """A parser process checks it, and writes it again without empty fields."""
    async with talking() as server:
        form = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}
        items = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, CALLED, RESULT]
        asked = {"input": [*items, {"role": "user", "content": "hi"}], "text": form, "max_output_tokens": 2}
        tools = [TOOL | {"description": "Weather. " * 20_000}]
        told = await server.client.post("/v1/responses", json=asked | {"tools": tools})
        assert told.json()["output"][0]["content"][0]["text"] == "hi"
        assert told.json()["text"]["format"]["schema"] == WEATHER
