"""Tools on /v1/chat/completions. The engine repeats its prompt, so the model writes the user's last message."""

import json
from typing import Any

import pytest

from fp8serve.server.output_parsers.output_format import OutputFormat, detect_format
from tests.server.api.talking import CALL, echo
from tests.server.api.talking import WEATHER as SCHEMA
from tests.server.conftest import Server, Start
from tests.server.fakes import byte_tokenizer

WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """Returns the `tool_choice` of a client that allows these tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def ask(server: Server, text: str, **further: Any) -> Any:
    """Sends a request to which the model answers exactly `text`."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": len(text), "tools": [WEATHER]}
    return await server.client.post("/v1/chat/completions", json=body | further)


async def choice(server: Server, text: str, **further: Any) -> dict[str, Any]:
    response = await ask(server, text, **further)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()["choices"][0]
    return result


@pytest.fixture
def talking(start: Start, settings: Any) -> Any:
    return lambda **changes: start(echo(settings.model), **({"tool_parser": "hermes"} | changes))


async def test_a_call_in_the_text_becomes_a_tool_call(talking: Any) -> None:
    async with talking() as server:
        message = (await choice(server, "Hm. " + CALL))["message"]
        assert message["content"] == "Hm."
        (call,) = message["tool_calls"]
        assert call["id"].startswith("call_")
        assert call["type"] == "function"
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert (await choice(server, CALL))["message"]["content"] is None


async def test_a_stream_brings_the_same_tool_call(talking: Any) -> None:
    async with talking() as server:
        response = await ask(server, "Hm. " + CALL, stream=True)
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hm."
        pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert pieces[0]["function"] == {"name": "weather", "arguments": ""}
        assert pieces[0]["id"].startswith("call_")
        assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"city": "Paris"}'
        assert len(pieces) > 5
        assert all(piece["index"] == 0 and "id" not in piece for piece in pieces[1:])


async def test_without_tools_or_with_none_the_text_is_content(talking: Any) -> None:
    async with talking() as server:
        for further in ({"tools": None}, {"tool_choice": "none"}):
            message = (await choice(server, CALL, **further))["message"]
            assert message["content"] == CALL
            assert "tool_calls" not in message


async def test_one_call_at_a_time(talking: Any) -> None:
    async with talking() as server:
        assert len((await choice(server, CALL + CALL))["message"]["tool_calls"]) == 2
        assert len((await choice(server, CALL + CALL, parallel_tool_calls=False))["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_a_stop_string_cuts_off_is_no_reason_to_call(talking: Any, stream: bool) -> None:
    async with talking() as server:
        for stop, reason in {"Paris": "stop", "</tool_call>": "tool_calls"}.items():
            response = await ask(server, CALL, stop=stop, stream=stream)
            chunks = [line.removeprefix("data: ") for line in response.text.splitlines() if line.endswith("}")]
            assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == reason
            assert "tool_calls" in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_that_is_cut_off_does_not_become_content(talking: Any, stream: bool) -> None:
    """Tries every `max_tokens` that cuts off the second call. A token is a byte here."""
    async with talking() as server:
        for tokens in range(len(CALL), len(CALL) + 45):
            response = await ask(server, CALL + CALL, max_tokens=tokens, tool_choice="required", stream=stream)
            assert "tool_call>" not in response.text
            assert response.text.count('"finish_reason":"length"') == 1


async def test_a_function_without_parameters_is_called_without_arguments(talking: Any) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    async with talking() as server:
        assert (await ask(server, "hi", tools=[tool], tool_choice="required")).status_code == 200
        assert '"additionalProperties": false' in server.launcher.engine.requests[-1].params.grammar


async def test_reasoning_is_separate_from_content(talking: Any) -> None:
    async with talking(reasoning_parser="think") as server:
        message = (await choice(server, "<think>\nHm.\n</think>\n\nYes."))["message"]
        assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "Yes.")
        response = await ask(server, "<think>Hm.</think>Yes.", stream=True)
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"] for line in response.text.splitlines() if '"delta"' in line
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


async def test_tools_are_refused_if_no_tool_parser_is_known(talking: Any) -> None:
    async with talking(tool_parser="none") as server:
        response = await ask(server, "hi")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert (await ask(server, "hi", tools=[])).status_code == 200


FUNCTION = {"name": "weather", "arguments": '{"city": "Paris"}', "description": None}  # as huggingface_hub sends it
CALLED = [{"id": "call_1", "type": "function", "function": FUNCTION, "provider_specific_fields": None}]  # as litellm
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}


async def test_a_history_of_calls_reaches_the_template(start: Start) -> None:
    """The test server's own template knows no tools."""
    async with start() as server:
        question = {"role": "user", "content": "Weather?"}
        history = [
            question,
            {"role": "assistant", "content": None, "tool_calls": CALLED, "refusal": None},
            RESULT,
            RESULT,
        ]
        body = {"messages": history, "tools": [WEATHER]}
        response = await server.client.post("/tokenize", json=body | {"return_token_strs": True})
        text = "".join(response.json()["token_strs"])
        assert text.startswith("<system># Tools")
        assert json.dumps(WEATHER["function"]["name"]) in text
        assert '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n' in text
        result = "weather returned:\n18 degrees"
        assert f"<user>{result}\n{result}\n<assistant>" in text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "retrieval"}]}, "type"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tool_choice": "any"}, 'tool_choice: must be "none", "auto" or "required", {"type": "function", "function"'),
        ({"tool_choice": {"type": "tool"}}, 'or {"type": "allowed_tools", "allowed_tools": {"mode"'),
        ({"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice.function is missing"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": allowed("auto", "weather", "other")}, "tool_choice"),
        ({"tool_choice": allowed("none", "weather")}, "tool_choice"),
        ({"tool_choice": allowed("auto")}, "tool_choice"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLED}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}]}, "function"),
    ],
)
async def test_an_invalid_field_is_refused_by_name(talking: Any, change: dict[str, Any], param: str) -> None:
    async with talking() as server:
        response = await ask(server, "hi", **change)
        assert response.status_code == 400
        assert param in str(response.json()["error"])


@pytest.mark.parametrize(
    ("template", "takes", "tools", "reasoning"),
    [
        ("{{ messages }}", False, "hermes", "none"),
        ("{{ tools }}<tool_call>", True, "hermes", "none"),
        ("{{ tools }}<tool_call><think></think>", True, "hermes", "think"),
        ("{{ tools }}<tool_call><function=", True, "qwen3-coder", "none"),
        ("{{ tools }}[TOOL_CALLS][THINK]", True, "mistral", "mistral"),
        ("{{ tools }}<|tool_call|>Here is my thought process:", True, "granite", "granite"),
        ("{{ tools }}<|channel|>", True, "gpt-oss", "gpt-oss"),
        ("{{ tools }}<｜tool▁calls▁begin｜></think>", True, "deepseek", "think"),
        ("{{ tools }}<|start_header_id|>ipython", True, "llama3", "none"),
        ("{{ tools }} in a way of its own", True, "none", "none"),
    ],
)
def test_formats_are_found_from_the_template(template: str, takes: bool, tools: Any, reasoning: Any) -> None:
    assert detect_format(template, takes, OutputFormat("auto", "auto")) == OutputFormat(tools, reasoning)
    assert detect_format(template, takes, OutputFormat("llama3", "none")) == OutputFormat("llama3", "none")


@pytest.mark.parametrize(
    ("further", "expected", "absent"),
    [
        ({"tool_choice": "required"}, ("named_0", "call)*"), "until_trigger"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("named_0",), "call)*"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, ("weather",), "call)*"),
        (
            {"tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]},
            ("until_trigger",),
            "call)*",
        ),
        ({"response_format": {"type": "json_object"}}, ("content: %json", "call)*"), "until_trigger"),
    ],
)
async def test_calls_are_constrained_by_a_grammar(
    talking: Any, further: Any, expected: tuple[str, ...], absent: str
) -> None:
    async with talking() as server:
        assert (await ask(server, "hi", **further)).status_code == 200
        params = server.launcher.engine.requests[-1].params
        assert params.grammar_by_kind.keys() == {"grammar"}
        assert all(text in params.grammar for text in expected)
        assert absent not in params.grammar


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_the_allowed_tools_reach_the_prompt(talking: Any, mode: str) -> None:
    tools = [{"type": "function", "function": WEATHER["function"] | {"name": name}} for name in ("time", "weather")]
    async with talking() as server:
        response = await choice(server, CALL, tools=tools, tool_choice=allowed(mode, "weather"))
        assert response["message"]["tool_calls"][0]["function"]["name"] == "weather"
        request = server.launcher.engine.requests[-1]
        prompt = byte_tokenizer().decode(list(request.prompt_token_ids), skip_special_tokens=False)
        assert '"weather"' in prompt
        assert '"time"' not in prompt
        assert request.params.grammar_by_kind.keys() == ({"grammar"} if mode == "required" else set())


async def test_an_optional_call_uses_no_grammar(talking: Any) -> None:
    async with talking() as server:
        await ask(server, "hi")
        assert not server.launcher.engine.requests[-1].params.grammar_by_kind


async def test_a_call_can_be_forced_without_a_tool_parser(talking: Any) -> None:
    async with talking(tool_parser="none") as server:
        assert (await choice(server, CALL, tool_choice="required"))["message"]["tool_calls"]


async def test_a_schema_that_no_grammar_can_express_is_refused(talking: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "colour"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with talking() as server:
        assert (await ask(server, "hi", tools=[tool])).status_code == 200
        error = (await ask(server, "hi", tools=[tool], tool_choice="required")).json()["error"]
        assert error["param"] == "tools"
        assert "f in tools" in error["message"]
        assert "grammar" not in error["message"]
        tool["function"] = {"name": "f", "parameters": {"type": "string"}}
        assert (await ask(server, "hi", tools=[tool])).status_code == 400
