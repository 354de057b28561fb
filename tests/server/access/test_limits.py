"""Limits of tenants: the buckets by the test's own clock, and their effects on clients."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8serve.server.access.keys import Caller, TenantLimits, format_key_line
from fp8serve.server.access.limits import TenantLimiter, TenantRequest
from fp8serve.server.faults import Fault
from fp8serve.server.metrics import Metrics
from fp8serve.server.usage import Usage
from tests.patience import eventually
from tests.server.access.files import bearer, write
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher


class Shop:
    """The books of tenants, and a clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tenants = TenantLimiter(Metrics(), lambda: self.now)

    def request(self, tenant: str = "lab", **limits: int) -> TenantRequest:
        tenant_request = self.tenants.create_request(
            Caller("key", tenant, ("generate",), TenantLimits(**limits)), Usage()
        )
        tenant_request.begin()
        return tenant_request


def refused(fault: pytest.ExceptionInfo[Fault]) -> int | None:
    assert fault.value.status("/v1/x") == 429
    return fault.value.retry_after


def test_requests_a_minute_come_back_one_by_one() -> None:
    shop = Shop()
    for _ in range(6):
        shop.request(requests_per_minute=6).end()
    with pytest.raises(Fault, match="may make 6 requests a minute") as fault:
        shop.request(requests_per_minute=6)
    assert refused(fault) == 10
    shop.now += 9.5
    with pytest.raises(Fault) as fault:
        shop.request(requests_per_minute=6)
    assert refused(fault) == 1
    shop.now += 0.5
    shop.request(requests_per_minute=6)
    shop.now += 3600
    for _ in range(6):
        shop.request(requests_per_minute=6)
    with pytest.raises(Fault):
        shop.request(requests_per_minute=6)


def test_tenants_have_books_of_their_own_and_keys_of_one_share_them() -> None:
    shop = Shop()
    shop.request("lab", requests_per_minute=1)
    shop.request("office", requests_per_minute=1)
    for tenant in ("lab", "office"):
        with pytest.raises(Fault):
            shop.request(tenant, requests_per_minute=1)


def test_a_request_that_is_refused_for_its_tokens_costs_none() -> None:
    """As docs/operating.md says of every refusal."""
    shop = Shop()
    limits = {"requests_per_minute": 2, "tokens_per_minute": 60}
    running = shop.request(**limits)
    running.reserve_tokens(50)
    for _ in range(5):
        tenant_request = shop.request(**limits)
        with pytest.raises(Fault, match="this request may need 20") as fault:
            tenant_request.reserve_tokens(20)
        assert refused(fault) == 10
        assert tenant_request.headers()["x-ratelimit-remaining-requests"] == "1"
        tenant_request.end()
    shop.request(**limits).reserve_tokens(10)
    with pytest.raises(Fault, match="may make 2 requests a minute"):
        shop.request(**limits)


def test_requests_at_once_end_with_the_request() -> None:
    shop = Shop()
    first, _ = shop.request(concurrent_requests=2), shop.request(concurrent_requests=2)
    with pytest.raises(Fault, match="2 concurrent requests") as fault:
        shop.request(concurrent_requests=2)
    assert refused(fault) == 1
    first.end()
    shop.request(concurrent_requests=2)


def test_tokens_are_set_aside_and_what_was_not_used_comes_back() -> None:
    shop = Shop()
    first = shop.request(tokens_per_minute=60)
    first.reserve_tokens(50)
    second = shop.request(tokens_per_minute=60)
    with pytest.raises(Fault, match="this request may need 20") as fault:
        second.reserve_tokens(20)
    assert refused(fault) == 10
    first.usage.prompt_tokens, first.usage.generated_tokens = 5, 5
    first.end()
    assert second.headers()["x-ratelimit-remaining-tokens"] == "50"
    second.reserve_tokens(20)


def test_a_request_above_the_bound_waits_for_a_full_bucket_and_pays_the_rest_after() -> None:
    shop = Shop()
    tenant_request = shop.request(tokens_per_minute=60)
    tenant_request.reserve_tokens(90)
    tenant_request.usage.generated_tokens = 90
    tenant_request.end()
    with pytest.raises(Fault) as fault:
        shop.request(tokens_per_minute=60)
    assert refused(fault) == 31
    shop.now += 31
    with pytest.raises(Fault) as fault:
        shop.request(tokens_per_minute=60).reserve_tokens(61)
    assert refused(fault) == 59
    shop.now += 59
    shop.request(tokens_per_minute=60).reserve_tokens(61)


def test_new_limits_count_from_the_next_request() -> None:
    shop = Shop()
    shop.request(requests_per_minute=2)
    assert shop.request(requests_per_minute=1).headers()["x-ratelimit-limit-requests"] == "1"
    shop.request()
    with pytest.raises(Fault):
        shop.request(requests_per_minute=1)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    lines = [format_key_line(name, name, ["generate"], name) for name in ("few", "small", "single", "free")]
    limits = [
        "tenants.few = { requests_per_minute = 2 }",
        "tenants.small = { tokens_per_minute = 40 }",
        "tenants.single = { concurrent_requests = 1 }",
    ]
    return write(tmp_path / "keys.toml", *lines, *limits)


async def ask(server: Server, key: str, new: int = 4, **more: Any) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": new, **more}
    return await server.client.post("/v1/completions", json=body, headers=bearer(key))


async def test_clients_see_their_limits_and_when_to_come_back(start: Start, keys: Path) -> None:
    async with start(api_keys=keys, api_key="ops") as server:
        first = await ask(server, "few")
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert 0 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert (await ask(server, "few", new=-1)).status_code == 400
        last = await ask(server, "few", stream=True)
        assert last.status_code == 429
        assert last.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(last.headers["retry-after"]) <= 30
        assert last.headers["x-ratelimit-remaining-requests"] == "0"
        assert not any(name.startswith("x-ratelimit") for name in (await ask(server, "free")).headers)
        assert (await server.client.get("/v1/models", headers=bearer("few"))).status_code == 200
        shown = (await server.client.get("/metrics", headers=bearer("ops"))).text
        assert 'fp8serve_tenant_requests_total{tenant="few"} 2.0' in shown
        assert 'fp8serve_tenant_requests_rejected_total{reason="requests",tenant="few"} 1.0' in shown
        assert 'fp8serve_tenant_requests_in_flight{tenant="few"} 0.0' in shown


async def test_tokens_are_counted_by_tenant_streamed_or_not(start: Start, keys: Path) -> None:
    async with start(api_keys=keys, api_key="ops") as server:
        used = 0
        for stream in (False, True):
            answer = await ask(
                server, "small", stream=stream, stream_options={"include_usage": True} if stream else None
            )
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ratelimit-limit-tokens"] == "40"
            used = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert used < 40
        refusal = await ask(server, "small", new=200)
        assert (refusal.status_code, "retry-after" in refusal.headers) == (429, True)
        shown = (await server.client.get("/metrics", headers=bearer("ops"))).text
        assert 'fp8serve_tenant_tokens_total{kind="generated",tenant="small"} 8.0' in shown
        assert 'fp8serve_tenant_requests_rejected_total{reason="tokens",tenant="small"} 1.0' in shown
        assert 'fp8serve_requests_in_flight{model="tiny"} 0.0' in shown


async def test_a_client_that_leaves_gives_its_place_back(start: Start, keys: Path) -> None:
    async with start(Launcher(lambda: FakeEngine(delay=0.05)), api_keys=keys) as server:
        long = asyncio.create_task(ask(server, "single", new=400))
        books = server.state.tenants.counters

        await eventually(lambda: "single" in books and books["single"].running == 1, "the first request")
        assert (await ask(server, "single")).status_code == 429
        long.cancel()
        await eventually(lambda: books["single"].running == 0, "the place")
        assert (await ask(server, "single")).status_code == 200


async def test_a_server_without_keys_limits_nobody(start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/generate", json={"inputs": "abc"})
        assert answer.status_code == 200
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)
        assert 'tenant_requests_total{tenant="anonymous"} 1.0' in (await server.client.get("/metrics")).text
