"""Adapters beside a model: names, routes, leases, metrics, restarts; on fake engines."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import RequestError
from fp8serve.server.named_models import NamedAdapter, NamedModel
from tests.patience import eventually
from tests.server.access.files import bearer, key_of, one_for_each_scope
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher, embedding_engine, model_dir
from tests.server.finetuning.test_finetune import submit, wait_for


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """A directory with adapters that may be loaded, and a model; beside it an adapter that may not."""
    for name in ("more/a", "more/team/b", "more/bad", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    model_dir(tmp_path / "more" / "model")
    return tmp_path / "more"


async def load(server: Server, name: str, path: Path | str, **more: Any) -> Any:
    body = {"lora_name": name, "lora_path": str(path)} | more
    return await server.client.post("/v1/load_lora_adapter", json=body)


async def unload(server: Server, name: str) -> Any:
    return await server.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def complete(server: Server, model: str | None, **more: Any) -> Any:
    return await server.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "model": model} | more)


async def listed(server: Server) -> dict[str, Any]:
    return {model["id"]: model for model in (await server.client.get("/v1/models")).json()["data"]}


async def metric(server: Server, name: str, model: str) -> float | None:
    lines = (await server.client.get("/metrics")).text.splitlines()
    matches = [line for line in lines if line.startswith(f'{name}{{model="{model}"')]
    return float(matches[0].rpartition(" ")[2]) if matches else None


async def test_every_route_accepts_an_adapters_name_and_passes_it_to_the_engine(start: Start, more: Path) -> None:
    async with start(models_dir=more) as server:
        answer = await load(server, "tutor", "team/b")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'tutor' added successfully.")
        assert (await load(server, "tutor", "team/b")).status_code == 200  # it is there
        assert (await load(server, "second", more / "a", base_model_name="tiny")).status_code == 200

        models = await listed(server)
        assert list(models)[:3] == ["tiny", "tutor", "second"]
        assert (models["tutor"]["parent"], models["tutor"]["root"], models["tutor"]["state"]) == (
            "tiny",
            "team/b",
            "ready",
        )
        assert (models["tiny"]["parent"], models["second"]["root"]) == (None, "a")
        info = (await server.client.get("/info", params={"model": "tutor"})).json()
        assert info["model_id"] == "tutor"
        assert [adapter["name"] for adapter in info["adapters"]] == ["tutor", "second"]
        view = (await server.client.get("/models")).json()["models"][0]
        assert view["adapters"][0] == {
            "name": "tutor", "root": "team/b", "in_flight": 0, "method": "lora", "rank": 4, "layers": 2, "bytes": 100,
        }  # fmt: skip

        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": "tutor"}
        for route, body in (
            ("/v1/completions", {"prompt": "abc", "max_tokens": 2, "model": "tutor"}),
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"input": "a", "max_output_tokens": 2, "model": "tutor"}),
            ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}, "model": "tutor"}),
        ):
            answered = await server.client.post(route, json=body)
            assert answered.status_code == 200, (route, answered.text)
            last = server.launcher.engine.requests[-1]
            assert server.launcher.engine.adapters[str(last.adapter)].name == "b", route
        assert (await complete(server, "tiny")).json()["model"] == "tiny"
        assert server.launcher.engine.requests[-1].adapter is None
        assert (await complete(server, "tutor")).json()["model"] == "tutor"
        assert await metric(server, "fp8serve_requests_accepted_total", "tutor") == 6
        assert await metric(server, "fp8serve_requests_accepted_total", "tiny") == 1
        missing = await complete(server, "nobody")
        assert missing.status_code == 404
        assert "has tiny, tutor, second" in missing.text


async def test_an_adapter_that_cannot_be_loaded_leaves_nothing_behind(start: Start, more: Path, tmp_path: Path) -> None:
    launcher = Launcher(lambda: _with_bad("bad"))
    async with start(launcher, models_dir=more, aliases=("other=tiny",)) as server:
        for path in ("../outside", tmp_path / "outside", "/etc", "team", "model", ".", "a/", "nothing"):
            answer = await load(server, "tutor", path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_path"), path
        refused = await load(server, "tutor", "bad")
        assert refused.status_code == 409
        assert "The adapter cannot be served: bad: the rank of q_proj is 512." in refused.text
        assert str(tmp_path) not in refused.text
        for name in ("tiny", "other"):
            assert (await load(server, name, "a")).json()["error"]["code"] == "name_taken"
        for name in ("", "ft:x", "a b", "base", "x" * 200):
            assert (await load(server, name, "a")).status_code == 400, name
        assert (await load(server, "tutor", "a", lora_int_id=1)).status_code == 400
        assert (await load(server, "tutor", "a", base_model_name="none")).status_code == 404
        assert (await unload(server, "tutor")).status_code == 404
        assert (await unload(server, "tiny")).status_code == 404
        assert "tutor" not in await listed(server)
        assert await metric(server, "fp8serve_requests_accepted_total", "tutor") is None
        assert server.launcher.engine.adapters == {}
        assert (await load(server, "tutor", "a")).status_code == 200
        assert (await load(server, "tutor", "team/b")).json()["error"]["code"] == "name_taken"
        alias = await server.client.post("/models/tiny/alias", json={"alias": "tutor"})
        assert alias.json()["code"] == "name_taken"
        swapped = await server.client.post("/models/tiny/activate", json={"source": "base"})
        assert swapped.status_code == 409
        assert "Unload first: tutor." in swapped.text


def _with_bad(name: str) -> FakeEngine:
    engine = FakeEngine()
    engine.bad_adapters.add(name)
    return engine


async def test_answers_under_way_end_with_an_adapter_that_was_unloaded(start: Start, more: Path) -> None:
    async with start(Launcher(lambda: FakeEngine(delay=0.02)), models_dir=more) as server:
        await load(server, "tutor", "a")
        engine = server.launcher.engine
        [old] = engine.adapters
        running = asyncio.create_task(complete(server, "tutor", max_tokens=20))
        await eventually(lambda: bool(engine.running), "a request")
        assert (await unload(server, "tutor")).status_code == 200
        assert (await complete(server, "tutor")).status_code == 404
        assert await metric(server, "fp8serve_requests_accepted_total", "tutor") is None
        assert (await load(server, "tutor", "team/b")).status_code == 200  # another, by the same name
        assert (await complete(server, "tutor")).status_code == 200
        assert engine.requests[-1].adapter != old
        assert old in engine.adapters
        answer = (await running).json()
        assert answer["usage"]["completion_tokens"] == 20
        await eventually(lambda: old not in engine.adapters, "the end of the first adapter")
        assert len(engine.adapters) == 1


async def test_adapters_of_the_command_line_come_back_with_the_engine(start: Start, more: Path) -> None:
    adapters = NamedAdapter("tutor", more / "a"), NamedAdapter("second", more / "team" / "b")
    async with start(models_dir=more, adapters=adapters) as server:
        assert (await complete(server, "second")).status_code == 200
        server.launcher.make = lambda: _with_bad("b")  # it was changed on the disk meanwhile
        server.launcher.engine.alive = False
        await eventually(lambda: len(server.launcher.engines) == 2 and server.state.models.default.ready)
        assert (await complete(server, "tutor")).status_code == 200
        assert [path.name for path in server.launcher.engine.adapters.values()] == ["a"]
        assert (await complete(server, "second")).status_code == 404
        assert await metric(server, "fp8serve_requests_accepted_total", "second") is None
    launcher = Launcher(lambda: _with_bad("b"))
    async with start(launcher, wait=False, adapters=adapters) as server:
        await eventually(server.state.failed.is_set, "a refusal")
        assert "the rank of q_proj is 512" in str(server.state.models.default.problem)


async def test_a_jobs_adapter_is_activated_and_remembered(start: Start) -> None:
    async with start() as server:
        job = await submit(server, lora_rank=8, lora_targets=["q_proj"], dora=True)
        finished_job = await wait_for(server, job["id"], "succeeded", "failed")
        name = finished_job["fine_tuned_model"]
        assert (await listed(server))[name]["state"] == "available"
        assert (await complete(server, name)).status_code == 404
        answer = await server.client.post(f"/finetune/{job['id']}/activate")
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        assert answer.json()["served"]["source"] == job["id"]
        assert (await listed(server))[name]["parent"] == "tiny"
        assert (await server.client.get(f"/finetune/{job['id']}")).json()["active"]
        assert (await complete(server, name)).status_code == 200
        assert (await load(server, "short", job["id"])).status_code == 200  # under another name, too
        assert (await complete(server, "short")).status_code == 200
        assert (await unload(server, "short")).status_code == 200
        refused = await server.client.post("/models/new/load", json={"source": job["id"]})
        assert refused.status_code == 404
    async with start() as server:
        assert (await complete(server, name)).status_code == 200
        assert (await unload(server, name)).status_code == 200
    async with start() as server:
        assert (await complete(server, name)).status_code == 404


async def test_loading_an_adapter_needs_the_admin_scope(start: Start, more: Path, tmp_path: Path) -> None:
    keys, admin = one_for_each_scope(tmp_path / "keys.toml"), bearer(key_of("admin"))
    launcher = Launcher()
    launcher.factories = {"model": embedding_engine}
    async with start(launcher, models_dir=more, api_keys=keys, models=(NamedModel("e", more / "model"),)) as server:
        body = {"lora_name": "tutor", "lora_path": "a"}
        for scope in ("read", "generate", "finetune"):
            for route in ("load", "unload"):
                path = f"/v1/{route}_lora_adapter"
                answer = await server.client.post(path, json=body, headers=bearer(key_of(scope)))
                assert answer.status_code == 403
        assert (await server.client.post("/v1/load_lora_adapter", json=body, headers=admin)).status_code == 200
        request = {"prompt": "abc", "max_tokens": 3, "model": "tutor"}
        answer = await server.client.post("/v1/completions", json=request, headers=bearer(key_of("generate")))
        assert answer.status_code == 200


@pytest.mark.parametrize("text", ["tutor", "=dir", "tutor=", "a b=dir", "ft:x=dir"])
def test_a_wrong_option_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        NamedAdapter.parse(text)
    assert NamedAdapter.parse(f"tutor={os.sep}x=y").directory == Path("/x=y")
