"""The table of scopes lists every route, and a live server allows exactly the routes that the table opens."""

import itertools
from pathlib import Path

import pytest
from starlette.types import Scope as Request

from fp8serve.server.access.keys import SCOPES, Scope
from fp8serve.server.access.scopes import OPENED_BY, WITH_ANY_KEY, has_tenant_limits, opens
from fp8serve.server.app import ROUTES, pages
from fp8serve.server.http.scope import OPEN_PATHS
from tests.server.access.files import bearer, key_of, one_for_each_scope
from tests.server.conftest import Start

CLOSED = ["/nope", "/finetune/x/y", "/v1", "/v1/", "/v1//models", "/generate/", "/GENERATE", "/consoles/a", "/info/\nx"]


def routes() -> list[tuple[str, str]]:
    """Returns every method and path that fp8serve's routers answer."""
    routers = (*(module.router for module in ROUTES), pages())
    pairs = ((route, method) for router in routers for route in router.routes for method in route.methods)
    return sorted({(method, route.path) for route, method in pairs if route.path not in OPEN_PATHS})


def request(method: str, path: str) -> Request:
    return {"type": "http", "method": method, "path": path}


def listed() -> set[tuple[str, str]]:
    rows = itertools.chain(WITH_ANY_KEY, *OPENED_BY.values())
    return {(method, path) for method, _, path in (row.partition(" ") for row in rows)}


def test_every_route_is_in_the_table_and_every_row_is_a_route() -> None:
    ours = {("GET" if method == "HEAD" else method, path) for method, path in routes()}
    ours = {(method, "/console/{file}" if path.startswith("/console/") else path) for method, path in ours}
    assert len(ours) > 40
    assert ours - listed() == set(), "say in server/access/scopes.py which keys open these"
    assert listed() - ours == {("GET", "/openapi.json")}


def test_no_route_is_opened_by_two_scopes() -> None:
    rows = [row for rows in (WITH_ANY_KEY, *OPENED_BY.values()) for row in rows]
    assert len(rows) == len(set(rows))


def test_a_route_outside_the_table_is_open_to_admin_only() -> None:
    others: tuple[Scope, ...] = tuple(scope for scope in SCOPES if scope != "admin")
    for path, method in itertools.product(CLOSED, ("GET", "POST", "DELETE", "OPTIONS", "PUT")):
        assert not opens(others, request(method, path)), (method, path)
        assert opens(("admin",), request(method, path))
    for method, path in (("GET", "/generate"), ("POST", "/metrics"), ("PUT", "/finetune/x"), ("OPTIONS", "/info")):
        assert not opens(others, request(method, path))
    assert not opens((), request("GET", "/version"))


def test_head_needs_the_scope_of_get_and_limits_apply_to_routes_that_generate() -> None:
    assert opens(("read",), request("HEAD", "/metrics"))
    assert not opens(("generate",), request("HEAD", "/metrics"))
    assert has_tenant_limits(request("POST", "/generate"))
    assert not has_tenant_limits(request("GET", "/generate"))
    assert not has_tenant_limits(request("POST", "/finetune"))


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_key_opens_the_routes_of_its_scope_and_no_other(start: Start, tmp_path: Path, scope: Scope) -> None:
    async with start(api_keys=one_for_each_scope(tmp_path / "keys.toml")) as server:
        server.client.headers.update(bearer(key_of(scope)))
        for method, path in [*routes(), ("GET", "/openapi.json"), *(("GET", path) for path in CLOSED)]:
            url = path.replace("{", "").replace("}", "").replace(":path", "")
            row = "GET" if method == "HEAD" else method, "/console/{file}" if path.startswith("/console/") else path
            allowed = scope == "admin" or " ".join(row) in WITH_ANY_KEY + OPENED_BY[scope]
            answer = await server.client.request(method, url.replace("\n", "%0A"))
            assert (answer.status_code != 403) == allowed, (method, path, answer.status_code)
            assert answer.status_code != 401


async def test_the_refusal_is_one_sentence(start: Start, tmp_path: Path) -> None:
    async with start(api_keys=one_for_each_scope(tmp_path / "keys.toml")) as server:
        answer = await server.client.get("/metrics", headers=bearer(key_of("generate")))
        assert answer.status_code == 403
        assert answer.json()["error"] == "The scopes of this API key (generate) do not open this route."
        answer = await server.client.post("/v1/completions", json={}, headers=bearer(key_of("read")))
        assert answer.json()["error"]["code"] == "forbidden"
        assert answer.json()["error"]["message"].startswith("The scopes of this API key (read)")
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("scope", ["generate", "admin"])
def test_operating_names_every_route_of_a_scope(scope: Scope) -> None:
    """The page may use other names in `{...}`."""
    page = Path(__file__).parents[3] / "docs" / "operating.md"
    (row,) = (line for line in page.read_text().splitlines() if line.startswith(f"| `{scope}` |"))
    paths = {route.partition(" ")[2] for route in OPENED_BY[scope]}
    shared = {"/models/{name:path}/load", "/models/{name:path}/unload", "/models/{name:path}/alias"}  # "`load`, ..."
    missing = [path for path in paths - shared if path.split("{")[0].rstrip("/") not in row]
    assert not [path for path in missing if path != "/v1/messages/count_tokens"]
