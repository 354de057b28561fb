"""`response_format` and `grammar` become the engine's json_schema and regex, or are refused by name."""

import json
from typing import Any

import pytest

from fp8serve.server.api.native.generation_requests import sampling
from fp8serve.server.parsing import parser_process
from fp8serve.server.schemas.generation_bodies import GenerateParameters
from fp8serve.server.schemas.openai_bodies import ChatBody, CompletionBody
from tests.server.conftest import Start

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}
FORM = {"type": "json_schema", "json_schema": NAMED}
TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": NAMED}, TEXT),
    ],
)
def test_openai(form: Any, expected: str | None) -> None:
    said = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    for body in (
        ChatBody.model_validate(said),
        CompletionBody.model_validate({"prompt": "x", "response_format": form}),
    ):
        params = body.params(5)
        assert (params.json_schema, params.regex) == (expected, None)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, (None, None)),
        ({"type": "json", "value": SCHEMA}, (TEXT, None)),
        ({"type": "json_schema", "value": NAMED}, (TEXT, None)),
        ({"type": "regex", "value": "[0-9]+"}, (None, "[0-9]+")),
    ],
)
def test_native(form: Any, expected: Any) -> None:
    params = sampling(GenerateParameters.model_validate({"grammar": form}))
    assert (params.json_schema, params.regex) == expected


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("openai_bodies:CompletionBody", {"prompt": "x", "response_format": FORM}),
        ("openai_bodies:ChatBody", {"messages": [{"role": "user", "content": "x"}], "response_format": FORM}),
        (
            "generation_bodies:GenerateBody",
            {"inputs": "x", "parameters": {"grammar": {"type": "json_schema", "value": NAMED}}},
        ),
    ],
)
def test_a_form_survives_the_parser_process(model: str, body: dict[str, Any]) -> None:
    """Which checks long bodies and writes them again."""
    model = f"fp8serve.server.schemas.{model}"
    head = {"kind": "check", "model": model, "sizes": {"prompts": 9, "messages": 9, "context": 99}}
    answer, written = parser_process._check(head, json.dumps(body).encode())
    assert answer == {}
    assert json.loads(written) == body


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "yaml"}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.json_schema.schema"),
        ({"type": "json_object", "schema": {}}, "response_format.json_object.schema"),
        ("json_object", "response_format"),
    ],
)
async def test_what_is_no_form_is_refused_by_name(form: Any, param: str, start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/v1/completions", json={"prompt": "x", "response_format": form})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
