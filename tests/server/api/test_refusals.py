"""Refusals that a newcomer meets: a base URL without /v1, a mistyped name, a value of another type."""

import importlib
import pkgutil
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fp8serve.errors import RequestError
from fp8serve.server import schemas
from fp8serve.server.http.error_handlers import fault_of
from fp8serve.server.schemas.bodies import Body
from fp8serve.server.settings import Settings
from tests.server.conftest import Start

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/completions", "/v1/completions"),
        ("POST", "/embeddings/", "/v1/embeddings"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/api/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/openai/chat/completions", "/v1/chat/completions"),
        ("POST", "/messages", "/v1/messages"),
        ("GET", "/api/health", "/health"),
    ],
)
async def test_a_wrong_base_url_is_answered_with_the_right_route(
    start: Start, method: str, path: str, route: str
) -> None:
    async with start() as server:
        answer = await server.client.request(method, path, json=CHAT)
        assert answer.status_code == 404
        assert f"The route is {route}" in answer.text
        assert ("ends in /v1" in answer.text) == route.startswith("/v1")


OLLAMA = ["/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/embed", "/api/version"]


@pytest.mark.parametrize("path", OLLAMA)
async def test_the_error_tells_ollamas_clients_what_to_use(start: Start, path: str) -> None:
    """Ollama's clients print only `error`. `/api/generate` looks like our /generate, which they cannot use."""
    async with start() as server:
        answer = await server.client.request("POST" if path != "/api/tags" else "GET", path)
    assert answer.status_code == 404
    assert answer.json()["error"] == (
        "There is no such route here. "
        "Ollama's protocol is not supported; use an OpenAI client with a base URL that ends in /v1."
    )


async def test_the_hint_of_a_wrong_path_is_in_the_sentence(start: Start) -> None:
    async with start() as server:
        native = (await server.client.get("/nowhere")).json()
        openai = (await server.client.get("/v1/nowhere")).json()["error"]
    assert native["error"] == openai["message"] == "There is no such route here. GET /docs lists them."


async def test_the_path_console_redirects_to_the_console(start: Start) -> None:
    async with start() as server:
        answer = await server.client.get("/console")
        assert answer.status_code == 307
        assert answer.headers["location"] == "./"  # relative: a proxy may put the server below a path
        assert (await server.client.get("/console", follow_redirects=True)).url.path == "/"
        assert "The route is /console." in (await server.client.get("/console/")).json()["error"]


async def test_openais_client_lists_models_without_v1(start: Start) -> None:
    openai = pytest.importorskip("openai")
    async with start() as server:
        base = str(server.client.base_url)
        client = openai.AsyncOpenAI(base_url=base, api_key="k", max_retries=0, http_client=server.client)
        names = [model.id async for model in await client.models.list()]
        listed = (await server.client.get("/v1/models")).json()
    assert names == [model["id"] for model in listed["data"]] != []


async def test_openais_client_shows_the_route_that_its_base_url_missed(start: Start) -> None:
    openai = pytest.importorskip("openai")
    async with start() as server:
        base = str(server.client.base_url)
        client = openai.AsyncOpenAI(base_url=base, api_key="k", max_retries=0, http_client=server.client)
        with pytest.raises(openai.NotFoundError, match="The route is /v1/chat/completions, and the base URL"):
            await client.chat.completions.create(model="m", **CHAT)


async def test_anthropics_client_is_told_to_leave_v1_out_of_its_base_url(start: Start) -> None:
    async with start() as server:
        for path in ("/v1/v1/messages", "/proxy/v1/v1/messages/count_tokens"):
            answer = await server.client.post(path, json=CHAT)
            assert answer.json()["type"] == "error"  # Anthropic's shape
            assert "leave it out of the base URL" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "/nothing", "/v1/nothing/", "//", "/chat/completions/more", "/a" * 5000])
async def test_other_paths_get_no_suggested_route(start: Start, path: str) -> None:
    async with start() as server:
        answer = await server.client.post(path, json=CHAT)
        assert "The route is" not in answer.text


async def test_a_mistyped_model_gets_a_suggestion(start: Start) -> None:
    async with start(served_model_name="Llama-3.2-1B") as server:
        for name in ("llama-3.2-1b", "Llama-3.2-1", "llama3.2-1B"):
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})):
                answer = await server.client.post(path, json=body | {"model": name})
                assert answer.status_code == 404
                assert "Did you mean Llama-3.2-1B?" in answer.text
            assert "Did you mean Llama-3.2-1B?" in (await server.client.get(f"/v1/models/{name}")).text
        for name in ("gpt-4o", "x" * 100_000, ""):
            answer = await server.client.post("/v1/chat/completions", json=CHAT | {"model": name})
            assert "Did you mean" not in answer.text


async def test_a_model_has_several_names(start: Start) -> None:
    async with start(served_model_name=("llama", "gpt-4o", "org/name")) as server:
        listed = (await server.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["llama", "gpt-4o", "org/name"]
        for name in ("llama", "gpt-4o", "org/name"):
            answer = await server.client.post("/v1/chat/completions", json=CHAT | {"model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, name)


def test_names_are_checked(tmp_path: Any) -> None:
    assert Settings(model=tmp_path, served_model_name="a").model_name == "a"  # type: ignore[arg-type]
    for names in (("a", "a"), ("a", "with space"), ("a", "ft:b")):
        with pytest.raises(RequestError):
            Settings(model=tmp_path, served_model_name=names)


JUNK = [None, True, 1, -1, 1.5, 10**30, float("nan"), "", "x" * 100_000, [], [[]], [None], {}, {"type": "x"}, [{}], "1"]
PYDANTICS = ("should", "valid string", "valid integer", "valid dictionary", "instance of", "after validation",
             "discriminator", "Input", "input tag", "extract tag")  # fmt: skip


def bodies() -> list[type[BaseModel]]:
    for module in pkgutil.iter_modules(schemas.__path__):
        importlib.import_module(f"{schemas.__name__}.{module.name}")
    pending, classes = [Body], list[type[BaseModel]]()
    while pending:
        pending += (kinds := pending.pop().__subclasses__())
        classes += kinds
    return sorted(set(classes), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("body", bodies(), ids=lambda kind: kind.__name__)
def test_no_refusal_contains_pydantics_wording(body: type[BaseModel]) -> None:
    """Tries every field with values of every type, alone, in a list and in an object."""
    refused = 0
    for name, field in body.model_fields.items():
        for value in [*JUNK, *([{"role": "user", "content": junk}] for junk in JUNK), *({"type": j} for j in JUNK)]:
            try:
                body.model_validate({field.alias or name: value})
            except ValidationError as error:
                errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
                for one in errors:
                    fault = fault_of([one])
                    refused += 1
                    assert not [words for words in PYDANTICS if words in fault.message], fault.message
                assert fault_of(errors).message.endswith(".")
    assert refused or not body.model_fields


NOT_TEXT = [
    ("/v1/chat/completions", "messages", "image_url"),
    ("/v1/chat/completions", "messages", "input_audio"),
    ("/v1/chat/completions", "messages", "file"),
    ("/v1/messages", "messages", "image"),
    ("/v1/messages", "messages", "document"),
    ("/v1/responses", "input", "input_image"),
]


@pytest.mark.parametrize(("path", "field", "kind"), NOT_TEXT)
async def test_an_image_is_refused_by_name_at_its_place(start: Start, path: str, field: str, kind: str) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "http://a/b.png"}}]}
    async with start() as server:
        answer = await server.client.post(
            path, json={"max_tokens": 1, field: [turn]} if field == "messages" else {field: [turn]}
        )
    assert answer.status_code == 400
    sentence = f"{field}.0.content: content parts of the type {kind} are not supported; send text."
    assert answer.json()["error"]["message"] == sentence


@pytest.mark.parametrize("kind", ["web_search", "web_search_20250305", "code_interpreter", "mcp"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
async def test_a_tool_that_vendors_run_is_refused_by_name(start: Start, path: str, kind: str) -> None:
    bodies = {"/v1/responses": {"input": "a"}, "/tokenize": {"messages": CHAT["messages"]}}
    body = bodies.get(path, CHAT)
    async with start() as server:
        answer = await server.client.post(path, json=body | {"tools": [{"type": kind, "name": kind}]})
        unknown = await server.client.post(path, json=body | {"tools": [{"type": "Not a type! " * 20, "name": "a"}]})
    error = answer.json()["error"]
    assert (error if path == "/tokenize" else error["message"]) == (
        f"tools.0: tools of the type {kind} are not supported; send a function with a schema of its arguments."
    )
    assert "Not a type" not in unknown.text


REQUIRED = [(body, name) for body in bodies() for name, field in body.model_fields.items() if field.is_required()]


@pytest.mark.parametrize(("body", "name"), REQUIRED, ids=lambda value: getattr(value, "__name__", value))
def test_null_for_a_required_field_is_a_missing_field(body: type[BaseModel], name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate({name: None})
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors() if one["loc"] == (name,)]
    assert fault_of(errors).message == f"{name} is missing."


async def test_null_inside_a_body_counts_as_a_missing_field(start: Start) -> None:
    turn = {"role": "user", "content": "a"}
    call = {"type": "tool_use", "id": "b", "name": "c", "input": {"kept": None}}
    result = {"type": "tool_result", "tool_use_id": "b", "content": None, "is_error": None}
    turns = [turn, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    async with start() as server:
        good = await server.client.post("/v1/messages", json={"max_tokens": 1, "messages": turns})
        part = {"type": "text", "text": None}
        nested = await server.client.post("/v1/chat/completions", json={"messages": [turn | {"content": [part]}]})
        role = await server.client.post("/v1/chat/completions", json={"messages": [turn | {"role": None}]})
        unknown = await server.client.post("/v1/chat/completions", json=CHAT | {"temprature": None})
    assert good.status_code == 200, good.text
    assert nested.json()["error"]["message"] == "messages.0.content.0.text is missing."
    assert role.json()["error"]["message"] == "messages.0.role is missing."
    assert "temprature is not a field" in unknown.json()["error"]["message"]


async def test_an_error_about_a_union_names_all_its_types(start: Start) -> None:
    async with start() as server:
        chat = await server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": 5}]})
        text = await server.client.post("/v1/completions", json={"prompt": 5})
    assert chat.json()["error"]["message"] in (
        "messages.0.content must be a list or text.",
        "messages.0.content must be text or a list.",
    )
    assert text.json()["error"]["message"] in ("prompt must be text or a list.", "prompt must be a list or text.")


TOOL = '{"type": "function", "function": {"name": "f", "parameters": @}}'
TURNS = '"messages": [{"role": "user", "content": "a"}]'
NESTED = {
    "tools": ("/v1/chat/completions", f'{{{TURNS}, "max_tokens": 1, "tools": [{TOOL}]}}'),
    "variables": ("/v1/chat/completions", f'{{{TURNS}, "max_tokens": 1, "chat_template_kwargs": {{"a": @}}}}'),
    "schema": ("/v1/chat/completions", f'{{{TURNS}, "max_tokens": 1, "guided_json": @}}'),
    "Anthropic": ("/v1/messages", f'{{{TURNS}, "max_tokens": 1, "tools": [{{"name": "f", "input_schema": @}}]}}'),
    "count": ("/v1/messages/count_tokens", f'{{{TURNS}, "tools": [{{"name": "f", "input_schema": @}}]}}'),
    "tokenize": ("/tokenize", f'{{{TURNS}, "chat_template_kwargs": {{"a": @}}}}'),
    "responses": ("/v1/responses", '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": @}]}'),
    "generate": ("/generate", '{"inputs": "a", "parameters": {"guided_json": @}}'),
    "finetune": ("/finetune", '{"data": [{"prompt": "a", "completion": "b", "c": @}]}'),
}


@pytest.mark.parametrize("case", NESTED)
async def test_deep_nesting_is_a_4xx(start: Start, case: str) -> None:
    """Above 480 levels, and below the limit of the JSON parser, recursion once failed in another process with a 500."""
    path, body = NESTED[case]
    async with start() as server:
        for levels in (250, 500, 950, 20_000):
            deep = '{"a": ' * levels + "1" + "}" * levels
            answer = await server.client.post(
                path, content=body.replace("@", deep), headers={"content-type": "application/json"}
            )
            assert answer.status_code in (400, 422), (levels, answer.text)
