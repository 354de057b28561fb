"""Engines and loads that hang: deadlines notice them, and they are ended without disturbing others. No test waits for a
real deadline, except one that is certain to pass.
"""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from fp8serve.engine.worker import Heartbeat, Worker
from fp8serve.errors import RequestError
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.server.serving.served_model import MAX_FAILED_RESTARTS
from fp8serve.server.serving.served_weights import ServedWeights, WeightSource
from fp8serve.server.settings import Settings
from tests.patience import PATIENCE, eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import FakeEngine, Launcher

LONG = {"inputs": "a", "parameters": {"max_new_tokens": 100}}


class Hanging(Launcher):
    """A launcher whose loads hang while `hang` is set. `begun`: how many did; `given_up`: how many were cancelled."""

    hang = False
    begun = 0
    given_up = 0

    async def __call__(self, source: WeightSource) -> tuple[FakeEngine, Tokenizer]:
        if self.hang:
            self.begun += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        return await super().__call__(source)


async def activate(server: Server) -> Any:
    return await server.client.post(f"/models/{server.state.models.default.name}/activate", json={"source": "base"})


async def test_a_silent_engine_is_replaced_and_readiness_follows(start: Start) -> None:
    async with start(heartbeat_seconds=0.5) as server:
        hung, served = server.launcher.engine, server.state.models.default.current
        hung.heartbeat_age = 1e9
        await eventually(lambda: hung.killed)
        assert "sent no heartbeat" in str(hung.killed)
        await eventually(lambda: server.state.models.default.ready)
        assert server.state.models.default.current is not served
        assert len(server.launcher.engines) == 2


async def test_an_engine_that_is_stuck_in_a_step_is_replaced_though_its_heart_beats(start: Start) -> None:
    async with start(step_seconds=100.0) as server:
        hung = server.launcher.engine
        hung.step_seconds = 99.0
        await asyncio.sleep(0.5)
        assert not hung.killed
        hung.step_seconds = 100.0
        await eventually(lambda: hung.killed)
        assert "did not finish a step within 100 seconds" in str(hung.killed)


async def test_a_silent_engine_is_not_ready_until_it_is_replaced(start: Start) -> None:
    launcher = Hanging()
    async with start(launcher, heartbeat_seconds=0.5) as server:
        launcher.hang = True
        launcher.engine.heartbeat_age = 1e9
        await eventually(lambda: not server.state.models.default.ready)
        assert (await server.client.get("/health/ready")).status_code == 503
        assert (await server.client.get("/health/live")).status_code == 200  # it is being loaded
        answer = await server.client.post("/generate", json={"inputs": "a"})
        assert (answer.status_code, answer.json()["code"]) == (503, "engine_down")


async def test_a_server_whose_engine_got_sigterm_is_not_ready_until_it_is_replaced(start: Start) -> None:
    async with start(Launcher(lambda: FakeEngine(delay=0.01))) as server:
        model, engine = server.state.models.default, server.launcher.engine
        running = asyncio.create_task(server.client.post("/generate", json=LONG))
        await eventually(lambda: engine.running)
        engine.is_draining = True
        assert (await server.client.get("/health/ready")).status_code == 503
        answer = await server.client.post("/generate", json={"inputs": "a"})
        assert (answer.status_code, answer.json()["code"]) == (503, "engine_down")
        await eventually(lambda: server.state.status == "restarting")
        assert (await running).status_code == 200
        assert (engine.killed, engine.aborted) == (None, [])
        engine.alive = False
        await eventually(lambda: model.ready)
        assert server.launcher.engine is not engine
        assert (await server.client.post("/generate", json={"inputs": "a"})).status_code == 200


async def test_a_load_that_hangs_is_given_up(start: Start) -> None:
    launcher = Hanging()
    async with start(launcher) as server:
        server.state.models.default.deadlines = replace(server.state.models.default.deadlines, load=0.5)
        launcher.hang = True
        answer = await activate(server)
        assert (answer.status_code, answer.json()["code"]) == (409, "activation_failed")
        assert "within 0.5 seconds" in answer.json()["error"]
        assert launcher.given_up == 1
        assert (await server.client.post("/generate", json={"inputs": "a"})).status_code == 200
        launcher.hang = False
        server.state.models.default.deadlines = server.state.settings.deadlines
        assert (await activate(server)).status_code == 200


async def test_an_engine_is_replaced_while_other_weights_are_being_loaded(start: Start) -> None:
    launcher = Hanging()
    async with start(launcher) as server:
        launcher.hang = True
        swap = asyncio.create_task(activate(server))
        await eventually(lambda: launcher.begun)
        launcher.hang = False
        dead = launcher.engine
        dead.alive = False
        await eventually(lambda: launcher.engine is not dead and server.state.models.default.ready)
        assert (await server.client.post("/generate", json={"inputs": "a"})).status_code == 200
        assert not swap.done()
        assert (await activate(server)).json()["code"] == "alias_busy"
        swap.cancel()
        await asyncio.gather(swap, return_exceptions=True)


async def test_a_swap_wins_over_a_restart(start: Start) -> None:
    launcher = Hanging()
    async with start(launcher) as server:
        launcher.hang = True
        launcher.engine.alive = False
        await eventually(lambda: launcher.begun)
        assert server.state.models.default.state == "restarting"
        launcher.hang = False
        assert (await activate(server)).status_code == 200
        assert server.state.models.default.ready
        assert (await server.client.post("/generate", json={"inputs": "a"})).status_code == 200


async def test_a_canary_that_gives_no_token_is_a_failed_load(start: Start) -> None:
    launcher = Launcher()
    async with start(launcher) as server:
        server.state.models.default.deadlines = replace(server.state.models.default.deadlines, load=0.5)
        launcher.make = lambda: FakeEngine(delay=1e6)
        answer = await activate(server)
        assert (answer.status_code, answer.json()["code"]) == (409, "activation_failed")
        assert launcher.engine.killed


async def test_liveness_ends_when_an_engine_cannot_be_started_again(start: Start) -> None:
    async with start() as server:
        server.launcher.problem = "The disk is gone."
        server.launcher.engine.alive = False
        await eventually(lambda: server.state.models.default.failed_restarts == 1)
        assert (await server.client.get("/health/live")).status_code == 200
        await eventually(lambda: server.state.models.default.failed_restarts == MAX_FAILED_RESTARTS)
        assert (await server.client.get("/health/live")).status_code == 503
        server.launcher.problem = None
        await eventually(lambda: server.state.models.default.ready)
        assert (await server.client.get("/health/live")).status_code == 200


async def test_an_answer_has_a_deadline_where_one_is_set(start: Start) -> None:
    async with start(Launcher(lambda: FakeEngine(delay=0.05)), request_seconds=1.0) as server:
        endless = {"inputs": "abc", "parameters": {"max_new_tokens": 500}}
        answer = await server.client.post("/generate", json=endless)
        assert (answer.status_code, answer.json()["code"]) == (408, "request_timeout")
        await eventually(lambda: not server.launcher.engine.running)
        assert server.state.models.default.admission.in_flight == 0
        streamed = await server.client.post("/generate", json=endless | {"stream": True})
        assert '"code":"request_timeout"' in streamed.text


def test_silence_counts_only_while_the_front_runs() -> None:
    engine: Any = FakeEngine()
    source: Any = None
    served = ServedWeights(source, engine, source, source, "version")
    engine.heartbeat_age = 500.0
    served.update_silence(500.0)  # the front itself was stopped: heartbeats lie unread
    assert served.silence == 1.0
    engine.heartbeat_age = 0.1
    served.update_silence(0.2)
    assert served.silence == 0.1
    engine.heartbeat_age = 30.0
    for _ in range(10):
        served.update_silence(0.5)
    assert served.silence == pytest.approx(5.1)


def test_a_heartbeat_says_how_long_a_step_has_been_going(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[float] = []
    enough, leave = threading.Event(), threading.Event()

    class Stuck:
        def has_work(self) -> bool:
            return True

        def run_step(self) -> list[Any]:
            assert leave.wait(PATIENCE)
            return []

        def abort_all(self) -> list[Any]:
            return []

        def save_prefixes(self) -> None:
            """Does nothing: the fake engine has no prefixes."""

    class Line:
        def __init__(self) -> None:
            from queue import SimpleQueue

            self.inbox: SimpleQueue[Any] = SimpleQueue()

        def send(self, event: str, step_seconds: float = 0.0, **_: Any) -> None:
            beats.append(step_seconds)
            if len(set(beats)) >= 3:
                enough.set()

    monkeypatch.setattr("fp8serve.engine.worker.HEARTBEAT_SECONDS", 0.15)
    connection: Any = Line()
    engine: Any = Stuck()
    worker, heartbeat = Worker(connection, engine), Heartbeat(connection)
    heartbeat.step_seconds = lambda: worker.step_seconds
    runs = threading.Thread(target=worker.run)
    runs.start()
    try:
        assert enough.wait(PATIENCE)
        assert beats == sorted(beats)
        assert worker.step_seconds > 0
    finally:
        connection.inbox.put({"op": "close"})
        leave.set()
        runs.join()
        heartbeat.stop()
    assert worker.step_seconds == 0


@pytest.mark.parametrize("name", ["heartbeat_seconds", "step_seconds", "load_seconds", "request_seconds"])
def test_a_deadline_is_positive(settings: Settings, name: str) -> None:
    from dataclasses import replace

    with pytest.raises(RequestError, match=f"{name} must be greater than 0"):
        replace(settings, **{name: 0.0})
