"""Every field of the newest clients, and of other servers, is accepted, mapped, ignored or refused, as documented."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient
from pydantic import ValidationError

from fp8serve.server.schemas.anthropic_bodies import CountBody, MessagesBody
from fp8serve.server.schemas.bodies import Body, CompatibilityField, Strict
from fp8serve.server.schemas.compatibility_fields import CHAT, COMPLETION, MESSAGES, RESPONSES, SAMPLING, STORAGE
from fp8serve.server.schemas.embedding_bodies import EmbeddingBody
from fp8serve.server.schemas.openai_bodies import ChatBody, CompletionBody
from fp8serve.server.schemas.responses_bodies import ResponsesBody
from tests.server.conftest import Start
from tests.server.fakes import model_dir
from tests.server.process import serving

TURN = [{"role": "user", "content": "Hello"}]
CLIENT_OPTIONS = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "http_client"}
BODIES: dict[str, tuple[type[Strict], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": TURN}),
    "/v1/completions": (CompletionBody, {"prompt": "Hello"}),
    "/v1/responses": (ResponsesBody, {"input": "Hello"}),
    "/v1/messages": (MessagesBody, {"messages": TURN, "max_tokens": 8}),
}


ROUTES = {
    "/v1/chat/completions": (*CHAT, *SAMPLING, *STORAGE),
    "/v1/completions": (*COMPLETION, *SAMPLING),
    "/v1/responses": (*RESPONSES, *STORAGE),
    "/v1/messages": MESSAGES,
}


def table() -> str:
    """Returns all fields as a Markdown table for docs/clients.md."""
    lines = ["| route | field | of | what happens |", "|---|---|---|---|"]
    for route, rows in ROUTES.items():
        for row in sorted(rows, key=lambda row: (row.treatment, row.project, row.name)):
            lines.append(f"| `{route}` | `{row.name}` | {row.project} | {row.description} |")
    return "\n".join(lines)


OF_OPENAI = ("openai chat", "openai text", "openai responses", "openai embeddings", "huggingface_hub chat")
OF_ANTHROPIC = ("anthropic", "anthropic beta", "anthropic count", "anthropic beta count")


def signature(client: str) -> tuple[Callable[..., Any], type[Body], dict[str, Any]]:
    """Returns a client's function, the class of our body, and the body's required fields. The clients are imported
    here, because anthropic takes two seconds, and every process of a test run collects this file."""
    chat, text, items, messages = ((*BODIES[route],) for route in BODIES)
    results: dict[str, Any]
    if client in OF_ANTHROPIC:
        api: Any = pytest.importorskip("anthropic").Anthropic(api_key="none")
        counting = (CountBody, {"messages": TURN})
        results = {
            "anthropic": (api.messages.create, *messages),
            "anthropic beta": (api.beta.messages.create, *messages),
            "anthropic count": (api.messages.count_tokens, *counting),
            "anthropic beta count": (api.beta.messages.count_tokens, *counting),
        }
    else:
        api = openai.OpenAI(api_key="none")
        results = {
            "openai chat": (api.chat.completions.create, *chat),
            "openai text": (api.completions.create, *text),
            "openai responses": (api.responses.create, *items),
            "openai embeddings": (api.embeddings.create, EmbeddingBody, {"input": "Hello", "model": "m"}),
            "huggingface_hub chat": (InferenceClient.chat_completion, *chat),
        }
    function, body, needed = results[client]
    return function, body, needed


@pytest.mark.parametrize("client", [*OF_OPENAI, *OF_ANTHROPIC])
def test_no_field_of_a_client_is_refused_as_null_or_by_default(client: str) -> None:
    function, body, needed = signature(client)
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if name in CLIENT_OPTIONS or name in needed or name == "model":
            continue
        body.model_validate(needed | {name: None})
        if isinstance(parameter.default, bool | int | float | str | list | dict):
            body.model_validate(needed | {name: parameter.default})
    assert len(parameters) > 8


ROWS = [(route, row) for route, rows in ROUTES.items() for row in rows]


@pytest.mark.parametrize(("route", "row"), ROWS, ids=[f"{route} {row.name}" for route, row in ROWS])
def test_each_field_is_treated_as_the_table_says(route: str, row: CompatibilityField) -> None:
    body, needed = BODIES[route]
    for value in (None, *row.neutral_values):
        body.model_validate(needed | {row.name: value})
    if row.treatment == "refused":
        with pytest.raises(ValidationError) as caught:
            body.model_validate(needed | {row.name: {"a": 3}})
        (error,) = caught.value.errors()
        assert error["ctx"] == {"name": row.name, "instead": row.note}
    elif row.treatment == "mapped":
        value = {"a": 3} if row.to == "guided_json" else 3
        assert getattr(body.model_validate(needed | {row.name: value}), row.to) == value
        with pytest.raises(ValidationError, match="give either"):
            body.model_validate(needed | {row.name: value, row.to: value})


async def test_a_refusal_says_what_to_send_instead(start: Start) -> None:
    async with start() as server:

        async def message(**change: Any) -> str:
            answer = await server.client.post("/v1/chat/completions", json={"messages": TURN} | change)
            assert answer.status_code == 400, answer.text
            sentence: str = answer.json()["error"]["message"]
            return sentence

        assert (await message(functions=[{"name": "f"}])).endswith("omit it. Send tools.")
        assert (await message(use_beam_search=True)).endswith("Send n, or best_of with /v1/completions.")
        assert await message(max_token=3) == "max_token is not a field of this request. Did you mean max_tokens?"
        assert await message(zzz=3) == "zzz is not a field of this request."


def test_anthropics_tool_runner_goes_on_without_a_thread(tmp_path: Path) -> None:
    """The tool runner asks the server to store the conversation; if the server refuses, it sends all messages."""
    anthropic = pytest.importorskip("anthropic")
    options = {"model": str(model_dir(tmp_path / "tiny")), "data_dir": str(tmp_path / "data")}
    tool = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
    with (
        serving(tmp_path / "log", **options, fake=True) as process,
        anthropic.Anthropic(base_url=process.url, api_key="none") as client,
    ):
        runner = client.beta.messages.tool_runner(model="tiny", max_tokens=8, messages=TURN, tools=[tool])
        assert runner.until_done().content[0].text


def test_the_page_shows_the_table() -> None:
    assert table() in Path("docs/clients.md").read_text()
