"""Weights that are exchanged in the running engine, on fake engines: no second engine, no failed request."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import MachineError, ModelError, RequestError
from fp8serve.server.serving import supervisor, weight_replacement
from tests.patience import PATIENCE, eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher
from tests.server.finetuning.test_finetune import trained


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises time limits, so that a busy machine does not fall back to a new engine."""
    monkeypatch.setattr(weight_replacement, "MAX_DRAIN_SECONDS", PATIENCE)
    monkeypatch.setattr(weight_replacement, "MAX_VERIFICATION_SECONDS", PATIENCE)


class SwappingEngine(FakeEngine):
    """An engine that exchanges its weights while it runs."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__(delay)
        self.served: Path | None = None  # None: the weights that it loaded
        self.staged: list[Path | None] = []
        self.swaps: list[Path | None] = []
        self.surprising = False  # whether weights other than those that it loaded are far worse
        self.problem: Exception | None = None  # of the next swap

    async def stage_weights(self, directory: Path) -> None:
        if not (directory / "config.json").exists():
            raise ModelError(f"{directory} has another configuration.")
        self.staged = [directory]

    async def swap_weights(self) -> None:
        if self.running:
            raise RequestError(f"{len(self.running)} requests are running.")
        if (problem := self.problem) is not None:
            self.problem = None
            raise problem
        (staged,) = self.staged
        self.served, self.staged = staged, [self.served]
        self.swaps.append(staged)
        self.surprise = 100.0 if self.surprising and staged is not None else 1.0

    async def discard_staged_weights(self) -> None:
        self.staged = []


async def activate(server: Server, source: str, **body: Any) -> Any:
    return await server.client.post("/models/tiny/activate", json={"source": source, **body})


async def version(server: Server) -> str:
    answer = await server.client.post("/generate", json={"inputs": "x"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["weight_version"])


async def fine_tuned(server: Server) -> str:
    """Returns a job whose result looks like another version of the model."""
    job = await trained(server)
    result = server.state.runner.result_dir(server.state.jobs.get(job))
    for file in server.state.settings.model.iterdir():
        if not file.name.endswith(".safetensors") and not (result / file.name).exists():
            (result / file.name).write_bytes(file.read_bytes())
    return job


async def test_the_same_engine_serves_the_new_weights(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fp8serve.server")
    async with start(Launcher(SwappingEngine)) as server:
        job, before = await fine_tuned(server), await version(server)
        answer = await activate(server, job)
        assert answer.status_code == 200, answer.text
        assert answer.json()["verified"]["perplexity"] == answer.json()["verified"]["perplexity_before"]
        assert await version(server) == answer.json()["served"]["weight_version"] != before
        engine = server.launcher.engine
        assert (len(server.launcher.engines), len(engine.swaps), engine.staged) == (1, 1, [])
        assert "replaced the weights of the running engine" in caplog.text
        assert server.state.jobs.activated(str(server.state.settings.model.resolve())) == job
        assert (await activate(server, "base")).json()["served"]["weight_version"] == before == await version(server)
        assert (len(server.launcher.engines), len(engine.swaps), engine.closed) == (1, 2, False)
        text = (await server.client.get("/metrics")).text
        assert 'fp8serve_weight_swaps_total{model="tiny",outcome="ok"} 2.0' in text


async def test_no_request_fails_and_each_answer_names_its_weights(start: Start) -> None:
    async with start(Launcher(lambda: SwappingEngine(delay=0.002))) as server:
        sources, stop, versions = [await fine_tuned(server), "base"], asyncio.Event(), set[str]()
        engine = server.launcher.engine

        async def load(user: int) -> None:
            while not stop.is_set():
                swaps = len(engine.swaps)
                ask = {"inputs": "abc", "parameters": {"max_new_tokens": 20}, "stream": user % 2 == 1}
                answer = await server.client.post("/generate", json=ask)
                assert answer.status_code == 200, answer.text
                body = answer.json() if user % 2 == 0 else json.loads(answer.text.strip().split("\n\n")[-1][5:])
                assert body["generated_text"] == ("abc" * 7)[:20]
                if len(engine.swaps) == swaps:
                    assert body["weight_version"].startswith("base" if swaps % 2 == 0 else sources[0])
                versions.add(body["weight_version"])

        users = [asyncio.create_task(load(user)) for user in range(8)]
        for turn in range(6):
            activated = (await activate(server, sources[turn % 2])).json()
            assert activated["served"]["source"] == sources[turn % 2]
        stop.set()
        await asyncio.gather(*users)
        assert len(engine.swaps) == 6
        assert len(versions) == 2
        assert len(server.launcher.engines) == 1


async def test_an_engine_whose_exchange_is_cancelled_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cancelled exchange, it is unknown which weights the engine has."""
    async with start(Launcher(SwappingEngine)) as server:
        engine, model, before = server.launcher.engine, server.state.models.default, await version(server)
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        async def save(key: str) -> None:
            raise AssertionError("this activation was not completed")

        monkeypatch.setattr(engine, "swap_weights", hang)
        activation = asyncio.create_task(weight_replacement.activate(model, model.base_source, save))
        await reached.wait()
        activation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await activation
        assert not engine.alive
        await eventually(lambda: server.launcher.engine is not engine and model.state == "ready", "another engine")
        assert await version(server) == before


async def test_requests_in_flight_end_with_the_old_weights_and_new_ones_wait(start: Start) -> None:
    async with start(Launcher(lambda: SwappingEngine(delay=0.01))) as server:
        job, engine, model = await fine_tuned(server), server.launcher.engine, server.state.models.default
        await activate(server, "base")  # the verification is measured without company
        ask = {"inputs": "abc", "parameters": {"max_new_tokens": 50}}
        running = asyncio.create_task(server.client.post("/generate", json=ask))
        await eventually(lambda: engine.running)
        activation = asyncio.create_task(activate(server, job))
        await eventually(lambda: not model.released.is_set(), "the drain")
        waiting = asyncio.create_task(server.client.post("/generate", json={"inputs": "x"}))
        activated = (await activation).json()
        assert (await running).json()["weight_version"] == activated["previous"]["weight_version"]
        assert (await waiting).json()["weight_version"] == activated["served"]["weight_version"]
        assert (len(server.launcher.engines), engine.aborted) == (1, [])


async def test_a_long_request_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_replacement, "MAX_DRAIN_SECONDS", 0.01)
    caplog.set_level("INFO", "fp8serve.server")
    async with start(Launcher(lambda: SwappingEngine(delay=0.02))) as server:
        job, engine = await fine_tuned(server), server.launcher.engine
        ask = {"inputs": "abc", "parameters": {"max_new_tokens": 100}}
        running = asyncio.create_task(server.client.post("/generate", json=ask))
        await eventually(lambda: engine.running)
        activated = (await activate(server, job)).json()
        assert activated["served"]["source"] == job
        assert (len(server.launcher.engines), engine.swaps, engine.staged) == (2, [], [])
        assert (await running).json()["weight_version"] == activated["previous"]["weight_version"]
        assert await version(server) == activated["served"]["weight_version"]
        assert "starting a new engine process" in caplog.text
        assert "1 requests were still running" in caplog.text
        await eventually(lambda: engine.closed, "the end of the replaced engine")


async def test_weights_that_fail_their_verification_are_exchanged_back(start: Start) -> None:
    async with start(Launcher(SwappingEngine)) as server:
        job, before, engine = await fine_tuned(server), await version(server), server.launcher.engine
        engine.surprising = True
        answer = await activate(server, job)
        assert (answer.status_code, answer.json()["code"]) == (409, "activation_failed")
        assert answer.json()["error"].startswith("The new weights cannot be served, and the previous ones stay in use:")
        assert "more than 2 times the" in answer.json()["error"]
        assert await version(server) == before
        assert (engine.served, len(engine.swaps), engine.staged, engine.closed) == (None, 2, [], False)
        assert len(server.launcher.engines) == 1
        assert server.state.jobs.activated(str(server.state.settings.model.resolve())) is None


async def test_an_activation_that_cannot_be_saved_is_undone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(Launcher(SwappingEngine)) as server:
        job, before, engine = await fine_tuned(server), await version(server), server.launcher.engine

        def fail(model: str, source: str) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(server.state.jobs, "set_activated", fail)
        assert (await activate(server, job)).status_code == 507
        assert await version(server) == before
        assert (engine.served, len(engine.swaps), engine.closed) == (None, 2, False)


async def test_weights_that_cannot_be_exchanged_get_a_new_engine(start: Start) -> None:
    async with start(Launcher(SwappingEngine)) as server:
        job, engine = await fine_tuned(server), server.launcher.engine
        engine.problem = MachineError("The device failed.")
        assert (await activate(server, job)).json()["served"]["source"] == job
        assert len(server.launcher.engines) == 2
        base = server.state.settings.model
        for name, content in (("tokenizer_config.json", "{}"), ("generation_config.json", '{"eos_token_id": 5}')):
            (base / name).write_text(content)
            engines = len(server.launcher.engines)
            assert (await activate(server, "base")).status_code == 200
            assert (await activate(server, job)).status_code == 200
            assert len(server.launcher.engines) == engines + 2


async def test_the_engine_is_killed_if_the_old_weights_do_not_come_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", (0.01,))
    async with start(Launcher(SwappingEngine)) as server:
        job, before, engine = await fine_tuned(server), await version(server), server.launcher.engine
        engine.surprising = True
        swap = engine.swap_weights

        async def fail_after_the_first() -> None:
            await swap()
            engine.problem = MachineError("The device failed.")

        monkeypatch.setattr(engine, "swap_weights", fail_after_the_first)
        assert (await activate(server, job)).status_code == 409
        assert engine.killed
        await eventually(lambda: len(server.launcher.engines) == 2 and server.state.models.default.ready, "a restart")
        assert (await version(server), server.launcher.sources[-1].key) == (before, "base")


async def test_exchanged_weights_that_die_again_and_again_give_way(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", (0.01,))
    async with start(Launcher(SwappingEngine)) as server:
        job = await fine_tuned(server)
        assert (await activate(server, job)).status_code == 200
        assert len(server.launcher.engines) == 1
        for death in range(supervisor.MAX_DEATHS):
            assert (await server.client.get("/models")).json()["served"]["source"] == job, death
            count = len(server.launcher.engines)
            server.launcher.engine.alive = False
            await eventually(lambda count=count: len(server.launcher.engines) > count, "a restart")
            await eventually(lambda: server.state.models.default.ready, "readiness")
        assert [source.key for source in server.launcher.sources[1:]] == [job, job, "base"]
        assert (await server.client.get("/models")).json()["served"]["source"] == "base"
