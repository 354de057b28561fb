"""`response_format` and the fields of vLLM and llama.cpp become the engine's constraint, or are refused by name."""

import json
from typing import Any

import pytest

from fp8serve.server.api.native.generation_routes import to_sampling_params
from fp8serve.server.parsing import parser_process
from fp8serve.server.schemas.generation_bodies import GenerateParameters
from fp8serve.server.schemas.openai_bodies import ChatBody, CompletionBody
from tests.server.conftest import Start

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}
FORM = {"type": "json_schema", "json_schema": NAMED}
TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_object", "schema": SCHEMA}, TEXT),
        ({"type": "json_object", "schema": None}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": NAMED}, TEXT),
    ],
)
def test_openai(response_format: Any, expected: str | None) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "response_format": response_format}
    for body in (
        ChatBody.model_validate(chat),
        CompletionBody.model_validate({"prompt": "x", "response_format": response_format}),
    ):
        params = body.params(5)
        assert (params.json_schema, params.regex) == (expected, None)


FORMS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"guided_json": SCHEMA}, {"json_schema": TEXT}),
    ({"guided_json": TEXT}, {"json_schema": TEXT}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["é\n", 'b"']}, {"grammar": 'start: "é\\n" | "b\\""'}),
    ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
    ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": TEXT}),
    ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    ({"structured_outputs": {"choice": ["a"]}}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"grammar": "start: x", "json_object": False}}, {"grammar": "start: x"}),
    (
        {"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}},
        {"json_schema": '{"type": "object"}'},
    ),
    ({"structured_outputs": {}}, {}),
]


@pytest.mark.parametrize(("fields", "expected"), FORMS)
def test_every_structured_output_field_works_on_every_route(fields: dict[str, Any], expected: dict[str, str]) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]} | fields
    assert ChatBody.model_validate(chat).params(5).grammar_by_kind == expected
    assert CompletionBody.model_validate({"prompt": "x"} | fields).params(5).grammar_by_kind == expected
    assert to_sampling_params(GenerateParameters.model_validate(fields)).grammar_by_kind == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA, "guided_regex": "a"},
        {"response_format": {"type": "json_object"}, "grammar": "start: x"},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"structured_outputs": {"regex": ""}},
        {"guided_choice": []},
        {"guided_choice": ["a", 1]},
        {"guided_json": 5},
        {"guided_json": "["},
        {"guided_regex": "("},
        {"guided_grammar": "start: nothing"},
        {"grammar": "::="},
        {"grammar": {"type": "lark", "value": "start: x"}},
        {"guided_grammar": "start: " + "x" * 70_000},
    ],
)
async def test_an_invalid_constraint_is_refused_before_the_answer_starts(start: Start, fields: dict[str, Any]) -> None:
    """If the text of a constraint has to be read, the parser process refuses it."""
    async with start() as server:
        for route, body in (
            ("/v1/completions", {"prompt": "x"} | fields),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True} | fields),
            ("/generate", {"inputs": "x", "parameters": fields}),
        ):
            answer = await server.client.post(route, json=body)
            assert answer.status_code == (422 if route == "/generate" else 400), answer.text


async def test_a_valid_constraint_is_checked_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start() as server:
        jobs: list[str] = []
        run = server.state.parser.pool.run

        async def counted(head: Any, *rest: Any) -> Any:
            jobs.append(head["op"])
            return await run(head, *rest)

        monkeypatch.setattr(server.state.parser.pool, "run", counted)
        for _ in range(3):
            await server.client.post("/v1/completions", json={"prompt": "x", "guided_regex": "[ab]+"})
        assert jobs.count("check_grammar") == 1


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("openai_bodies:CompletionBody", {"prompt": "x", "response_format": FORM}),
        ("openai_bodies:ChatBody", {"messages": [{"role": "user", "content": "x"}], "response_format": FORM}),
        (
            "generation_bodies:GenerateBody",
            {"inputs": "x", "parameters": {"response_format": FORM}},
        ),
    ],
)
def test_a_response_format_survives_the_parser_process(model: str, body: dict[str, Any]) -> None:
    """The parser process checks long bodies and serializes them again."""
    model = f"fp8serve.server.schemas.{model}"
    head = {"kind": "check", "model": model, "sizes": {"prompts": 9, "messages": 9, "context": 99, "texts": 9}}
    answer, body_text = parser_process._check(head, json.dumps(body).encode())
    assert answer == {}
    assert json.loads(body_text) == body


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({"type": "yaml"}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_object", "schema": 3}, "response_format.schema"),
        ({"type": "json_schema", "value": NAMED}, "response_format.json_schema"),
        ("json_object", "response_format"),
    ],
)
async def test_an_invalid_response_format_is_refused_by_name(response_format: Any, param: str, start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/v1/completions", json={"prompt": "x", "response_format": response_format})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
