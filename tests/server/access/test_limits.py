"""Limits of tenants: the token buckets under the test's own clock, and the answers that clients get."""

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


class LimiterAtFixedTime:
    """The limiter of tenants, with a clock that only the test moves."""

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


def test_the_budget_of_requests_refills_one_by_one() -> None:
    limiter = LimiterAtFixedTime()
    for _ in range(6):
        limiter.request(requests_per_minute=6).end()
    with pytest.raises(Fault, match="may make 6 requests a minute") as fault:
        limiter.request(requests_per_minute=6)
    assert refused(fault) == 10
    limiter.now += 9.5
    with pytest.raises(Fault) as fault:
        limiter.request(requests_per_minute=6)
    assert refused(fault) == 1
    limiter.now += 0.5
    limiter.request(requests_per_minute=6)
    limiter.now += 3600
    for _ in range(6):
        limiter.request(requests_per_minute=6)
    with pytest.raises(Fault):
        limiter.request(requests_per_minute=6)


def test_each_tenant_has_its_own_counters() -> None:
    limiter = LimiterAtFixedTime()
    limiter.request("lab", requests_per_minute=1)
    limiter.request("office", requests_per_minute=1)
    for tenant in ("lab", "office"):
        with pytest.raises(Fault):
            limiter.request(tenant, requests_per_minute=1)


def test_a_request_refused_for_its_tokens_uses_no_budget() -> None:
    """docs/operating.md promises this for every refusal."""
    limiter = LimiterAtFixedTime()
    limits = {"requests_per_minute": 2, "tokens_per_minute": 60}
    running = limiter.request(**limits)
    running.reserve_tokens(50)
    for _ in range(5):
        tenant_request = limiter.request(**limits)
        with pytest.raises(Fault, match="this request may need 20") as fault:
            tenant_request.reserve_tokens(20)
        assert refused(fault) == 10
        assert tenant_request.headers()["x-ratelimit-remaining-requests"] == "1"
        tenant_request.end()
    limiter.request(**limits).reserve_tokens(10)
    with pytest.raises(Fault, match="may make 2 requests a minute"):
        limiter.request(**limits)


def test_an_ended_request_frees_its_concurrency_slot() -> None:
    limiter = LimiterAtFixedTime()
    first, _ = limiter.request(concurrent_requests=2), limiter.request(concurrent_requests=2)
    with pytest.raises(Fault, match="2 concurrent requests") as fault:
        limiter.request(concurrent_requests=2)
    assert refused(fault) == 1
    first.end()
    limiter.request(concurrent_requests=2)


def test_reserved_tokens_that_were_not_used_are_returned() -> None:
    limiter = LimiterAtFixedTime()
    first = limiter.request(tokens_per_minute=60)
    first.reserve_tokens(50)
    second = limiter.request(tokens_per_minute=60)
    with pytest.raises(Fault, match="this request may need 20") as fault:
        second.reserve_tokens(20)
    assert refused(fault) == 10
    first.usage.prompt_tokens, first.usage.generated_tokens = 5, 5
    first.end()
    assert second.headers()["x-ratelimit-remaining-tokens"] == "50"
    second.reserve_tokens(20)


def test_a_request_above_the_limit_needs_a_full_bucket_and_leaves_a_debt() -> None:
    limiter = LimiterAtFixedTime()
    tenant_request = limiter.request(tokens_per_minute=60)
    tenant_request.reserve_tokens(90)
    tenant_request.usage.generated_tokens = 90
    tenant_request.end()
    with pytest.raises(Fault) as fault:
        limiter.request(tokens_per_minute=60)
    assert refused(fault) == 31
    limiter.now += 31
    with pytest.raises(Fault) as fault:
        limiter.request(tokens_per_minute=60).reserve_tokens(61)
    assert refused(fault) == 59
    limiter.now += 59
    limiter.request(tokens_per_minute=60).reserve_tokens(61)


def test_new_limits_count_from_the_next_request() -> None:
    limiter = LimiterAtFixedTime()
    limiter.request(requests_per_minute=2)
    assert limiter.request(requests_per_minute=1).headers()["x-ratelimit-limit-requests"] == "1"
    limiter.request()
    with pytest.raises(Fault):
        limiter.request(requests_per_minute=1)


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
        metrics = (await server.client.get("/metrics", headers=bearer("ops"))).text
        assert 'fp8serve_tenant_requests_total{tenant="few"} 2.0' in metrics
        assert 'fp8serve_tenant_requests_rejected_total{reason="requests",tenant="few"} 1.0' in metrics
        assert 'fp8serve_tenant_requests_in_flight{tenant="few"} 0.0' in metrics


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
        metrics = (await server.client.get("/metrics", headers=bearer("ops"))).text
        assert 'fp8serve_tenant_tokens_total{kind="generated",tenant="small"} 8.0' in metrics
        assert 'fp8serve_tenant_requests_rejected_total{reason="tokens",tenant="small"} 1.0' in metrics
        assert 'fp8serve_requests_in_flight{model="tiny"} 0.0' in metrics


async def test_a_client_that_disconnects_frees_its_slot(start: Start, keys: Path) -> None:
    async with start(Launcher(lambda: FakeEngine(delay=0.05)), api_keys=keys) as server:
        long = asyncio.create_task(ask(server, "single", new=400))
        counters = server.state.tenants.counters

        await eventually(lambda: "single" in counters and counters["single"].running == 1, "the first request")
        assert (await ask(server, "single")).status_code == 429
        long.cancel()
        await eventually(lambda: counters["single"].running == 0, "the end of the first request")
        assert (await ask(server, "single")).status_code == 200


async def test_a_server_without_keys_has_no_tenant_limits(start: Start) -> None:
    async with start() as server:
        answer = await server.client.post("/generate", json={"inputs": "abc"})
        assert answer.status_code == 200
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)
        assert 'tenant_requests_total{tenant="anonymous"} 1.0' in (await server.client.get("/metrics")).text
