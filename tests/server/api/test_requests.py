"""Requests under way: their tenants and states, and cancelling one as an operator."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.server.serving.generation import Generation, build_requests
from fp8serve.server.usage import Usage
from tests.patience import eventually
from tests.server.access.files import bearer, key_of, one_for_each_scope
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher


def slow() -> Launcher:
    return Launcher(lambda: FakeEngine(delay=0.01))


async def listed(server: Server) -> list[dict[str, Any]]:
    return list((await server.client.get("/requests")).json()["requests"])


async def test_requests_under_way_are_listed_with_how_far_they_are(start: Start) -> None:
    async with start(slow()) as server:
        engine = server.launcher.engine
        assert (await server.client.get("/requests")).json() == {"requests": [], "total": 0}
        engine.delay = 1000.0  # the engine sends nothing until the test lowers the delay
        body = {"prompt": ["abc", "defg"], "n": 2, "max_tokens": 50}
        headers = {"x-request-id": "mine"}
        pending = asyncio.create_task(server.client.post("/v1/completions", json=body, headers=headers))
        await eventually(lambda: len(engine.running) == 4)
        (row,) = await listed(server)
        assert row.pop("age") >= 0
        row_id = row.pop("id")
        assert row == {
            "request_id": "mine", "tenant": "anonymous", "model": "tiny", "state": "queued", "answers": 4,
            "prompt_tokens": 7, "generated_tokens": 0, "max_new_tokens": 200,
        }  # fmt: skip
        engine.prefilling = {f"{row_id}-2"}
        await eventually(lambda: server.state.models.default.current.prefilling_ids)  # type: ignore[union-attr]
        assert (await listed(server))[0]["state"] == "prefill"
        pending.cancel()
        await eventually(lambda: not engine.running)
        assert await listed(server) == []


async def test_a_cancelled_request_ends_at_once_and_says_so(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    async with start(slow()) as server:
        engine = server.launcher.engine
        body = {"prompt": "abc", "max_tokens": 400}
        whole = asyncio.create_task(server.client.post("/v1/completions", json=body))
        streamed = asyncio.create_task(server.client.post("/v1/completions", json=body | {"stream": True}))
        await eventually(lambda: len(engine.requests) >= 3 and len(engine.running) == 2)  # a canary was the first
        await eventually(lambda: all(one.generated_tokens for one in server.state.active if one.is_running))
        rows = await listed(server)
        assert [row["state"] for row in rows] == ["decode", "decode"]
        assert rows[0]["age"] >= rows[1]["age"]
        with caplog.at_level(logging.INFO, "fp8serve.server"):
            for row in rows:
                answer = await server.client.post(f"/requests/{row['id']}/cancel")
                assert (answer.status_code, answer.json()["id"]) == (200, row["id"])
        assert sum("cancelled request" in message for message in caplog.messages) == 2
        refused = await whole
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_cancelled")
        assert refused.headers["x-should-retry"] == "false"
        assert '"request_cancelled"' in (await streamed).text
        assert not engine.running
        again = await server.client.post(f"/requests/{rows[0]['id']}/cancel")
        assert (again.status_code, again.json()["code"]) == (404, "request_not_found")
        cancelled = 'fp8serve_requests_finished_total{model="tiny",outcome="cancelled"} 2.0'
        assert cancelled in (await server.client.get("/metrics")).text


async def test_a_reader_that_stalls_does_not_keep_a_cancelled_request_running(start: Start) -> None:
    async with start(slow()) as server:
        engine = server.launcher.engine
        served = server.state.served(None)
        with served.admission.reserve(1) as reservation:
            requests = build_requests(served, [(97,)], SamplingParams(max_new_tokens=400), 1)
            generation = Generation(served, requests, 1, reservation, Usage())
        server.state.active.add(generation)
        outputs = generation.outputs()
        await anext(outputs)  # and reads no further
        (row,) = await listed(server)
        await server.client.post(f"/requests/{row['id']}/cancel")
        await eventually(lambda: not engine.running)
        assert await listed(server) == []
        await outputs.aclose()


async def test_listing_and_cancelling_requests_need_their_own_scopes(start: Start, tmp_path: Path) -> None:
    async with start(slow(), api_keys=one_for_each_scope(tmp_path / "keys.toml")) as server:
        engine = server.launcher.engine
        body = {"prompt": "abc", "max_tokens": 400}
        ask = server.client.post("/v1/completions", json=body, headers=bearer(key_of("generate")))
        pending = asyncio.create_task(ask)
        await eventually(lambda: bool(engine.running))
        assert (await server.client.get("/requests", headers=bearer(key_of("generate")))).status_code == 403
        (row,) = (await server.client.get("/requests", headers=bearer(key_of("read")))).json()["requests"]
        assert row["tenant"] == "generate"
        path = f"/requests/{row['id']}/cancel"
        for scope, status in (("read", 403), ("generate", 403), ("admin", 200)):
            assert (await server.client.post(path, headers=bearer(key_of(scope)))).status_code == status
        assert (await pending).status_code == 409
