"""The engine's process as a server meets it: it answers, refuses, dies, drains, and never leaves anyone waiting."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fp8serve.engine.client import EngineClient
from fp8serve.engine.engine import Engine
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Request, RequestOutput, SamplingParams
from fp8serve.errors import MachineError, ModelError, RequestError, ScalesError
from tests.patience import PATIENCE

T = TypeVar("T")
OPTIONS = EngineOptions(recipe="bf16", max_num_seqs=4, num_blocks=40)
LONG = SamplingParams(max_new_tokens=100, ignore_eos=True, seed=1)


class Alive:
    """A running client and the loop it lives on."""

    def __init__(self, model_dir: Path) -> None:
        self.runner = asyncio.Runner()
        self.client = self.run(EngineClient.start(model_dir, OPTIONS))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, PATIENCE))


@pytest.fixture(scope="module")
def alive(model_dir: Path) -> Iterator[Alive]:
    found = Alive(model_dir)
    yield found
    found.run(found.client.close())
    found.runner.close()


@pytest.fixture
def mortal(model_dir: Path) -> Iterator[Alive]:
    """One that the test may kill."""
    found = Alive(model_dir)
    yield found
    found.run(found.client.close())
    found.runner.close()


def request(name: str, params: SamplingParams = LONG, prompt: bytes = b"Hello") -> Request:
    return Request(name, tuple(prompt), params)


async def collect(client: EngineClient, item: Request) -> list[RequestOutput]:
    return [output async for output in client.generate(item)]


async def until(condition: Any) -> None:
    while not await condition():
        await asyncio.sleep(0.02)


def test_answers_are_those_of_an_engine_in_process(alive: Alive, model_dir: Path) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)

    async def several() -> list[list[RequestOutput]]:
        prompts = (b"Hello", b"a", b"Once upon a time")
        items = [request(str(i), params, prompt) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(collect(alive.client, item) for item in items))

    found = alive.run(several())
    engine = Engine(model_dir, recipe="bf16")
    expected = engine.generate(
        [list(b"Hello"), list(b"a"), list(b"Once upon a time")],
        max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1,
    )  # fmt: skip
    for outputs, completion in zip(found, expected, strict=True):
        assert [token for output in outputs for token in output.token_ids] == completion.token_ids
        assert "".join(output.text_delta for output in outputs) == completion.text
        assert [item for output in outputs for item in output.logprobs or ()] == completion.logprobs
        assert outputs[-1].finish_reason == "length"


def test_what_cannot_run_is_refused_before_it_is_sent(alive: Alive) -> None:
    with pytest.raises(RequestError, match="together 130"):
        alive.client.generate(request("r", SamplingParams(max_new_tokens=125)))

    async def twice() -> None:
        running = alive.client.generate(request("same"))
        await anext(running)
        with pytest.raises(RequestError, match="still running"):
            alive.client.generate(request("same"))
        await running.aclose()

    alive.run(twice())


def test_closing_the_iterator_aborts_the_request(alive: Alive) -> None:
    async def leave() -> None:
        before = (await alive.client.stats())["finished_total"]["abort"]
        outputs = alive.client.generate(request("leaver"))
        await anext(outputs)
        await outputs.aclose()

        async def freed() -> bool:
            stats = await alive.client.stats()
            return bool(stats["kv_blocks_used"] == 0 and stats["finished_total"]["abort"] == before + 1)

        await until(freed)

    alive.run(leave())


def test_a_cancelled_task_aborts_its_request(alive: Alive) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(collect(alive.client, request("cancelled")))

        async def busy() -> bool:
            return bool((await alive.client.stats())["running"])

        await until(busy)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await alive.client.stats())["running"]:
            await asyncio.sleep(0.02)

    alive.run(cancel())


def test_abort_ends_the_stream_with_its_reason(alive: Alive) -> None:
    async def abort() -> list[RequestOutput]:
        found = []
        async for output in alive.client.generate(request("aborted")):
            found.append(output)
            await alive.client.abort("aborted")
        return found

    assert alive.run(abort())[-1].finish_reason == "abort"


def test_it_says_how_it_is(alive: Alive) -> None:
    assert alive.client.alive
    assert alive.client.heartbeat_age < 30
    assert alive.client.info["architecture"] == "LlamaForCausalLM"
    assert alive.client.limits.max_model_len == 128
    assert alive.run(alive.client.stats())["kv_blocks"] == 40
    assert alive.run(alive.client.scales()) == []


def test_a_killed_process_ends_every_stream_with_a_sentence(mortal: Alive) -> None:
    async def die() -> None:
        tasks = [asyncio.create_task(collect(mortal.client, request(name))) for name in ("a", "b")]
        while (await mortal.client.stats())["running"] < 2:
            await asyncio.sleep(0.02)
        os.kill(mortal.client.pid, signal.SIGKILL)
        for outputs in await asyncio.gather(*tasks):
            assert outputs[-1].finish_reason == "error"
            assert "was killed" in (outputs[-1].error or "")
            assert outputs[-1].num_prompt_tokens == 5
        assert not mortal.client.alive
        with pytest.raises(MachineError, match="was killed"):
            mortal.client.generate(request("late"))
        with pytest.raises(MachineError, match="was killed"):
            await mortal.client.stats()

    mortal.run(die())


def test_sigterm_lets_what_runs_finish(mortal: Alive) -> None:
    async def terminate() -> None:
        running = mortal.client.generate(request("r"))
        await anext(running)
        os.kill(mortal.client.pid, signal.SIGTERM)
        outputs = [output async for output in running]
        assert (outputs[-1].finish_reason, outputs[-1].num_generated) == ("length", 100)
        await mortal.client.drain(10)
        assert not mortal.client.alive

    mortal.run(terminate())


def test_drain_has_a_deadline_and_refuses_newcomers(mortal: Alive) -> None:
    async def ending(outputs: AsyncIterator[RequestOutput]) -> str | None:
        try:
            return [output async for output in outputs][-1].finish_reason
        except RequestError as problem:
            return str(problem)

    async def drain() -> None:
        running = mortal.client.generate(request("r"))
        await anext(running)
        newcomer = mortal.client.generate(request("late"))
        draining = asyncio.create_task(mortal.client.drain(0.0))
        await asyncio.sleep(0)
        refused = ("error", "The engine is shutting down and takes no new requests.")
        assert await ending(newcomer) in refused
        assert await ending(running) in ("abort", "length")
        await draining
        assert not mortal.client.alive

    mortal.run(drain())


def test_a_stopped_process_is_noticed(alive: Alive) -> None:
    async def stop() -> None:
        os.kill(alive.client.pid, signal.SIGSTOP)
        await asyncio.sleep(1.7)
        assert alive.client.heartbeat_age > 1.3
        os.kill(alive.client.pid, signal.SIGCONT)
        await alive.client.stats()
        assert alive.client.heartbeat_age < 1.3

    alive.run(stop())


def test_a_load_error_arrives_as_what_it_is_and_leaves_nothing_behind(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def both() -> tuple[object, object]:
        no_scales = EngineClient.start(model_dir, EngineOptions(recipe="bf16", kv_cache_dtype="fp8"))
        return await asyncio.gather(no_scales, EngineClient.start(tmp_path / "nowhere"), return_exceptions=True)

    first, second = asyncio.run(both())
    assert isinstance(first, ScalesError)
    assert "calibrate with --kv-cache" in str(first)
    assert isinstance(second, ModelError)
    assert "does not exist" in str(second)
    assert list(tmp_path.iterdir()) == []


def test_the_socket_is_private(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by a stand-in for the worker, which then ends without a word."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes: list[int] = []

    async def look(*command: str, **kwargs: Any) -> asyncio.subprocess.Process:
        path = Path(command[command.index("--socket") + 1])
        modes.extend(stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent))
        return await spawn(sys.executable, "-c", "raise SystemExit(3)")

    spawn = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", look)
    with pytest.raises(MachineError, match="exit status 3"):
        asyncio.run(EngineClient.start(model_dir))
    assert modes == [0o600, 0o700]


def test_the_client_imports_no_torch() -> None:
    code = "import sys, fp8serve.engine.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
