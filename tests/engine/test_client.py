"""The client of an engine process: it answers, refuses requests and drains; if the process dies, no caller waits
forever."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
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
ENDLESS = SamplingParams(max_new_tokens=4000, ignore_eos=True, seed=1)  # too long for any test to wait for its end


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("long") / "llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
async def shared_client(model_dir: Path) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(model_dir, OPTIONS)
    yield client
    await client.close()


@pytest.fixture
async def own_client(model_dir: Path) -> AsyncIterator[EngineClient]:
    """A client whose process the test may kill."""
    client = await EngineClient.start(model_dir, OPTIONS)
    yield client
    await client.close()


def request(name: str, params: SamplingParams = ENDLESS, prompt: bytes = b"Hello") -> Request:
    return Request(name, tuple(prompt), params)


async def collect(client: EngineClient, item: Request) -> list[RequestOutput]:
    return [output async for output in client.generate(item)]


async def test_answers_equal_those_of_an_engine_in_the_same_process(
    shared_client: EngineClient, model_dir: Path
) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    prompts = (b"Hello", b"a", b"Once upon a time")
    items = [request(str(i), params, prompt) for i, prompt in enumerate(prompts)]
    results = await asyncio.gather(*(collect(shared_client, item) for item in items))
    engine = Engine(model_dir, recipe="bf16")
    expected = engine.generate(
        [list(prompt) for prompt in prompts], max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1
    )
    for outputs, completion in zip(results, expected, strict=True):
        assert [token for output in outputs for token in output.token_ids] == completion.token_ids
        assert "".join(output.text_delta for output in outputs) == completion.text
        assert [item for output in outputs for item in output.logprobs or ()] == completion.logprobs
        assert outputs[-1].finish_reason == "length"


async def test_invalid_requests_are_refused_before_they_are_sent(shared_client: EngineClient) -> None:
    with pytest.raises(RequestError, match=f"together {CONTEXT + 2}"):
        shared_client.generate(request("r", SamplingParams(max_new_tokens=CONTEXT - 3)))
    running = shared_client.generate(request("same"))
    await anext(running)
    with pytest.raises(RequestError, match="still running"):
        shared_client.generate(request("same"))
    await running.aclose()


async def test_closing_the_iterator_aborts_the_request(shared_client: EngineClient) -> None:
    before = (await shared_client.stats())["finished_total"]["abort"]
    outputs = shared_client.generate(request("leaver"))
    await anext(outputs)
    await outputs.aclose()

    async def freed() -> bool:
        stats = await shared_client.stats()
        return bool(stats["kv_blocks_used"] == 0 and stats["finished_total"]["abort"] == before + 1)

    await eventually(freed)


async def test_closing_a_finished_iterator_does_not_abort_a_later_request_with_its_id(
    shared_client: EngineClient,
) -> None:
    first = shared_client.generate(request("x", SamplingParams(max_new_tokens=1, ignore_eos=True)))
    assert [output.finish_reason async for output in aiter_once(first)] == ["length"]
    second = shared_client.generate(request("x", SamplingParams(max_new_tokens=3, ignore_eos=True)))
    output = await anext(second)
    await first.aclose()
    outputs = [output, *[output async for output in second]]
    assert (outputs[-1].finish_reason, outputs[-1].num_generated) == ("length", 3)


async def aiter_once(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
    """Yields the first output and leaves the iterator open."""
    yield await anext(outputs)


async def test_a_cancelled_task_aborts_its_request(shared_client: EngineClient) -> None:
    task = asyncio.create_task(collect(shared_client, request("cancelled")))

    async def busy() -> bool:
        return bool((await shared_client.stats())["running"])

    await eventually(busy)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def idle() -> bool:
        return not await busy()

    await eventually(idle)


async def test_a_request_may_have_the_id_of_one_that_was_cancelled_just_before(shared_client: EngineClient) -> None:
    first, second = list[Any](), list[Any]()
    shared_client.submit(request("same"), first.append)
    await eventually(lambda: first)
    shared_client.cancel("same")
    shared_client.submit(request("same", SamplingParams(max_new_tokens=3, ignore_eos=True)), second.append)
    await eventually(lambda: second and second[-1].finish_reason is not None)
    assert [(output.num_generated, output.finish_reason) for output in second] == [(1, None), (2, None), (3, "length")]


async def test_of_two_iterators_with_one_id_the_later_is_refused_and_the_other_completes(
    shared_client: EngineClient,
) -> None:
    tokens = CONTEXT - 10
    first = shared_client.generate(request("twice", SamplingParams(max_new_tokens=tokens, ignore_eos=True)))
    async with asyncio.timeout(PATIENCE):
        outputs = [await anext(first)]
        with pytest.raises(RequestError, match="is still running"):
            await collect(shared_client, request("twice"))
        outputs += [output async for output in first]
    assert (outputs[-1].finish_reason, outputs[-1].num_generated) == ("length", tokens)


async def test_info_stats_and_health(shared_client: EngineClient) -> None:
    assert shared_client.alive
    await eventually(lambda: shared_client.heartbeat_age < 30)
    assert shared_client.info["architecture"] == "LlamaForCausalLM"
    assert shared_client.limits.max_model_len == CONTEXT
    assert (await shared_client.stats())["kv_blocks"] == 1100
    assert await shared_client.scales() == []


async def test_a_killed_process_ends_every_stream_with_a_sentence(own_client: EngineClient) -> None:
    tasks = [asyncio.create_task(collect(own_client, request(name))) for name in ("a", "b")]

    async def both_run() -> bool:
        return bool((await own_client.stats())["running"] == 2)

    await eventually(both_run)
    os.kill(own_client.pid, signal.SIGKILL)
    for outputs in await asyncio.gather(*tasks):
        assert outputs[-1].finish_reason == "error"
        assert "was killed (SIGKILL)" in (outputs[-1].error or "")
        assert "SIGKILL" in (outputs[-1].error or "")
        assert outputs[-1].num_prompt_tokens == 5
    assert not own_client.alive
    with pytest.raises(MachineError, match="was killed"):
        own_client.generate(request("late"))
    with pytest.raises(MachineError, match="was killed"):
        await own_client.stats()


async def test_sigterm_lets_running_requests_finish(own_client: EngineClient) -> None:
    running = own_client.generate(request("r", SamplingParams(max_new_tokens=100, ignore_eos=True)))
    await anext(running)
    os.kill(own_client.pid, signal.SIGTERM)
    outputs = [output async for output in running]
    assert (outputs[-1].finish_reason, outputs[-1].num_generated) == ("length", 100)
    await own_client.drain(10)
    assert not own_client.alive


async def test_sigterm_refuses_new_requests_as_long_as_others_run(own_client: EngineClient) -> None:
    running = own_client.generate(request("r"))
    await anext(running)
    assert not own_client.is_draining
    os.kill(own_client.pid, signal.SIGTERM)
    await eventually(lambda: own_client.is_draining)
    with pytest.raises(MachineError, match="The engine is shutting down and takes no new requests"):
        await collect(own_client, request("late"))
    await running.aclose()
    await eventually(lambda: not own_client.alive)


async def test_drain_has_a_deadline_and_refuses_new_requests(own_client: EngineClient) -> None:
    async def ending(outputs: AsyncIterator[RequestOutput]) -> str | None:
        try:
            return [output async for output in outputs][-1].finish_reason
        except MachineError as problem:
            return str(problem)

    running = own_client.generate(request("r"))
    await anext(running)
    newcomer = own_client.generate(request("late"))
    draining = asyncio.create_task(own_client.drain(0.0))
    await asyncio.sleep(0)
    refused = ("error", "The engine is shutting down and takes no new requests.")
    assert await ending(newcomer) in refused
    assert await ending(running) in ("abort", "length")
    await draining
    assert not own_client.alive


async def test_a_stopped_process_is_noticed(shared_client: EngineClient) -> None:
    os.kill(shared_client.pid, signal.SIGSTOP)
    await eventually(lambda: shared_client.heartbeat_age > 1.3)
    os.kill(shared_client.pid, signal.SIGCONT)
    await shared_client.stats()
    await eventually(lambda: shared_client.heartbeat_age < 1.3)


async def test_a_load_error_keeps_its_class_and_leaves_no_process(
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
    """A stand-in for the worker reads the permissions of the socket, and then ends without output."""
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


async def test_weights_that_could_not_be_exchanged_are_refused_before_they_arrive(
    model_dir: Path, tmp_path: Path
) -> None:
    client = await EngineClient.start(model_dir, replace(OPTIONS, cache_dir=str(tmp_path)))
    address = {"name": "g", "host": "127.0.0.1", "port": 1, "rank": 1, "world_size": 2, "backend": "gloo"}
    tensors = [("model.norm.weight", "bfloat16", [64])]
    transfers = (
        client.join_group(address | {"rendezvous": "torch"}, PATIENCE),
        client.receive_weights("g", tensors, None, PATIENCE),
        client.read_shared_weights("x", tensors),
    )
    for transfer in transfers:
        with pytest.raises(RequestError, match="Weights cannot be exchanged with cache_dir"):
            await transfer
    await client.leave_group("g")  # changes nothing
    await client.close()
