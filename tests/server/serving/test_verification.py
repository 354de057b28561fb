"""Checks of weights before they serve: nothing changes if they fail, and weights whose engine dies are rolled back."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fp8serve.server.finetuning import weight_sources
from fp8serve.server.serving import supervisor
from fp8serve.server.serving.supervisor import MAX_DEATHS
from fp8serve.server.settings import Settings
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine
from tests.server.finetuning.test_finetune import submit, trained, wait_for


async def activate(server: Server, job: str, **body: Any) -> Any:
    return await server.client.post(f"/finetune/{job}/activate", json=body)


async def refused(server: Server, job: str, **body: Any) -> str:
    """Activates the job, which must fail, and asserts that the base serves as before. Returns the error's message."""
    engine, answer = server.launcher.engines[0], await activate(server, job, **body)
    assert (answer.status_code, answer.json()["code"]) == (409, "activation_failed"), answer.text
    assert str(server.state.data_dir) not in answer.text
    assert (await server.client.get("/models")).json()["served"]["source"] == "base"
    assert not engine.closed
    assert all(other.closed for other in server.launcher.engines[1:])
    assert (await server.client.post("/generate", json={"inputs": "x"})).status_code == 200
    assert server.state.jobs.activated(str(server.state.settings.model.resolve())) is None
    return str(answer.json()["error"])


def engine_with(**values: Any) -> Callable[[], FakeEngine]:
    def make() -> FakeEngine:
        engine = FakeEngine()
        for name, value in values.items():
            setattr(engine, name, value)
        return engine

    return make


def result_of(server: Server, job: str) -> Path:
    return server.state.runner.result_dir(server.state.jobs.get(job))


async def test_weights_with_nan_are_not_even_loaded(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        save_file(
            {"ok": np.ones(3, np.float32), "w": np.array([0, np.nan], np.float16)},
            result_of(server, job) / "m.safetensors",
        )
        assert "holds NaN or an infinity in w" in await refused(server, job)
        assert len(server.launcher.engines) == 1
        (result_of(server, job) / "m.safetensors").write_bytes(b"garbage that is no file of weights")
        assert "is not a complete safetensors file" in await refused(server, job, max_perplexity_ratio=1e9)


async def test_an_activation_that_fails_is_logged_with_the_job_and_the_model(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start() as server:
        job = await trained(server)
        (result_of(server, job) / "m.safetensors").write_bytes(b"garbage that is no file of weights")
        await refused(server, job)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        name = server.state.models.default.name
        assert [text for text in warnings if text.startswith(f"failed to activate '{job}' as the model {name}: ")]


async def test_the_error_names_an_unknown_source_of_an_activation(start: Start) -> None:
    async with start() as server:
        name = server.state.models.default.name
        for source in ("ftjob-of-nobody", "ftjob-of-nobody:ckpt-step-3"):
            answer = await server.client.post(f"/models/{name}/activate", json={"source": source})
            assert (answer.status_code, answer.json()["param"]) == (404, "source"), answer.text
            assert f"There is no source '{source}'." in answer.json()["error"]
            assert "GET /models lists them" in answer.json()["hint"]


async def test_weights_with_a_much_higher_perplexity_are_refused_unless_the_limit_allows_it(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        server.launcher.factories["model"] = engine_with(surprise=1.5)
        message = await refused(server, job)
        assert (
            "Their perplexity on 5 tokens of the job's rows is 90.02, more than 2 times the 20.09 of the "
            "previous weights" in message
        )
        answer = (await activate(server, job, max_perplexity_ratio=5)).json()
        assert answer["verified"]["tokens"] == 5
        assert answer["verified"]["perplexity"] == pytest.approx(np.exp(4.5))
        assert answer["verified"]["perplexity_before"] == pytest.approx(np.exp(3.0))
        assert answer["served"]["source"] == job
        assert (await activate(server, job, max_perplexity_ratio=0.5)).status_code == 422


async def test_validation_data_is_measured_if_the_job_has_it(start: Start) -> None:
    async with start() as server:
        job = await submit(server, validation_data=[{"prompt": "abc", "completion": "de"}], eval_every=1)
        await wait_for(server, job["id"], "succeeded")
        answer = (await activate(server, job["id"])).json()
        assert answer["verified"]["tokens"] == 2 + 1  # the answer, and its end
        prompts = [request for request in server.launcher.engine.requests if request.params.prompt_logprobs is not None]
        assert [bytes(request.prompt_token_ids[:5]) for request in prompts] != []


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"surprise": float("nan")}, "tokens of the job's rows is nan"),
        ({"surprise": float("inf")}, "tokens of the job's rows is inf"),
        ({"surprise": 1e6}, "tokens of the job's rows is inf"),
        ({"fail": "The logits are not finite."}, "The logits are not finite."),
    ],
)
async def test_weights_with_nonfinite_results_are_refused_whatever_the_limit(
    start: Start, engine: dict[str, Any], message: str
) -> None:
    async with start() as server:
        job = await trained(server)
        server.launcher.factories["model"] = engine_with(**engine)
        assert message in await refused(server, job, max_perplexity_ratio=1e9)


async def test_the_base_is_activated_without_a_perplexity_check(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        assert (await activate(server, job)).status_code == 200
        server.launcher.make = engine_with(surprise=1e6)
        answer = await server.client.post("/models/tiny/activate", json={"source": "base"})
        assert (answer.status_code, answer.json()["verified"]) == (200, None)


async def test_a_job_by_its_name_is_verified_too(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        server.launcher.factories["model"] = engine_with(surprise=9.0)
        body = {"source": job, "max_perplexity_ratio": 3}
        answer = await server.client.post("/models/tiny/activate", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "activation_failed")


async def test_weights_are_accepted_if_the_previous_ones_cannot_be_measured(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        server.launcher.engine.surprise = float("nan")  # what serves is broken: what is new may help
        answer = (await activate(server, job)).json()
        assert answer["verified"]["perplexity_before"] is None
        (server.state.runner.job_dir(job) / "data.jsonl").unlink()
        assert (await activate(server, job)).json()["verified"] is None


async def test_an_adapter_is_verified_and_taken_out_again(start: Start) -> None:
    async with start() as server:
        job = await submit(server, lora_rank=8)
        finished_job = await wait_for(server, job["id"], "succeeded")
        engine = server.launcher.engine
        engine.surprised_by = {f"{finished_job['fine_tuned_model']} (0)"}
        answer = await activate(server, job["id"])
        assert (answer.status_code, answer.json()["code"]) == (409, "activation_failed")
        assert "more than 2 times" in answer.text
        assert engine.adapters == {}
        assert (await server.client.get(f"/finetune/{job['id']}")).json()["active"] is False
        engine.surprised_by = set()
        assert (await activate(server, job["id"])).json()["verified"]["tokens"] == 5


@pytest.fixture
def exporter(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the export of a checkpoint by a copy of the base; it fails if the checkpoint has a file named bad."""
    script = tmp_path / "export.py"
    script.write_text(
        "import pathlib, shutil, sys\n"
        "source, out = map(pathlib.Path, sys.argv[1:])\n"
        "out.parent.mkdir(exist_ok=True)\n"
        "if (source / 'bad').exists():\n    sys.exit(f'{source}: The weight w holds NaN or an infinity.')\n"
        f"shutil.copytree({str(settings.model)!r}, out)\n"
    )
    monkeypatch.setattr(weight_sources, "EXPORT_COMMAND", (sys.executable, str(script)))


async def test_the_step_of_an_activation_is_served_or_refused(start: Start, exporter: None) -> None:
    async with start() as server:
        job = await trained(server)  # of six steps, with a checkpoint of each
        folder = server.state.runner.job_dir(job) / "out"
        gone = await activate(server, job, step=7)
        assert (gone.status_code, gone.json()["code"]) == (409, "job_state")
        assert "no checkpoint at step 7" in gone.text
        for invalid in ({"step": 0}, {"step": "6"}, {"stepp": 6}, {"step": 6.0}):
            assert (await activate(server, job, **invalid)).status_code == 422
        (folder / "checkpoints" / "step-3" / "bad").touch()
        assert "The weight w holds NaN or an infinity." in (await activate(server, job, step=3)).text
        assert not (folder.with_name("served") / "step-3").exists()
        answer = (await activate(server, job, step=2)).json()
        assert answer["served"]["source"] == f"{job}:ckpt-step-2"
        assert (
            answer["served"]["model"]
            == (await server.client.get(f"/finetune/{job}")).json()["fine_tuned_model"] + ":ckpt-step-2"
        )
        assert server.launcher.sources[-1].directory == folder.with_name("served") / "step-2"
        assert (await activate(server, job, step=6)).json()["served"]["source"] == job  # the result itself
        server.launcher.factories["step-4"] = engine_with(surprise=7.0)
        assert (await activate(server, job, step=4)).json()["code"] == "activation_failed"
        assert (await activate(server, job, step=2)).status_code == 200
    async with start() as server:
        assert (await server.client.get("/models")).json()["served"]["source"] == f"{job}:ckpt-step-2"
        second = await submit(server)  # goes on from what is served
        await wait_for(server, second["id"], "succeeded")
        assert json.loads((server.state.runner.job_dir(second["id"]) / "job.json").read_text())["model"] == str(
            folder.with_name("served") / "step-2"
        )
        assert (await activate(server, second["id"])).json()["served"]["source"] == second["id"]


async def test_a_step_of_a_job_that_failed_is_served(start: Start, exporter: None) -> None:
    async with start() as server:
        job = await submit(server, "full-disk")
        await wait_for(server, job["id"], "failed")
        assert (await activate(server, job["id"])).json()["code"] == "job_state"
        assert (await activate(server, job["id"], step=2)).status_code == 200


async def die(server: Server) -> None:
    """Ends the engine that serves, and waits until another is ready in its place."""
    count = len(server.launcher.engines)
    server.launcher.engine.alive = False
    await eventually(lambda: len(server.launcher.engines) > count, "a restart")
    await eventually(lambda: server.state.models.default.ready, "readiness")


async def test_weights_that_die_again_and_again_give_way_to_those_before(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", (0.01,))
    async with start() as server:
        job = await trained(server)
        assert (await activate(server, job)).status_code == 200
        for death in range(MAX_DEATHS):
            assert server.launcher.sources[-1].key == job, death
            await die(server)
        assert (await server.client.get("/models")).json()["served"]["source"] == "base"
        assert server.state.jobs.activated(str(server.state.settings.model.resolve())) == "base"
        text = (await server.client.get("/metrics")).text
        assert 'fp8serve_weight_swaps_total{model="tiny",outcome="rolled_back"} 1.0' in text
        assert (await activate(server, job)).status_code == 200
        assert (await server.client.post("/models/tiny/activate", json={"source": "base"})).status_code == 200
        for _ in range(MAX_DEATHS + 1):  # the base is what one goes back to, and has nothing before it
            await die(server)
        assert {source.key for source in server.launcher.sources[-MAX_DEATHS:]} == {"base"}


async def test_weights_that_cannot_be_started_again_give_way_to_those_before(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", (0.01,))
    async with start() as server:
        job = await trained(server)
        assert (await activate(server, job)).status_code == 200
        server.launcher.problems["model"] = "The weights are gone."
        server.launcher.engine.alive = False
        await eventually(
            lambda: server.launcher.sources[-1].key == "base" and server.state.models.default.ready, "the base"
        )
        assert (await server.client.post("/generate", json={"inputs": "x"})).status_code == 200
        assert (await server.client.get("/health/live")).status_code == 200


async def test_long_after_they_began_to_serve_weights_stay(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", (0.01,))
    monkeypatch.setattr("fp8serve.server.serving.weight_replacement.PROBATION_SECONDS", -1.0)
    async with start() as server:
        job = await trained(server)
        assert (await activate(server, job)).status_code == 200
        for _ in range(MAX_DEATHS):
            await die(server)
        assert server.launcher.sources[-1].key == job
