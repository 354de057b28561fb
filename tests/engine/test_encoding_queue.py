"""The queue of texts to encode: calls take turns text by text and share steps."""

import asyncio
from pathlib import Path

import pytest
import torch

from fp8serve.engine.client import EngineClient
from fp8serve.engine.embedding import Embedder, EmbeddingEngine, EncodingCall, EncodingQueue
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError
from tests.model.encoders import BERT, ids_of, make, pooled


def call(number: int, *lengths: int) -> EncodingCall:
    return EncodingCall(number, [[number] * length for length in lengths])


def step(queue: EncodingQueue, tokens: int) -> list[tuple[int, int]]:
    return [(text.call.number, text.index) for text in queue.next_batch(tokens)]


def test_small_requests_share_a_step_and_do_not_wait_for_a_large_one() -> None:
    queue = EncodingQueue()
    for one in (call(1, *[4] * 6), call(2, 4), call(3, 4, 4)):
        queue.add(one)
    assert step(queue, 12) == [(1, 0), (2, 0), (3, 0)]
    assert step(queue, 12) == [(1, 1), (3, 1), (1, 2)]
    assert step(queue, 12) == [(1, 3), (1, 4), (1, 5)]
    assert not queue
    assert step(queue, 12) == []


def test_a_text_larger_than_a_step_gets_its_own_step() -> None:
    queue = EncodingQueue()
    queue.add(call(1, 5, 50, 5))
    assert [step(queue, 10) for _ in range(3)] == [[(1, 0)], [(1, 1)], [(1, 2)]]


def test_cancelled_calls_are_not_computed() -> None:
    queue = EncodingQueue()
    queue.add(call(1, 5, 5))
    queue.add(call(2, 5))
    queue.cancel(1)
    assert step(queue, 100) == [(2, 0)]
    queue.cancel(7)
    assert not queue


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, BERT)
    pooled(folder, "mean_tokens", normalize=True, max_length=24)
    return folder


def test_a_refused_call_does_not_affect_others(tiny: Path) -> None:
    engine = EmbeddingEngine(tiny, recipe="bf16")
    engine.embed(call(1, 3, 3))
    for wrong in (
        EncodingCall(2, []),
        EncodingCall(3, [[5], []]),
        EncodingCall(4, [[5], [10**6]]),
        EncodingCall(5, [[5] * 25]),
        EncodingCall(6, [[5]], None, 65),
    ):
        with pytest.raises(RequestError):
            engine.embed(wrong)
    engine.step()
    assert [finished.number for finished in engine.pop_finished_calls()] == [1]
    assert not engine.has_work()
    assert engine.pop_finished_calls() == []


def test_small_calls_finish_before_an_earlier_large_one(tiny: Path) -> None:
    engine = EmbeddingEngine(tiny, recipe="bf16", max_batch_tokens=64)
    engine.embed(call(0, *[12] * 400))
    for number in range(1, 41):
        engine.embed(call(number, 3 + number % 20))
    answered: list[int] = []
    while engine.has_work():
        engine.step()
        answered += [each.number for each in engine.pop_finished_calls()]
    assert answered[-1] == 0
    assert sorted(answered[:-1]) == list(range(1, 41))


async def test_concurrent_calls_get_the_same_bits_as_alone(tiny: Path) -> None:
    """Each call requests another number of dimensions, and one call is cancelled."""
    options = EngineOptions(recipe="rowwise", max_batch_tokens=64)
    client = await EngineClient.start(tiny, options)
    try:
        texts = [ids_of(3 + i % 20, seed=i).tolist() for i in range(40)]
        cancelled = asyncio.create_task(client.embed(texts * 1000))
        await client.embed(texts[:1])  # the engine has got `cancelled` before this call
        cancelled.cancel()
        large = asyncio.create_task(client.embed(texts * 100))
        vectors = await asyncio.gather(*(client.embed([ids], 8 + i) for i, ids in enumerate(texts)))
        large_result = await large
        embedder = Embedder(tiny, recipe="rowwise")
        for i, ((vector,), ids) in enumerate(zip(vectors, texts, strict=True)):
            expected = embedder.embed([ids], dimensions=8 + i).vectors[0]
            assert torch.equal(torch.frombuffer(bytearray(vector), dtype=torch.float32), expected)
            assert large_result[i] == large_result[i + 40] == embedder.embed([ids]).vectors[0].numpy().tobytes()
        steps = (await client.stats())["steps_total"]
        assert steps < 40 * 1000 * 12.5 / 64  # the cancelled call was not computed to its end
    finally:
        await client.close()
