"""The engine's process from a server's view: it answers, refuses, dies, drains, and never leaves anyone waiting."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fp8serve.engine.client import EngineClient
from fp8serve.engine.engine import Engine
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import MachineError, ModelError, RequestError, ScalesError
from tests.engine.tiny import write_model
from tests.patience import PATIENCE, eventually

OPTIONS = EngineOptions(recipe="bf16", max_num_seqs=4, num_blocks=1100)
CONTEXT = 4096
ENDLESS = SamplingParams(max_new_tokens=4000, ignore_eos=True, seed=1)  # nobody waits for its end


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long") / "llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
async def alive(model_dir: Path) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(model_dir, OPTIONS)
    yield client
    await client.close()


@pytest.fixture
async def mortal(model_dir: Path) -> AsyncIterator[EngineClient]:
    """One that the test may kill."""
    client = await EngineClient.start(model_dir, OPTIONS)
    yield client
    await client.close()


def request(name: str, params: SamplingParams = ENDLESS, prompt: bytes = b"Hello") -> Request:
    return Request(name, tuple(prompt), params)


async def collect(client: EngineClient, item: Request) -> list[RequestOutput]:
    return [output async for output in client.generate(item)]


async def test_answers_are_those_of_an_engine_in_process(alive: EngineClient, model_dir: Path) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    prompts = (b"Hello", b"a", b"Once upon a time")
    items = [request(str(i), params, prompt) for i, prompt in enumerate(prompts)]
    found = await asyncio.gather(*(collect(alive, item) for item in items))
    engine = Engine(model_dir, recipe="bf16")
    expected = engine.generate(
        [list(prompt) for prompt in prompts], max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1
    )
    for outputs, completion in zip(found, expected, strict=True):
        assert [token for output in outputs for token in output.token_ids] == completion.token_ids
        assert "".join(output.text_delta for output in outputs) == completion.text
        assert [item for output in outputs for item in output.logprobs or ()] == completion.logprobs
        assert outputs[-1].finish_reason == "length"


async def test_what_cannot_run_is_refused_before_it_is_sent(alive: EngineClient) -> None:
    with pytest.raises(RequestError, match=f"together {CONTEXT + 2}"):
        alive.generate(request("r", SamplingParams(max_new_tokens=CONTEXT - 3)))
    running = alive.generate(request("same"))
    await anext(running)
    with pytest.raises(RequestError, match="still running"):
        alive.generate(request("same"))
    await running.aclose()


async def test_closing_the_iterator_aborts_the_request(alive: EngineClient) -> None:
    before = (await alive.stats())["finished_total"]["abort"]
    outputs = alive.generate(request("leaver"))
    await anext(outputs)
    await outputs.aclose()

    async def freed() -> bool:
        stats = await alive.stats()
        return bool(stats["kv_blocks_used"] == 0 and stats["finished_total"]["abort"] == before + 1)

    await eventually(freed)


async def test_closing_an_iterator_that_has_ended_leaves_a_later_request_of_its_id(alive: EngineClient) -> None:
    first = alive.generate(request("x", SamplingParams(max_new_tokens=1, ignore_eos=True)))
    assert [output.finish_reason async for output in aiter_once(first)] == ["length"]
    second = alive.generate(request("x", SamplingParams(max_new_tokens=3, ignore_eos=True)))
    output = await anext(second)
    await first.aclose()
    outputs = [output, *[output async for output in second]]
    assert (outputs[-1].finish_reason, outputs[-1].num_generated) == ("length", 3)


async def aiter_once(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
    """Yields the first output and leaves the iterator open."""
    yield await anext(outputs)


async def test_a_cancelled_task_aborts_its_request(alive: EngineClient) -> None:
    task = asyncio.create_task(collect(alive, request("cancelled")))

    async def busy() -> bool:
        return bool((await alive.stats())["running"])

    await eventually(busy)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def idle() -> bool:
        return not await busy()

    await eventually(idle)


async def test_a_request_may_have_the_id_of_one_that_was_cancelled_just_before(alive: EngineClient) -> None:
    first, second = list[Any](), list[Any]()
    alive.submit(request("same"), first.append)
    await eventually(lambda: first)
    alive.cancel("same")
    alive.submit(request("same", SamplingParams(max_new_tokens=3, ignore_eos=True)), second.append)
    await eventually(lambda: second and second[-1].finish_reason is not None)
    assert [(output.num_generated, output.finish_reason) for output in second] == [(1, None), (2, None), (3, "length")]


async def test_of_two_iterators_with_one_id_the_later_is_refused_and_the_other_completes(alive: EngineClient) -> None:
    tokens = CONTEXT - 10
    first = alive.generate(request("twice", SamplingParams(max_new_tokens=tokens, ignore_eos=True)))
    async with asyncio.timeout(PATIENCE):
        outputs = [await anext(first)]
        with pytest.raises(RequestError, match="is still running"):
            await collect(alive, request("twice"))
        outputs += [output async for output in first]
    assert (outputs[-1].finish_reason, outputs[-1].num_generated) == ("length", tokens)


async def test_it_says_how_it_is(alive: EngineClient) -> None:
    assert alive.alive
    await eventually(lambda: alive.heartbeat_age < 30)
    assert alive.info["architecture"] == "LlamaForCausalLM"
    assert alive.limits.max_model_len == CONTEXT
    assert (await alive.stats())["kv_blocks"] == 1100
    assert await alive.scales() == []


async def test_a_killed_process_ends_every_stream_with_a_sentence(mortal: EngineClient) -> None:
    tasks = [asyncio.create_task(collect(mortal, request(name))) for name in ("a", "b")]

    async def both_run() -> bool:
        return bool((await mortal.stats())["running"] == 2)

    await eventually(both_run)
    os.kill(mortal.pid, signal.SIGKILL)
    for outputs in await asyncio.gather(*tasks):
        assert outputs[-1].finish_reason == "error"
        assert "was killed (SIGKILL)" in (outputs[-1].error or "")
        assert "SIGKILL" in (outputs[-1].error or "")
        assert outputs[-1].num_prompt_tokens == 5
    assert not mortal.alive
    with pytest.raises(MachineError, match="was killed"):
        mortal.generate(request("late"))
    with pytest.raises(MachineError, match="was killed"):
        await mortal.stats()


async def test_sigterm_lets_what_runs_finish(mortal: EngineClient) -> None:
    running = mortal.generate(request("r", SamplingParams(max_new_tokens=100, ignore_eos=True)))
    await anext(running)
    os.kill(mortal.pid, signal.SIGTERM)
    outputs = [output async for output in running]
    assert (outputs[-1].finish_reason, outputs[-1].num_generated) == ("length", 100)
    await mortal.drain(10)
    assert not mortal.alive


async def test_drain_has_a_deadline_and_refuses_newcomers(mortal: EngineClient) -> None:
    async def ending(outputs: AsyncIterator[RequestOutput]) -> str | None:
        try:
            return [output async for output in outputs][-1].finish_reason
        except RequestError as problem:
            return str(problem)

    running = mortal.generate(request("r"))
    await anext(running)
    newcomer = mortal.generate(request("late"))
    draining = asyncio.create_task(mortal.drain(0.0))
    await asyncio.sleep(0)
    refused = ("error", "The engine is shutting down and takes no new requests.")
    assert await ending(newcomer) in refused
    assert await ending(running) in ("abort", "length")
    await draining
    assert not mortal.alive


async def test_a_stopped_process_is_noticed(alive: EngineClient) -> None:
    os.kill(alive.pid, signal.SIGSTOP)
    await eventually(lambda: alive.heartbeat_age > 1.3)
    os.kill(alive.pid, signal.SIGCONT)
    await alive.stats()
    await eventually(lambda: alive.heartbeat_age < 1.3)


async def test_a_load_error_arrives_as_what_it_is_and_leaves_nothing_behind(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    no_scales = EngineClient.start(model_dir, EngineOptions(recipe="bf16", kv_cache_dtype="fp8"))
    nowhere = EngineClient.start(tmp_path / "nowhere")
    first, second = await asyncio.gather(no_scales, nowhere, return_exceptions=True)
    assert isinstance(first, ScalesError)
    assert "calibrate with --kv-cache" in str(first)
    assert isinstance(second, ModelError)
    assert "does not exist" in str(second)
    assert list(tmp_path.iterdir()) == []


async def test_the_socket_is_private(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the worker looks at it, and then ends silently."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes: list[int] = []

    async def look(*command: str, **kwargs: Any) -> asyncio.subprocess.Process:
        path = Path(command[command.index("--socket") + 1])
        modes.extend(stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent))
        return await spawn(sys.executable, "-c", "raise SystemExit(3)")

    spawn = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", look)
    with pytest.raises(MachineError, match="exit status 3"):
        await EngineClient.start(model_dir)
    assert modes == [0o600, 0o700]


def test_the_client_imports_no_torch() -> None:
    code = "import sys, fp8serve.engine.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
