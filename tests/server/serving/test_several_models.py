"""Several models in one server: names, loading and unloading while others answer, memory, metrics; on fake engines."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError
from fp8serve.server.named_models import NamedModel
from fp8serve.server.serving import model_loader
from fp8serve.server.serving.supervisor import EngineSupervisor
from fp8serve.server.settings import Settings
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher, embedding_engine, model_dir

ASK = {"inputs": "abc", "parameters": {"max_new_tokens": 3}}


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """A directory with models that may be loaded: a and b."""
    for name in "ab":
        model_dir(tmp_path / "more" / name)
    return tmp_path / "more"


def launcher_of(**factories: Any) -> Launcher:
    launcher = Launcher()
    launcher.factories = factories
    return launcher


async def load(server: Server, name: str, source: str | None = None, **options: Any) -> Any:
    body = {} if source is None else {"source": source, "options": options}
    return await server.client.post(f"/models/{name}/load", json=body)


async def unload(server: Server, name: str, **body: Any) -> Any:
    return await server.client.post(f"/models/{name}/unload", json=body)


async def complete(server: Server, model: str | None, **more: Any) -> Any:
    return await server.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "model": model} | more)


async def states(server: Server) -> dict[str, str]:
    response = (await server.client.get("/models")).json()
    return {model["name"]: model["state"] for model in response["models"]}


async def test_models_of_the_command_line_answer_by_their_names(start: Start, more: Path) -> None:
    further = (NamedModel("small", more / "a"), NamedModel("e", more / "b"))
    async with start(launcher_of(b=embedding_engine), models=further, aliases=("gpt-4o=small",)) as server:
        await eventually(lambda: [m.ready for m in server.state.models.models.values()] == [True] * 3)
        own = server.launcher.engines
        for name, engine in (("tiny", own[0]), (None, own[0]), ("small", own[1]), ("gpt-4o", own[1])):
            before = len(engine.requests)
            answer = await complete(server, name)
            assert answer.status_code == 200, answer.text
            assert len(engine.requests) == before + 1
        assert answer.json()["model"] == "gpt-4o"
        for body in ({"input": "x"}, {"input": "x", "model": "e"}):
            vectors = (await server.client.post("/v1/embeddings", json=body)).json()
            assert vectors["model"] == "e"
        refused_embedding = await complete(server, "e")
        assert (refused_embedding.status_code, refused_embedding.json()["error"]["param"]) == (400, "model")
        assert "embedding model, which writes no text" in refused_embedding.json()["error"]["message"]
        refused = await server.client.post("/v1/embeddings", json={"input": "x", "model": "small"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_a_server_is_ready_when_all_models_of_the_command_line_were_tried(start: Start, more: Path) -> None:
    launcher = Launcher()
    launcher.paused, launcher.problems = "a", {"b": "The file is damaged."}
    async with start(launcher, models=(NamedModel("bad", more / "b"), NamedModel("small", more / "a"))) as server:
        assert (await complete(server, "tiny")).status_code == 200
        early = await server.client.get("/health/ready")
        assert (early.status_code, "loading" in early.text) == (503, True)
        assert (await server.client.get("/health/live")).status_code == 200
        launcher.paused = False
        await eventually(lambda: server.state.ready)
        assert (await server.client.get("/health/ready")).status_code == 200


async def test_an_unknown_model_is_openais_404_with_the_served_names(start: Start) -> None:
    async with start(aliases=("other=tiny",)) as server:
        answer = await complete(server, "nope")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "has tiny, other" in answer.json()["error"]["message"]


async def test_v1_models_tells_all_names_and_their_states(start: Start, more: Path) -> None:
    launcher = Launcher()
    launcher.problems = {"b": "The file is damaged."}
    further = (NamedModel("small", more / "a"), NamedModel("bad", more / "b"))
    async with start(launcher, models=further, models_dir=more, aliases=("x=small",)) as server:
        await eventually(lambda: server.state.models.models.get("bad", None) is not None)
        await eventually(lambda: server.state.models.models["bad"].state == "failed")
        job = (await server.client.post("/finetune", json={"data": [{"text": "ok"}], "suffix": "s"})).json()["id"]

        async def has_succeeded() -> bool:
            return bool((await server.client.get(f"/finetune/{job}")).json()["status"] == "succeeded")

        await eventually(has_succeeded)
        listed = (await server.client.get("/v1/models")).json()["data"]
        result = f"ft:tiny:org-local:s:{job[-8:]}"
        assert [(m["id"], m["state"], m["root"]) for m in listed] == [
            ("tiny", "ready", "tiny"),
            ("small", "ready", "small"),
            ("bad", "failed", "bad"),
            ("x", "ready", "small"),
            (result, "available", result),
            ("a", "available", "a"),
            ("b", "available", "b"),
        ]
        for model in listed:
            assert (await server.client.get(f"/v1/models/{model['id']}")).json() == model
        assert (await server.client.get("/v1/models/nope")).status_code == 404
        models = (await server.client.get("/models")).json()
        assert "damaged" in next(m["problem"] for m in models["models"] if m["name"] == "bad")
        failed = await complete(server, "bad")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_down")
        assert (await server.client.get("/health/ready")).status_code == 200
        assert (await complete(server, "tiny")).status_code == 200
        launcher.problems = {}
        assert (await load(server, "bad")).json()["state"] == "ready"  # the name is known


async def test_load_and_unload_are_idempotent_and_leave_no_trace(start: Start, more: Path) -> None:
    async with start(models_dir=more) as server:
        first = await load(server, "m/1", "a", max_num_seqs=2)
        assert (first.status_code, first.json()["state"], first.json()["default"]) == (200, "ready", False)
        assert server.launcher.sources[-1].options.max_num_seqs == 2
        again = await load(server, "m/1", "a", max_num_seqs=2)
        assert again.json() == first.json()
        assert (await load(server, "m/1")).json() == first.json()
        assert len(server.launcher.engines) == 2
        for source in ("b", "a"):  # another directory; the same with other options
            conflict = await load(server, "m/1", source)
            assert (conflict.status_code, conflict.json()["code"]) == (409, "name_taken")
        assert 'accepted_total{model="m/1"}' in (await server.client.get("/metrics")).text
        for _ in range(2):
            gone = await unload(server, "m/1")
            assert (gone.status_code, gone.json()) == (200, {"name": "m/1", "state": "unloaded"})
        assert server.launcher.engine.closed
        assert 'model="m/1"' not in (await server.client.get("/metrics")).text
        assert (await complete(server, "m/1")).status_code == 404
        assert (await load(server, "m/1")).json()["state"] == "ready"
        assert server.launcher.sources[-1].options.max_num_seqs == 2
        assert (await complete(server, "m/1")).status_code == 200


@pytest.mark.parametrize(
    ("name", "body", "status", "words"),
    [
        ("x", {"source": "../data"}, 404, "no such source"),
        ("x", {"source": "a/../b"}, 404, "no such source"),
        ("x", {"source": "/etc"}, 404, "no such source"),
        ("x", {}, 404, "no model of that name"),
        ("x y", {"source": "a"}, 422, "A model's name has"),
        ("ft:x", {"source": "a"}, 422, "reserved for fine-tuned models"),
        ("base", {"source": "a"}, 422, "reserved for fine-tuned models"),
        ("tiny", {"source": "a"}, 409, "is already the name of another model or adapter"),
        ("other", {"source": "a"}, 409, "is already the name of another model or adapter"),
        ("x", {"source": "a", "options": {"scales": "/etc/passwd"}}, 422, "scales is a path"),
        ("x", {"source": "a", "options": {"draft_model": "/etc"}}, 422, "draft_model is a path"),
        ("x", {"source": "a", "options": {"colour": 1}}, 422, "unknown option 'colour'"),
        ("x", {"source": "a", "options": {"max_num_seqs": 0}}, 422, "max_num_seqs must be at least"),
        ("x", {"source": "a", "options": {"recipe": "nope"}}, 422, "unknown recipe 'nope'"),
        ("x", {"source": "a", "options": {"tool_parser": "nope"}}, 422, "tool_parser"),
        ("x", {"options": {"max_num_seqs": 1}}, 422, "options needs a source"),
        ("x", {"source": 1}, 422, "source"),
        ("x", {"source": "a", "options": {"threads": [1]}}, 422, "threads must be a whole number"),
        ("x", {"source": "a", "options": {"recipe": {"a": 1}}}, 422, "recipe"),
        ("x", {"source": "a", "options": {"recipe": "a" * 100000}}, 422, "unknown recipe"),
        ("x", {"source": "a", "more": 1}, 422, "more"),
    ],
)
async def test_an_invalid_load_is_refused(
    name: str, body: dict[str, Any], status: int, words: str, start: Start, more: Path
) -> None:
    async with start(models_dir=more, aliases=("other=tiny",)) as server:
        answer = await server.client.post(f"/models/{name}/load", json=body)
        assert (answer.status_code, words in answer.text) == (status, True), answer.text
        assert list(await states(server)) == ["tiny"]
        assert str(more) not in answer.text


async def test_the_default_and_aliases_cannot_be_unloaded(start: Start) -> None:
    async with start(aliases=("other=tiny",)) as server:
        answer = await unload(server, "tiny")
        assert (answer.status_code, answer.json()["code"]) == (409, "name_taken")
        assert "default" in answer.json()["error"]
        for name in ("other", "nope"):
            assert (await unload(server, name)).status_code == 404
        assert (await complete(server, None)).status_code == 200


async def test_a_failed_load_disturbs_no_request_and_leaves_the_name_free(start: Start, more: Path) -> None:
    launcher = Launcher(lambda: FakeEngine(delay=0.01))
    launcher.problems = {"b": "The header is damaged."}
    async with start(launcher, models_dir=more) as server:
        running = asyncio.create_task(complete(server, "tiny", max_tokens=100))
        failed = await load(server, "x", "b")
        assert (failed.status_code, failed.json()["code"]) == (409, "load_failed")
        assert "header is damaged" in failed.json()["error"]
        assert (await running).status_code == 200
        assert (await load(server, "x", "a")).status_code == 200


async def test_a_client_loads_no_weights_with_nan(start: Start, more: Path) -> None:
    """The operator may: models of the command line are not checked for NaN."""
    save_file({"w": np.array([0, np.nan], np.float32)}, more / "b" / "model.safetensors")
    async with start(models_dir=more, models=(NamedModel("known", more / "b"),)) as server:
        await eventually(lambda: server.state.started)
        assert (await states(server))["known"] == "ready"
        refused = await load(server, "x", "b")
        assert (refused.status_code, refused.json()["code"]) == (409, "load_failed")
        assert "model.safetensors holds NaN or an infinity in w." in refused.json()["error"]
        assert "x" not in await states(server)
        assert (await load(server, "x", "a")).status_code == 200


async def test_a_model_that_does_not_fit_is_refused_before_anything_starts(
    start: Start, more: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.info |= {"weight_bytes": 300 << 20, "kv_cache_bytes": 500 << 20}
    engine.resident_bytes = 200 << 20
    async with start(launcher_of(tiny=lambda: engine), models_dir=more) as server:
        monkeypatch.setattr(model_loader, "free_memory", lambda: 800 << 20)  # 600 MiB of it will be the first model's
        answer = await load(server, "x", "a")
        assert (answer.status_code, answer.json()["code"]) == (409, "load_failed")
        assert "200.0 MiB are left" in answer.json()["error"]
        assert len(server.launcher.engines) == 1
        monkeypatch.setattr(model_loader, "free_memory", lambda: 1256 << 20)
        assert (await load(server, "x", "a")).status_code == 200
        weights = 2 * 2 * 3  # bytes: what the file has in FP32 is served in BF16
        assert server.launcher.sources[-1].options.kv_cache_bytes == ((400 << 20) - weights) // 4
        config = {"vocab_size": 500_000, "hidden_size": 1024}  # whose head in FP8 is 490 MiB
        fields = json.loads((more / "b" / "config.json").read_text())
        (more / "b" / "config.json").write_text(json.dumps(fields | config))
        assert (await load(server, "h", "b", head_dtype="fp8")).status_code == 409
        assert (await load(server, "h", "b", head_dtype="bf16")).status_code == 200  # is in the files
        too_large = await load(server, "y", "b", kv_cache_bytes=600 << 20)
        assert "its KV cache 600.0 MiB" in too_large.json()["error"]


async def test_loads_and_unloads_at_once_leave_one_engine_a_name(start: Start, more: Path) -> None:
    async with start(Launcher(load_seconds=0.05), models_dir=more) as server:
        loads = [load(server, name, name) for name in "ab" for _ in range(3)]
        assert [answer.status_code for answer in await asyncio.gather(*loads)] == [200] * 6
        assert len(server.launcher.engines) == 3
        changes = [
            load(server, "a"),
            unload(server, "a"),
            load(server, "a"),
            unload(server, "b"),
            complete(server, "tiny"),
        ]
        assert [answer.status_code for answer in await asyncio.gather(*changes)] == [200] * 5
        remaining = await states(server)  # clients that ask at once come in any order
        assert remaining in ({"tiny": "ready", "a": "ready"}, {"tiny": "ready"})
        assert len([engine for engine in server.launcher.engines if not engine.closed]) == len(remaining)
        assert (await load(server, "a")).status_code == 200
        assert await states(server) == {"tiny": "ready", "a": "ready"}


async def test_a_load_goes_on_without_its_client_and_requests_wait_for_it(start: Start, more: Path) -> None:
    launcher = Launcher()
    async with start(launcher, models_dir=more) as server:
        launcher.paused = True
        pending = asyncio.create_task(load(server, "x", "a"))
        await eventually(lambda: "x" in server.state.models.models)
        early = await complete(server, "x")
        assert (early.status_code, early.json()["error"]["code"]) == (503, "starting")
        assert (await complete(server, "tiny")).status_code == 200
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        launcher.paused = False
        await eventually(lambda: server.state.models.models["x"].ready)
        assert (await complete(server, "x")).status_code == 200


async def test_unloading_waits_for_answers_and_takes_nothing_new(start: Start, more: Path) -> None:
    async with start(launcher_of(a=lambda: FakeEngine(delay=0.02)), models_dir=more) as server:
        await load(server, "x", "a")
        running = asyncio.create_task(complete(server, "x", max_tokens=50))
        await eventually(lambda: server.launcher.engine.running)
        leaving = asyncio.create_task(unload(server, "x", seconds=600.0))
        await eventually(lambda: server.state.models.models["x"].state == "unloading")
        refused = await complete(server, "x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await running).status_code == 200
        assert (await leaving).status_code == 200
        assert server.launcher.engine.killed is None


@pytest.mark.parametrize("stream", [False, True])
async def test_unloading_ends_answers_that_take_too_long(stream: bool, start: Start, more: Path) -> None:
    async with start(launcher_of(a=lambda: FakeEngine(delay=0.05)), models_dir=more) as server:
        await load(server, "x", "a")
        running = asyncio.create_task(complete(server, "x", max_tokens=500, stream=stream))
        await eventually(lambda: server.launcher.engine.running)
        assert (await unload(server, "x", seconds=0.0)).status_code == 200
        answer = await running
        assert "engine_down" in answer.text
        assert (answer.status_code == 503) is not stream
        assert 'model="x"' not in (await server.client.get("/metrics")).text


async def test_a_server_that_stops_ends_loads_and_every_engine(start: Start, more: Path) -> None:
    launcher = Launcher()
    async with start(launcher, models_dir=more) as server:
        await load(server, "x", "a")
        launcher.paused = True
        waiting = asyncio.create_task(load(server, "y", "b"))
        await eventually(lambda: "y" in server.state.models.models)
    assert all(engine.closed for engine in launcher.engines)
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("change", ["load", "activate"])
async def test_a_server_that_is_told_to_stop_says_so_to_whoever_waits(change: str, start: Start, more: Path) -> None:
    launcher = Launcher()
    async with start(launcher, models_dir=more) as server:
        launcher.paused = True
        path, body = (
            ("/models/x/load", {"source": "a"}) if change == "load" else ("/models/tiny/activate", {"source": "base"})
        )
        waiting = asyncio.create_task(server.client.post(path, json=body))
        await eventually(lambda: "x" in server.state.models.models or server.state.models.default.activating)
        server.state.begin_drain()
        answer = await waiting
        assert (answer.status_code, answer.json()["code"]) == (503, "draining")
        assert (await load(server, "y", "b")).json()["code"] == "draining"


async def test_one_dead_engine_is_started_again_and_no_other(start: Start, more: Path) -> None:
    async with start(models_dir=more) as server:
        await load(server, "x", "a")
        default, dead = server.launcher.engines
        server.launcher.paused = True
        dead.alive = False
        await eventually(lambda: server.state.models.models["x"].state == "restarting")
        assert (await complete(server, "x")).status_code == 503
        assert (await complete(server, "tiny")).status_code == 200
        assert (await server.client.get("/health/ready")).status_code == 200
        server.launcher.paused = False
        await eventually(lambda: server.state.models.models["x"].ready)
        assert (await complete(server, "x")).status_code == 200
        assert default.alive
        text = (await server.client.get("/metrics")).text
        assert 'fp8serve_engine_restarts_total{model="x"} 1.0' in text
        assert 'fp8serve_engine_restarts_total{model="tiny"} 0.0' in text


async def test_a_defect_in_the_load_of_a_further_model_does_not_keep_the_server_from_readiness(
    start: Start, more: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a defect")

    async with start(models=(NamedModel("x", more / "a"),), wait=False) as server:
        monkeypatch.setattr(server.state.model_loader, "load", fail)
        await eventually(lambda: server.state.ready, "readiness")
    assert "x is not served" in caplog.text


async def test_an_engine_that_ends_with_the_server_is_not_started_again(start: Start, more: Path) -> None:
    """systemd sends SIGTERM to every process of a service, so an engine that is idle ends before its server does."""
    async with start(models_dir=more) as server:
        model = server.state.models.default
        await load(server, "x", "a")
        server.state.begin_drain()
        assert model.current is not None
        server.launcher.engines[0].alive = False
        await EngineSupervisor(model)._check(model.current)
        assert model.state == "ready"
        assert model.admission.capacity.in_flight == 0
        model.is_shutting_down = False  # as while requests are in flight
        await EngineSupervisor(model)._check(model.current)
        await eventually(lambda: len(server.launcher.engines) == 3)


async def test_a_full_model_leaves_the_others_their_places(start: Start, more: Path) -> None:
    async with start(models_dir=more, max_num_seqs=1) as server:
        await load(server, "x", "a")
        admission = server.state.models.default.admission
        with admission.reserve(admission.capacity.max_requests):
            assert (await complete(server, "tiny")).status_code == 429
            assert (await complete(server, "x")).status_code == 200
        text = (await server.client.get("/metrics")).text
        assert 'fp8serve_requests_rejected_total{model="tiny",reason="requests"} 1.0' in text
        assert 'fp8serve_requests_rejected_total{model="x",reason="requests"} 0.0' in text
        assert 'fp8serve_requests_accepted_total{model="x"} 1.0' in text
        assert 'fp8serve_generated_tokens_total{model="x"} 3.0' in text


async def test_aliases_are_given_moved_and_taken_away(start: Start, more: Path) -> None:
    async with start(models_dir=more) as server:
        await load(server, "x", "a")

        async def alias(name: str, **body: Any) -> Any:
            return await server.client.post(f"/models/{name}/alias", json=body)

        assert (await complete(server, "gpt-4o")).status_code == 404
        for name in ("tiny", "x"):
            assert (await alias(name, alias="gpt-4o")).json()["aliases"] == ["gpt-4o"]
            engine = server.state.models.models[name].current.engine  # type: ignore[union-attr]
            before = len(engine.requests)  # type: ignore[attr-defined]
            assert (await complete(server, "gpt-4o")).status_code == 200
            assert len(engine.requests) == before + 1  # type: ignore[attr-defined]
        assert (await alias("tiny", alias="x")).json()["code"] == "name_taken"
        assert (await alias("nope", alias="y")).status_code == 404
        assert (await alias("x", alias="a b")).status_code == 422
        await unload(server, "x")
        assert (await complete(server, "gpt-4o")).status_code == 404
        await load(server, "x")
        assert (await complete(server, "gpt-4o")).status_code == 200
        assert (await alias("x", alias="gpt-4o", remove=True)).json()["aliases"] == []
        assert (await complete(server, "gpt-4o")).status_code == 404


async def trained(server: Server, model: str | None) -> str:
    job = (await server.client.post("/finetune", json={"data": [{"text": "ok"}], "model": model})).json()
    assert job["status"] == "queued", job

    async def has_succeeded() -> bool:
        return bool((await server.client.get(f"/finetune/{job['id']}")).json()["status"] == "succeeded")

    await eventually(has_succeeded)
    return str(job["id"])


async def test_a_fine_tune_belongs_to_the_model_it_began_with(start: Start, more: Path) -> None:
    async with start(models_dir=more) as server:
        await load(server, "x", "a")
        job = await trained(server, "x")
        swapped = (await server.client.post(f"/finetune/{job}/activate")).json()
        assert (swapped["model"], swapped["served"]["model"]) == ("x", f"ft:x:org-local::{job[-8:]}")
        assert server.state.models.default.current.source.key == "base"  # type: ignore[union-attr]
        assert (await complete(server, swapped["served"]["model"])).status_code == 200
        model_dir(server.state.runner.result_dir(server.state.jobs.get(job)))  # the stub writes no model
        second = await trained(server, swapped["served"]["model"])
        assert (await server.client.get(f"/finetune/{second}")).json()["base_model"] == swapped["served"]["model"]
        await unload(server, "x")
        orphan = await server.client.post(f"/finetune/{second}/activate")
        assert (orphan.status_code, "x, which is not loaded" in orphan.text) == (409, True)
        assert (await load(server, "x")).json()["served"]["source"] == job  # what was activated for it
        assert (await server.client.post(f"/finetune/{second}/activate")).json()["model"] == "x"


async def test_two_names_of_one_directory_are_activated_one_by_one(start: Start, settings: Settings) -> None:
    twin = NamedModel("twin", settings.model)
    async with start(models=(twin,)) as server:
        await eventually(lambda: "twin" in server.state.models.models and server.state.models.models["twin"].ready)
        job = await trained(server, "twin")
        assert (await server.client.post(f"/finetune/{job}/activate")).json()["model"] == "twin"
    async with start(models=(twin,)) as server:
        await eventually(lambda: "twin" in server.state.models.models and server.state.models.models["twin"].ready)
        models = (await server.client.get("/models")).json()["models"]
        assert {model["name"]: model["served"]["source"] for model in models} == {"tiny": "base", "twin": job}


async def test_a_result_is_served_beside_its_base(start: Start) -> None:
    async with start() as server:
        job = await trained(server, None)
        answer = await load(server, "tuned", job, max_num_seqs=3)
        assert answer.json()["served"]["model"] == f"ft:tiny:org-local::{job[-8:]}"
        assert (server.launcher.sources[-1].options.recipe, server.launcher.sources[-1].options.max_num_seqs) == (
            "stored", 3,
        )  # fmt: skip
        for name in ("tuned", answer.json()["served"]["model"], "tiny"):
            assert (await complete(server, name)).status_code == 200
        assert server.launcher.engines[-1].requests
        assert (await server.client.get(f"/finetune/{job}")).json()["active"]


async def test_info_and_scales_of_a_model_by_name(start: Start, more: Path) -> None:
    async with start(models_dir=more) as server:
        await load(server, "x", "a")
        for name in ("tiny", "x"):
            info = (await server.client.get("/info", params={"model": name})).json()
            scales = (await server.client.get("/scales", params={"model": name})).json()
            assert info["model_id"] == name
            assert info["model_sha"] == scales["weight_version"]
        assert (await server.client.get("/info")).json()["model_id"] == "tiny"
        assert (await server.client.get("/info", params={"model": "nope"})).status_code == 404


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "must be NAME=DIR"),
        ("=dir", "must be NAME=DIR"),
        ("x=", "must be NAME=DIR"),
        ("x=dir,colour=1", "unknown option 'colour'"),
        ("x=dir,max_model_len=many", "max_model_len must be a whole number"),
        ("x=dir,recipe=nope", "unknown recipe 'nope'"),
        ("ftjob-1=dir", "reserved for fine-tuned models"),
        ("a b=dir", "A model's name has"),
    ],
)
def test_an_invalid_model_option_is_refused_with_one_sentence(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        NamedModel.parse(text)


def test_a_model_option_is_parsed() -> None:
    recipe = json.dumps({"name": "DelayedScaling", "margin": 1})
    named = NamedModel.parse(f"x=./a,b,max-model-len=64,kv_cache_dtype=fp8,tool_parser=hermes,recipe={recipe}")
    assert (named.name, named.directory) == ("x", Path("./a,b"))
    assert NamedModel("x", Path("a"), {"device": "auto"}).engine_options("cuda:1").device == "cuda:1"
    assert NamedModel("x", Path("a"), {"device": "cpu"}).engine_options("cuda:1").device == "cpu"
    assert named.engine_options("cpu") == EngineOptions(
        device="cpu", max_model_len=64, kv_cache_dtype="fp8", recipe=recipe
    )
    assert named.engine_options("cuda").device == "cuda"
    assert (named.output_format.tools, named.output_format.reasoning) == ("hermes", "auto")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"models": (NamedModel("tiny", Path("x")),)}, "'tiny' is the name of two models"),
        ({"models": (NamedModel("x", Path("x")),), "aliases": ("x=tiny",)}, "'x' is the name of two models"),
        ({"aliases": ("a=nope",)}, "one of the names tiny"),
        ({"aliases": ("tiny",)}, "--alias must be ALIAS=NAME"),
        ({"aliases": ("a b=tiny",)}, "A model's name has"),
    ],
)
def test_names_that_clash_are_refused_with_one_sentence(more: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Settings(model=Path("tiny"), **more)
