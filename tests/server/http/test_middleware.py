"""Access control: without the key only health routes answer, however the path is written."""

import asyncio
import base64
import gzip
import itertools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from fp8serve.commands.serve import find_key, limits_of
from fp8serve.errors import Fp8ServeError, MachineError, RequestError
from fp8serve.server.app import PAGES
from fp8serve.server.http.access_control import presented_key
from fp8serve.server.http.body_limits import BodyLimits
from fp8serve.server.http.scope import OPEN_PATHS
from fp8serve.server.settings import KEY_VARIABLE, Settings
from tests.server.access.files import bearer, key_of, one_for_each_scope
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher

KEY = "a-secret-key-é"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


ODD = ["/openapi.json", "/health/live/../../generate", "/nope", "/healthz", "/HEALTH", "/health/", "/v1/health"]
CREDENTIALS: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"host": "localhost"},
    {"authorization": "Basic !!"},
]


def paths(app: FastAPI) -> list[str]:
    """Returns every route, with its parameters' names as their values; those that /docs hides, too."""
    listed = [path.replace("{", "").replace("}", "") for path in app.openapi()["paths"]]
    return [*listed, *PAGES, "/ping"]


async def test_every_route_but_health_needs_the_key(start: Start) -> None:
    async with start(api_key=KEY) as server:
        routes = paths(server.app)
        assert len(routes) > 40
        for path, method, headers in itertools.product([*routes, *ODD], METHODS, CREDENTIALS):
            answer = await server.client.request(method, path, headers=headers)
            if path in OPEN_PATHS:
                assert answer.status_code in (200, 405)
            else:
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"].startswith("Basic")


async def test_metrics_can_be_open_to_scrapers_without_a_key(start: Start) -> None:
    async with start(api_key=KEY, metrics_without_key=True) as server:
        assert (await server.client.get("/metrics")).text.startswith("# HELP")
        assert (await server.client.get("/metrics", headers={"host": "10.0.0.7:8000"})).status_code == 200
        assert (await server.client.get("/info")).status_code == 401
        assert (await server.client.post("/metrics")).status_code == 405
    async with start(metrics_without_key=True) as server:  # a page whose host name resolves to 127.0.0.1
        assert (await server.client.get("/metrics", headers={"host": "evil.example:8000"})).status_code == 403


async def test_metrics_without_a_key_have_no_series_about_tenants(start: Start, tmp_path: Path) -> None:
    keys = one_for_each_scope(tmp_path / "keys.toml")
    reader, user = (bearer(key_of(scope)) for scope in ("read", "generate"))
    async with start(api_keys=keys, metrics_without_key=True, vllm_metrics=True) as server:
        asked = await server.client.post("/generate", json={"inputs": "abc"}, headers=user)
        assert asked.status_code == 200
        for headers, shows_tenants in (({}, False), (user, False), (reader, True)):
            text = (await server.client.get("/metrics", headers=headers)).text
            assert ('fp8serve_tenant_tokens_total{kind="generated",tenant="generate"} 16.0' in text) is shows_tenants
            assert ("tenant" in text) is shows_tenants
            assert 'fp8serve_generated_tokens_total{model="tiny"} 16.0' in text
            assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 16.0' in text


async def test_the_key_is_taken_as_bearer_and_as_the_password_of_basic(start: Start) -> None:
    async with start(api_key=KEY) as server:
        basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
        for credentials in (b"Bearer " + KEY.encode(), b"bearer   " + KEY.encode(), f"Basic {basic}".encode()):
            assert (await server.client.get("/info", headers={b"authorization": credentials})).status_code == 200
        for credentials in (KEY.encode(), b"Bearer " + KEY.encode()[:-1], b"Bearer", b"Basic", b"Bearer \xff\xff"):
            assert (await server.client.get("/info", headers={b"authorization": credentials})).status_code == 401


@pytest.mark.parametrize(
    ("credentials", "key"),
    [
        (b"Bearer k", b"k"),
        (b"Basic " + base64.b64encode(b"u:a:b"), b"a:b"),
        (b"Basic ===", b""),
        (b"", b""),
        (b"Digest k", b""),
    ],
)
def test_presented_key(credentials: bytes, key: bytes) -> None:
    assert presented_key(credentials) == key


async def test_a_page_of_another_site_changes_nothing(start: Start) -> None:
    async with start() as server:
        request = {"inputs": "x"}
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            headers = {"sec-fetch-site": site}
            assert (await server.client.post("/generate", json=request, headers=headers)).status_code == status
            assert (await server.client.get("/flush_cache", headers=headers)).status_code == status
            assert (await server.client.get("/info", headers=headers)).status_code == 200


HOSTS = [
    ("localhost", 200),
    ("localhost:8000", 200),
    ("LOCALHOST.:8000", 200),
    ("127.0.0.1:8000", 200),
    ("[::1]:8000", 200),
    ("evil.example:8000", 403),
    ("localhost.evil.example", 403),
    ("evil.example@localhost", 403),
    ("127.0.0.1.nip.io", 403),
    ("[::1", 403),
    ("", 403),
]


@pytest.mark.parametrize(("host", "status"), HOSTS)
async def test_a_keyless_server_answers_only_to_names_of_this_machine(start: Start, host: str, status: int) -> None:
    """If it answered to others, a page whose host name resolves to 127.0.0.1 (DNS rebinding) could start fine-tunes."""

    async with start() as server:
        for method, path, data in (("GET", "/info", None), ("POST", "/finetune", {"data": [{"text": "x"}]})):
            answer = await server.client.request(method, path, json=data, headers={"host": host})
            assert answer.status_code == (status if status == 403 or method == "GET" else 202), path
        assert (await server.client.get("/health/ready", headers={"host": host})).status_code == 200


async def test_further_names_are_allowed_by_name(start: Start) -> None:
    async def status_for(server: Server, host: str) -> int:
        headers = {"host": host, "authorization": f"Bearer {KEY}".encode()}
        return (await server.client.get("/version", headers=headers)).status_code

    async with start(allowed_hosts=("Models.example",)) as server:
        assert [await status_for(server, host) for host in ("models.example:80", "localhost", "other")] == [
            200,
            200,
            403,
        ]
    async with start(api_key=KEY) as server:
        assert await status_for(server, "any.example") == 200
    async with start(api_key=KEY, allowed_hosts=("models.example",)) as server:
        assert [await status_for(server, host) for host in ("models.example", "other")] == [200, 403]


async def test_a_page_of_another_origin_changes_nothing(start: Start) -> None:
    """Browsers send no `Sec-Fetch-Site` to a server that they reach by plain HTTP over a network."""

    async with start(allowed_hosts=("models.example",)) as server:
        for origin, status in (
            ("http://localhost:8000", 200),
            ("http://LOCALHOST:8000", 200),
            ("https://models.example", 200),
            ("https://models.example:8443", 200),
            ("chrome-extension://models.example", 403),
            ("https://localhost:8000", 403),
            ("ftp://localhost:8000", 403),
            ("localhost:8000", 403),
            ("http://localhost", 403),
            ("http://localhost:3000", 403),
            ("http://localhost:8000.evil.example", 403),
            ("http://evil.example", 403),
            ("null", 403),
        ):
            headers = {"origin": origin, "host": "localhost:8000"}
            answer = await server.client.post("/generate", json={"inputs": "x"}, headers=headers)
            assert answer.status_code == status, origin
            assert (await server.client.get("/version", headers=headers)).status_code == 200


OWN_PAGES: list[tuple[dict[str, str], int]] = [
    ({"host": "models.example", "origin": "http://models.example"}, 200),
    ({"host": "models.example:80", "origin": "http://models.example"}, 200),
    ({"host": "models.example", "origin": "https://models.example"}, 403),
    ({"host": "models.example", "origin": "https://models.example", "x-forwarded-proto": "https"}, 200),
    ({"host": "models.example:443", "origin": "https://models.example", "x-forwarded-proto": "HTTPS, http"}, 200),
    ({"host": "models.example", "origin": "http://models.example", "x-forwarded-proto": "https"}, 403),
    # the browser has compared them, and the proxy in front of the server has changed the name
    ({"host": "inner:8000", "origin": "https://models.example", "sec-fetch-site": "same-origin"}, 200),
    ({"host": "models.example", "origin": "http://models.example", "sec-fetch-site": "cross-site"}, 403),
    ({"host": "models.example", "origin": "http://models.example", "sec-fetch-site": "same-site"}, 403),
]


@pytest.mark.parametrize(("headers", "status"), OWN_PAGES)
async def test_a_page_is_the_servers_own_by_scheme_host_and_port(
    headers: dict[str, str], status: int, start: Start
) -> None:
    async with start(api_key=KEY) as server:
        key = {b"authorization": f"Bearer {KEY}".encode()}
        raw = {name.encode(): value.encode() for name, value in headers.items()}
        answer = await server.client.post("/generate", json={"inputs": "x"}, headers=raw | key)
        assert answer.status_code == status


def test_the_key_comes_from_the_option_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert find_key(None, None) is None
    for option, path, expected in ((None, None, "from-env"), (None, file, "from-file"), ("given", None, "given")):
        monkeypatch.setenv(KEY_VARIABLE, "from-env")
        assert find_key(option, path) == expected
        assert KEY_VARIABLE not in os.environ  # processes that the server starts need no secret
    with pytest.raises(RequestError, match="not both"):
        find_key("given", file)
    for content in ("", "one\ntwo\n"):
        file.write_text(content)
        with pytest.raises(MachineError, match="must have one line"):
            find_key(None, file)
    with pytest.raises(MachineError, match="cannot be read"):
        find_key(None, tmp_path / "none")


def test_an_empty_key_is_refused_wherever_it_comes_from(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(RequestError, match="key is empty"):
        Settings(model=settings.model, api_key=find_key(None, None))


def test_an_open_port_needs_a_key_or_an_explicit_option(settings: Settings) -> None:
    values: dict[str, Any] = {"model": settings.model, "host": "0.0.0.0", "data_dir": settings.data_dir}
    with pytest.raises(MachineError, match="--api-key"):
        Settings(**values)
    assert Settings(**values, api_key="k").api_key == "k"
    assert Settings(**values, allow_unauthenticated=True).host == "0.0.0.0"
    assert Settings(**values | {"host": "::1"}).host == "::1"


def test_the_key_is_not_in_the_repr(settings: Settings) -> None:
    assert KEY not in repr(Settings(model=settings.model, data_dir=settings.data_dir, api_key=KEY))


async def test_prompts_and_keys_stay_out_of_logs_and_metrics(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with start(api_key=KEY) as server:
        server.client.headers["authorization"] = "Bearer wrong"
        await server.client.post("/generate?canary-query", json={"inputs": "canary-prompt"})
        server.client.headers = {b"authorization": f"Bearer {KEY}".encode()}
        for path in ("/generate", "/v1/completions", "/canary-path"):
            await server.client.post(
                path, json={"inputs": "canary-prompt", "prompt": "canary-prompt", "canary-field": 1}
            )
            await server.client.post(path, json={"inputs": "canary-prompt"})
        ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("fp8serve"))
        sinks = ours + (await server.client.get("/metrics")).text
        assert "POST /generate" in sinks
        assert 'route="unmatched"' in sinks
        assert "canary" not in sinks
        assert KEY not in sinks


async def test_an_unusual_request_id_is_replaced_by_a_generated_one(start: Start) -> None:
    async with start() as server:
        assert (await server.client.get("/version", headers={"x-request-id": "abc-1"})).headers[
            "x-request-id"
        ] == "abc-1"
        for odd in ("a b", "x" * 65, "a\tb", '"', "naïve".encode("latin-1"), "a\x7f", ""):
            assert (
                (await server.client.get("/version", headers={"x-request-id": odd}))
                .headers["x-request-id"]
                .startswith("req-")
            )


async def test_two_requests_may_carry_the_same_id(start: Start) -> None:
    """A gateway that retries sends the same id while its first request may still run."""

    async with start(Launcher(lambda: FakeEngine(delay=0.01))) as server:
        headers = {"x-request-id": "again"}
        body = {"inputs": "ab", "parameters": {"max_new_tokens": 5}}
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        routes = [("/generate", body), ("/generate", body | {"stream": True}), ("/v1/chat/completions", chat)]
        answers = await asyncio.gather(
            *(server.client.post(path, json=one, headers=headers) for path, one in routes for _ in range(3))
        )
        assert [answer.status_code for answer in answers] == [200] * 9
        assert all('"error"' not in answer.text for answer in answers)
        assert {answer.headers["x-request-id"] for answer in answers} == {"again"}
        assert len({answer.json()["id"] for answer in answers[-3:]}) == 3


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/files"])
async def test_a_compressed_body_is_refused_as_such(start: Start, path: str) -> None:
    async with start() as server:
        body = gzip.compress(b'{"inputs": "x"}')
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await server.client.post(path, content=body, headers=headers)
        assert (answer.status_code, "Content-Encoding" in answer.text) == (415, True)
        plain = {"content-encoding": "identity"}
        assert (await server.client.post("/generate", json={"inputs": "x"}, headers=plain)).status_code == 200


def test_limits_are_set_by_name() -> None:
    limits = limits_of(["queue=7", "body_seconds=0.5"])
    assert (limits.queue, limits.body_seconds, limits.streams) == (7, 0.5, 512)
    for invalid, sentence in {
        "quue=7": "unknown limit 'quue'",
        "queue=0": "queue must",
        "queue": "NAME=VALUE",
    }.items():
        with pytest.raises(Fp8ServeError, match=sentence):
            limits_of([invalid])


class Client:
    """The ASGI side of a client that sends a body in pieces. events: "read" for each piece, then the answer's."""

    def __init__(self, pieces: list[bytes], headers: dict[bytes, bytes]) -> None:
        self.scope = {"type": "http", "method": "POST", "path": "/generate", "headers": list(headers.items())}
        self.pieces, self.events = list(pieces), list[str]()

    async def receive(self) -> Any:
        assert self.pieces, (
            "nothing is read after the end of the body, because that would wait until the client disconnects"
        )
        self.events.append("read")
        return {"type": "http.request", "body": self.pieces.pop(0), "more_body": bool(self.pieces)}

    async def send(self, message: Any) -> None:
        self.events.append(str(message.get("status", "sent")))


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("a refused body reaches no handler")


@pytest.mark.parametrize(
    ("pieces", "headers", "reads"),
    [
        pytest.param([b"x" * 50] * 3, {b"content-length": b"150"}, 3, id="declared"),
        pytest.param([b"x" * 50] * 4, {}, 4, id="not declared"),
        pytest.param([b"x" * 101], {}, 1, id="at once"),
        pytest.param([b"x" * 50] * 100, {b"content-length": b"5000"}, 16, id="no more than eight times the limit"),
        pytest.param([b"x" * 50] * 3, {b"content-length": b"150", b"expect": b"100-continue"}, 0, id="not sent yet"),
        pytest.param([b"x" * 50] * 3, {b"content-encoding": b"gzip"}, 3, id="compressed"),
    ],
)
async def test_the_rest_of_a_refused_body_is_read_before_the_answer(
    pieces: list[bytes], headers: dict[bytes, bytes], reads: int
) -> None:
    """A connection that is closed with bytes unread is reset, and its client sees no answer."""
    client = Client(pieces, headers)
    await BodyLimits(nothing, max_bytes=100, seconds=60, max_held_bytes=1 << 20)(
        client.scope, client.receive, client.send
    )
    assert client.events == [*["read"] * reads, "415" if b"content-encoding" in headers else "413", "sent"]


async def test_a_client_that_sends_slowly_gets_its_refusal_in_time() -> None:
    client = Client([b"x" * 101, b"x"], {})
    first = client.receive

    async def receive() -> Any:
        return await (first() if len(client.pieces) == 2 else asyncio.Event().wait())

    await BodyLimits(nothing, max_bytes=100, seconds=0.05, max_held_bytes=1 << 20)(client.scope, receive, client.send)
    assert client.events == ["read", "413", "sent"]
