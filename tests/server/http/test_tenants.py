"""A tenant is a key or an address, whatever a request says about itself."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8serve.engine.request import Request
from fp8serve.server.http.access_control import TenantNames
from fp8serve.server.settings import Settings
from tests.server.conftest import Start
from tests.server.fakes import FakeEngine, Launcher


class RecordingEngine(FakeEngine):
    """An engine that records the requests that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Request] = []

    def generate(self, request: Request) -> Any:
        self.received.append(request)
        return super().generate(request)


def scope(host: str, **headers: str) -> dict[str, Any]:
    raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "client": (host, 1234), "headers": raw_headers}


tenant_of = TenantNames(Settings(model=Path("m"))).name


def test_an_address_is_a_tenant_where_no_key_is_set() -> None:
    assert tenant_of(scope("10.0.0.1"), None) == tenant_of(scope("10.0.0.1"), None)
    assert tenant_of(scope("10.0.0.1"), None) != tenant_of(scope("10.0.0.2"), None)
    assert tenant_of(scope("::ffff:10.0.0.1"), None) == tenant_of(scope("10.0.0.1"), None)
    assert tenant_of(scope("2001:db8::1"), None) == tenant_of(scope("2001:db8::2"), None)
    assert tenant_of(scope("2001:db8::1"), None) != tenant_of(scope("2001:db8:0:1::1"), None)
    assert tenant_of({"type": "http", "client": None, "headers": []}, None)


def test_a_key_is_a_tenant_wherever_it_comes_from() -> None:
    assert tenant_of(scope("10.0.0.1"), "k") == tenant_of(scope("10.0.0.2"), "k")
    assert tenant_of(scope("10.0.0.1"), "k") != tenant_of(scope("10.0.0.1"), "l")
    assert tenant_of(scope("k"), None) != tenant_of(scope("10.0.0.1"), "k")
    assert "secret" not in tenant_of(scope("10.0.0.1"), "secret")


async def test_the_engine_gets_the_tenant_and_the_group_of_each_request(start: Start) -> None:
    async with start(Launcher(RecordingEngine)) as server:
        engine: Any = server.launcher.engine
        engine.received.clear()
        for host in ("10.0.0.1", "10.0.0.2"):
            transport = httpx.ASGITransport(server.app, client=(host, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "user": "me"}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                native_body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
                headers = {"x-forwarded-for": "10.9.9.9", "x-request-id": "mine"}
                assert (await client.post("/generate", json=native_body, headers=headers)).status_code == 200
        mine, theirs = engine.received[:5], engine.received[5:]
        assert len({request.tenant for request in mine}) == len({request.tenant for request in theirs}) == 1
        assert mine[0].tenant != theirs[0].tenant
        assert len({request.group for request in mine[:4]}) == 1
        assert mine[4].group != mine[0].group


async def test_a_key_is_the_tenant(start: Start) -> None:
    async with start(Launcher(RecordingEngine), api_key="k") as server:
        engine: Any = server.launcher.engine
        engine.received.clear()
        for host in ("10.0.0.1", "10.0.0.2"):
            transport = httpx.ASGITransport(server.app, client=(host, 1))
            headers = {"authorization": "Bearer k"}
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
                body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
                assert (await client.post("/generate", json=body)).status_code == 200
        assert len({request.tenant for request in engine.received}) == 1
        assert engine.received[0].tenant


def test_tenant_names_persist_in_the_cache_directory(tmp_path: Path) -> None:
    with_cache = Settings(model=Path("m"), cache_dir=str(tmp_path / "kept"))
    names = {TenantNames(settings).name(scope("10.0.0.1"), None) for settings in (with_cache, with_cache)}
    assert len(names) == 1
    assert (tmp_path / "kept" / "tenants.secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["tenants.secret"]
    alone = Settings(model=Path("m"))
    assert len({TenantNames(settings).name(scope("10.0.0.1"), None) for settings in (alone, alone)} | names) == 3


def test_an_unusable_secret_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tenants.secret").write_bytes(b"short")
    settings = Settings(model=Path("m"), cache_dir=str(tmp_path))
    assert TenantNames(settings).name(scope("h"), None) != TenantNames(settings).name(scope("h"), None)
    assert "it has 5 bytes instead of 32" in caplog.text
