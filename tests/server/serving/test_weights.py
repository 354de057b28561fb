"""Another version of the weights, written over those that serve: `POST /weights`, on fake engines."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fp8serve.server.named_models import NamedAdapter, NamedModel
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher, model_dir


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """A directory with versions that may be loaded; beside it one that may not."""
    for name in ("more/policy/step-1", "more/policy/step-2", "more/bad", "outside"):
        model_dir(tmp_path / name)
        (tmp_path / name / "note.safetensors").write_bytes(name.encode())
    return tmp_path / "more"


async def push(server: Server, path: str, **more: Any) -> Any:
    return await server.client.post("/weights", json={"path": path, **more})


async def complete(server: Server, tokens: int = 3) -> Any:
    return await server.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": tokens})


async def test_every_answer_names_the_weights_that_wrote_it(start: Start, more: Path) -> None:
    async with start(models_dir=more) as server:
        before = (await complete(server)).json()["system_fingerprint"]
        answer = (await push(server, "policy/step-1")).json()
        assert answer["weights_version"] == 1
        assert answer["model"] == "tiny"
        assert answer["previous"]["weight_version"] == before != answer["served"]["weight_version"]
        assert server.launcher.engine.weights == [more / "policy" / "step-1"]
        assert (await complete(server)).json()["system_fingerprint"] == answer["served"]["weight_version"]
        second = (await push(server, "policy/step-2")).json()
        assert second["previous"] == answer["served"]
        info = (await server.client.get("/info")).json()
        assert (info["engine"]["weights_version"], info["model_sha"]) == (2, second["served"]["weight_version"])
        assert len(server.launcher.engines) == 1


async def test_requests_under_way_end_first_and_new_ones_are_sent_away(start: Start, more: Path) -> None:
    engine = FakeEngine(delay=0.02)
    async with start(Launcher(lambda: engine), models_dir=more) as server:
        running = asyncio.create_task(complete(server, 400))
        await eventually(lambda: engine.running)
        late = await push(server, "policy/step-1", seconds=0.01)
        assert (late.status_code, "1 requests were still running after 0.01 seconds" in late.text) == (409, True)
        assert engine.weights == []
        pushing = asyncio.create_task(push(server, "policy/step-1", seconds=600))
        await eventually(lambda: server.state.models.default.replacing)
        refused = await complete(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await server.client.get("/health/ready")).status_code == 503
        assert (await push(server, "policy/step-2")).status_code in (409, 503)
        answer = (await pushing).json()
        assert engine.finished
        assert (await running).json()["system_fingerprint"] == answer["previous"]["weight_version"]
        assert (await complete(server)).json()["system_fingerprint"] == answer["served"]["weight_version"]


async def test_what_cannot_be_put_in_place_leaves_the_old_weights(start: Start, more: Path) -> None:
    async with start(models_dir=more) as server:
        before = (await complete(server)).json()["system_fingerprint"]
        for path in ("../outside", str(more.parent / "outside"), "/etc", "policy", ".", "policy/", "nothing"):
            answer = await push(server, path)
            assert (answer.status_code, answer.json()["error_type"]) == (404, "not_found"), path
        refused = await push(server, "bad")
        assert (refused.status_code, "bad: has" in refused.text or "bad has another" in refused.text) == (409, True)
        assert str(more) not in refused.text
        assert (await push(server, "bad", model="nobody")).status_code == 404
        assert (await complete(server)).json()["system_fingerprint"] == before
    async with start() as server:  # without a directory of models
        assert (await push(server, "policy/step-1")).status_code == 404


async def test_a_model_with_adapters_keeps_its_weights(start: Start, more: Path) -> None:
    (more / "a").mkdir()
    (more / "a" / "adapter_config.json").write_text("{}")
    async with start(models_dir=more, adapters=(NamedAdapter("tutor", more / "a"),)) as server:
        refused = await push(server, "policy/step-1")
        assert (refused.status_code, "Unload first: tutor." in refused.text) == (409, True)
        assert server.launcher.engine.weights == []


async def test_a_further_model_by_its_name(start: Start, more: Path) -> None:
    async with start(models_dir=more, models=(NamedModel("small", more / "policy" / "step-1"),)) as server:
        await eventually(lambda: all(m.ready for m in server.state.models.models.values()))
        answer = (await push(server, "policy/step-2", model="small")).json()
        assert answer["model"] == "small"
        assert [engine.weights != [] for engine in server.launcher.engines] == [False, True]
