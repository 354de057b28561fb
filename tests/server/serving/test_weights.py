"""Another version of the weights, written over those that serve: `POST /weights`, on fake engines."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
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
        await eventually(lambda: server.state.models.default.is_replacing_weights)
        refused = await complete(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await server.client.get("/health/ready")).status_code == 503
        assert (await push(server, "policy/step-2")).status_code in (409, 503)
        answer = (await pushing).json()
        assert engine.finished
        assert (await running).json()["system_fingerprint"] == answer["previous"]["weight_version"]
        assert (await complete(server)).json()["system_fingerprint"] == answer["served"]["weight_version"]


async def test_weights_that_cannot_be_loaded_leave_the_old_ones(start: Start, more: Path) -> None:
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


async def test_a_push_names_a_further_model_by_its_name(start: Start, more: Path) -> None:
    async with start(models_dir=more, models=(NamedModel("small", more / "policy" / "step-1"),)) as server:
        await eventually(lambda: server.state.started)
        answer = (await push(server, "policy/step-2", model="small")).json()
        assert answer["model"] == "small"
        assert [engine.weights != [] for engine in server.launcher.engines] == [False, True]


class MoodyEngine(FakeEngine):
    """An engine whose perplexity depends on the name of the weights' directory; with "mute", every request fails."""

    async def load_weights(self, directory: Path) -> int:
        count = await super().load_weights(directory)
        self.surprise = {"worse": 1.5, "broken": float("nan")}.get(directory.name, 1.0)
        self.fail_first = "The logits are not finite." if directory.name == "mute" else None
        return count

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        async with contextlib.aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                error = getattr(self, "fail_first", None)
                yield output if error is None else RequestOutput(request.request_id, finish_reason="error", error=error)


@pytest.fixture
def moody(more: Path) -> Path:
    for name in ("worse", "broken", "mute"):
        model_dir(more / name)
        (more / name / "note.safetensors").write_bytes(name.encode())
    return more


async def test_pushed_weights_are_verified_on_texts(start: Start, moody: Path) -> None:
    async with start(Launcher(MoodyEngine), models_dir=moody) as server:
        answer = (await push(server, "policy/step-1", texts=["abc", "d", "defg"])).json()
        verified = {"tokens": 2 + 3, "perplexity_before": pytest.approx(answer["verified"]["perplexity"])}
        assert answer["verified"] == verified | {"perplexity": answer["verified"]["perplexity"]}
        before = (await complete(server)).json()["system_fingerprint"]
        worse = await push(server, "worse", texts=["abc", "defg"])
        assert (worse.status_code, worse.json()["code"]) == (409, "activation_failed")
        assert (
            "and the previous weights are served again: Their perplexity on 5 tokens of the texts is"
            in worse.json()["error"]
        )
        assert "more than 2 times" in worse.text
        assert server.launcher.engine.weights[-1] == moody / "policy" / "step-1"
        assert (await complete(server)).json()["system_fingerprint"] == before
        assert (await push(server, "worse", texts=["abc", "defg"], max_perplexity_ratio=50)).status_code == 200
        assert (await push(server, "broken", texts=["abc"], max_perplexity_ratio=50)).status_code == 409
        assert server.launcher.engine.weights[-1] == moody / "worse"
        assert (await push(server, "broken")).json()["verified"] is None  # nothing was asked
        assert len(server.launcher.engines) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_perplexity_ratio": 3}, "needs texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", "b"]}, "a text of at least two tokens"),
        ({"texts": ["a" * 512]}, "Text 1 fills the whole context"),
        ({"texts": ["a" * 5000]}, "context"),
        ({"texts": ["abc"], "max_perplexity_ratio": 0.5}, "max_perplexity_ratio"),
    ],
)
async def test_texts_that_measure_nothing_are_refused(
    start: Start, moody: Path, body: dict[str, Any], message: str
) -> None:
    async with start(Launcher(MoodyEngine), models_dir=moody) as server:
        refused = await push(server, "policy/step-1", **body)
        assert (refused.status_code, message in refused.text) == (422, True), refused.text
        assert server.launcher.engine.weights == []


async def test_pushed_weights_that_write_nothing_give_way_to_those_before(start: Start, moody: Path) -> None:
    async with start(Launcher(MoodyEngine), models_dir=moody) as server:
        before = (await complete(server)).json()["system_fingerprint"]
        refused = await push(server, "mute")
        assert (refused.status_code, "the previous weights are served again: The logits" in refused.text) == (
            409,
            True,
        ), refused.text
        assert server.launcher.engine.weights == [moody / "mute", server.state.settings.model]
        answer = await complete(server)
        assert (answer.status_code, answer.json()["system_fingerprint"]) == (200, before)


async def test_weights_that_cannot_be_put_back_end_the_engine(start: Start, moody: Path) -> None:
    async with start(Launcher(MoodyEngine), models_dir=moody) as server:
        first = (await complete(server)).json()["system_fingerprint"]
        assert (await push(server, "policy/step-1")).status_code == 200
        (moody / "policy" / "step-1" / "note.safetensors").write_bytes(b"the trainer wrote something else here")
        refused = await push(server, "mute")
        assert (refused.status_code, "restarts with its original weights: The logits" in refused.text) == (409, True)
        await eventually(lambda: len(server.launcher.engines) == 2 and server.state.models.default.ready, "a restart")
        assert (await complete(server)).json()["system_fingerprint"] == first
