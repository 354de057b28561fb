"""No body causes a 5xx. A refusal is small, names the field in the route's format, and repeats nothing of the body."""

import json
import re
from typing import Any

import pytest

from tests.server.conftest import Start

CANARY = "xyzzy-canary-never-echoed"
BODIES: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b"7",
    b'"text"',
    b"{",
    b"{}",
    b'{"inputs": NaN}',
    b'\xff\xfe{\x00"\x00',
    b"\x00",
    b"[" * 100_000,
    b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"inputs":' + b"9" * 5000 + b"}",
    b'{"inputs": "\\ud800"}',
    b'{"inputs": "x", "\\udfff": 1}',
    b'{"prompt": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"data": [{"text": "\\ud800"}]}',
    b'{"data": [{"text": 1e999}]}',
    b'{"tokens": [4294967296]}',
    b'{"tokens": [2147483647]}',
    b'{"tokens": [-1]}',
    b'{"tokens": [1.0]}',
    b'{"tokens": [true]}',
    b'{"prompt": [[]]}',
    b'{"prompt": []}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": [999999]}',
    b'{"prompt": ""}',
    b'{"inputs": ""}',
    b'{"input_ids": []}',
    b'{"input_ids": [99999]}',
    b'{"inputs": "a", "input_ids": [1]}',
    b'{"inputs": "\x00"}',
    json.dumps({"inputs": CANARY, "unknown_" + CANARY: CANARY}).encode(),
    json.dumps({"inputs": [CANARY] * 20_000}).encode(),
    json.dumps({"data": [{"text": CANARY, "prompt": CANARY}]}).encode(),
    json.dumps({"data": [{"messages": [{"role": "user", "content": CANARY}]}]}).encode(),
    json.dumps({"data": [{}], "file_id": "../../etc/passwd"}).encode(),
    json.dumps({"file_id": "../../etc/passwd"}).encode(),
    json.dumps({"source": "../../etc/passwd"}).encode(),
    json.dumps({"model": "../../etc/passwd", "inputs": "x", "prompt": "x"}).encode(),
    json.dumps({"training_file": "nope", "model": "base"}).encode(),
    json.dumps({"data": [{"text": "x"}], "suffix": "../" + CANARY}).encode(),
]
ROUTES = """
/generate /tokenize /detokenize /v1/completions /v1/chat/completions /finetune /finetune/validate
/v1/fine_tuning/jobs /v1/files /models/tiny/activate /finetune/nope/cancel /finetune/nope/activate
"""
CHAT = {"messages": [{"role": "user", "content": "x"}]}
BAD_NUMBERS: list[Any] = [True, "1", [], {}, -1, -1.5, 1e300, 2**63, 2**70]
NUMBERS = {
    "/generate": """max_new_tokens temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty
        seed truncate min_tokens top_n_tokens""",
    "/v1/completions": """max_tokens temperature top_p n logprobs presence_penalty frequency_penalty min_p min_tokens
        best_of""",
    "/v1/chat/completions": "max_tokens max_completion_tokens temperature top_p n top_logprobs min_p",
    "/finetune": "epochs max_steps batch_size seq_len learning_rate clip seed save_every keep_last",
}
AROUND: dict[str, tuple[str, dict[str, Any]]] = {
    "/generate": ("parameters", {"inputs": "x"}),
    "/v1/completions": ("", {"prompt": "x"}),
    "/v1/chat/completions": ("", CHAT),
    "/finetune": ("", {"data": [{"text": "x"}]}),
}
"""For each route: the object in its body that holds its numbers ("": the body itself), and the rest of the body."""


def check(path: str, status: int, body: bytes) -> dict[str, Any]:
    assert 200 <= status < 500, (path, status, body[:300])
    if status >= 400:
        assert len(body) < 16 * 1024
        assert CANARY.encode() not in body.replace(b"unknown_" + CANARY.encode(), b"")
        assert not re.search(rb"(/tmp|/root|/home|/work|0x[0-9a-f]{6,}|Traceback)", body), body
        error: dict[str, Any] = json.loads(body)
        if path.startswith("/v1/"):
            assert set(error) == {"error"}
            assert set(error["error"]) == {"message", "type", "param", "code"}
            assert isinstance(error["error"]["code"], str)
        else:
            assert isinstance(error["error"], str)
            assert isinstance(error["error_type"], str)
            assert error["code"]
        return error
    return {}


@pytest.mark.parametrize("route", ROUTES.split())
async def test_no_body_makes_a_server_error(start: Start, route: str) -> None:
    async with start() as server:
        for content in BODIES:
            for kind in ("application/json", "text/plain"):
                answer = await server.client.post(route, content=content, headers={"content-type": kind})
                check(route, answer.status_code, answer.content)


@pytest.mark.parametrize("route", NUMBERS)
async def test_no_number_makes_a_server_error(start: Start, route: str) -> None:
    group, rest = AROUND[route]
    async with start() as server:
        for name in NUMBERS[route].split():
            for raw in [*map(json.dumps, BAD_NUMBERS), "NaN", "Infinity", "-Infinity", "1e999", "-0.0", "5e-324"]:
                inner = f'"{name}": {raw}'
                text = json.dumps(rest)[:-1] + ", " + (f'"{group}": {{{inner}}}' if group else inner) + "}"
                answer = await server.client.post(route, content=text, headers={"content-type": "application/json"})
                error = check(route, answer.status_code, answer.content)
                if error and raw in ("true", '"1"', "NaN", "Infinity"):
                    param = error["error"]["param"] if route.startswith("/v1/") else error["param"]
                    assert param.split(".")[-1] == name, (name, raw, error)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "audio": {}},
            "audio",
        ),
        (
            "/v1/fine_tuning/jobs",
            {"model": "base", "training_file": "f", "integrations": [{"type": "wandb"}]},
            "integrations",
        ),
    ],
)
async def test_an_unsupported_field_is_refused_by_name(
    start: Start, route: str, body: dict[str, Any], param: str
) -> None:
    async with start() as server:
        answer = await server.client.post(route, json=body)
        error = check(route, answer.status_code, answer.content)
        inner = error["error"] if route.startswith("/v1/") else error
        assert (inner["code"], inner["param"]) == ("unsupported_parameter", param)


async def test_unknown_fields_are_refused_by_name_at_every_depth(start: Start) -> None:
    async with start() as server:
        error = (await server.client.post("/generate", json={"inputs": "x", "parameters": {"temprature": 1}})).json()
        assert (error["code"], error["param"]) == ("unknown_parameter", "parameters.temprature")
        message = {"role": "user", "content": "x", "colour": "red"}
        error = (await server.client.post("/v1/chat/completions", json={"messages": [message]})).json()
        assert (error["error"]["code"], error["error"]["param"]) == ("unknown_parameter", "messages.0.colour")


async def test_a_body_too_large_is_refused_unread(start: Start) -> None:
    async with start() as server:
        limit = server.state.settings.limits.body_bytes
        answer = await server.client.post("/v1/completions", content=b"x" * (limit + 1))
        assert answer.status_code == 413
        assert check("/v1/x", 413, answer.content)["error"]["code"] == "body_too_large"
        assert "/v1/files" not in answer.text
        data = await server.client.post("/finetune", content=b"x" * (limit + 1))
        assert data.status_code == 413
        assert "Upload data through POST /v1/files." in data.text

        async def chunks() -> Any:
            for _ in range(limit // 65536 + 2):
                yield b"x" * 65536

        assert (await server.client.post("/generate", content=chunks())).status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/nope",
        "/v1/nope",
        "/generate/",
        "/%2e%2e/etc/passwd",
        "/v1/models/..%2f..%2fetc/passwd",
        "/finetune/%00",
        "/finetune/x%0ay/events",
    ],
)
async def test_odd_paths_are_plain_404s(start: Start, path: str) -> None:
    async with start() as server:
        for method in ("GET", "POST", "DELETE"):
            answer = await server.client.request(method, path, json={})
            assert answer.status_code in (404, 405), (method, path, answer.status_code)
            check("/v1/" if path.startswith("/v1/") else path, answer.status_code, answer.content)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/generate", "POST"),
        ("/finetune", "GET, POST"),
        ("/finetune/some-job", "DELETE, GET"),
        ("/v1/files", "GET, POST"),
        ("/v1/files/some-file", "DELETE, GET"),
        ("/", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
async def test_a_refused_method_names_the_allowed_ones(start: Start, path: str, methods: str) -> None:
    async with start() as server:
        answer = await server.client.request("PATCH", path)
        assert (answer.status_code, answer.headers.get("allow")) == (405, methods)
