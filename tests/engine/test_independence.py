"""An answer depends on its request alone: not on the rest of the batch, chunks, cached prefixes, preemption, or the
time of arrival."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8serve.engine.engine import Engine
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.fp8.recipe import DelayedScaling

from .tiny import write_model, write_scales

MODES: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "stored": {"recipe": DelayedScaling()},
    "fp8 cache, fp8 head": {"recipe": DelayedScaling(), "kv_cache_dtype": "fp8", "head_dtype": "fp8"},
    "current": {"recipe": "current"},
    "rowwise": {"recipe": "rowwise"},
    "block": {"recipe": "block"},
    "weights only": {"recipe": "w8a16"},
    "soft caps": {"recipe": "rowwise"},
    "windows": {"recipe": "bf16"},
    "windows, fp8 cache": {"recipe": DelayedScaling(), "kv_cache_dtype": "fp8"},
}


LONGEST_PROMPT = 40  # tokens, of a random `request`


@pytest.fixture(scope="module")
def large_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose sizes are no multiples of the vector width. Layers of `windowed` have a window of 6 tokens; `soft
    caps` is a Gemma 2."""
    path = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 320, "intermediate_size": 500, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(path, head_dim=48, **sizes)
    write_model(path / "windowed", "mistral", head_dim=48, sliding_window=6, **sizes)
    write_model(path / "soft caps", "gemma2", **sizes | {"head_dim": 48})
    for folder in (path, path / "windowed"):
        write_scales(folder, folder / "made-up", kv=True)
    return path


@cache
def engine(path: Path, mode: str, **sizes: Any) -> Engine:
    options = dict(MODES[mode])
    path = path / {"windows": "windowed", "soft caps": "soft caps"}.get(mode.partition(",")[0], "")
    if isinstance(options["recipe"], DelayedScaling):
        options["scales"] = path / "made-up"
    return Engine(path, **options, block_size=4, **sizes)


def request(rng: random.Random, name: str) -> Request:
    """Returns a random request. Prompts begin with few different tokens, so that prefixes are shared."""
    half = LONGEST_PROMPT // 2
    prompt = [rng.choice((7, 8))] * rng.randint(1, half) + [rng.randint(0, 255) for _ in range(rng.randint(0, half))]
    params = SamplingParams(
        max_new_tokens=rng.randint(1, 8),
        temperature=rng.choice((0.0, 0.7, 1.5)),
        top_p=rng.choice((0.8, 1.0)),
        top_k=rng.choice((0, 20)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        seed=rng.randint(0, 3),
        ignore_eos=True,
        logprobs=2,
        logit_bias=rng.choice(((), ((7, 2.5), (8, -100.0)))),
        bad_words=rng.choice(((), ("a", "xy"))),
    )
    return Request(name, tuple(prompt), params, tenant=rng.choice("ab"))


def run(engine: Engine, requests: list[Request], rng: random.Random) -> dict[str, list[Any]]:
    """Runs requests that arrive at random times; those named "noise" may be aborted. Returns the outputs of each."""
    pending = list(requests)
    outputs: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    while pending or engine.has_work():
        while pending and rng.random() < 0.5:
            engine.add_request(pending.pop(0))
        if rng.random() < 0.05 and (victim := rng.choice(requests)).request_id.startswith("noise"):
            engine.abort(victim.request_id)
        for output in engine.step() if engine.has_work() else ():
            outputs[output.request_id].append(comparable_fields(output))
    return outputs


def comparable_fields(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.logprobs, output.text_delta, output.finish_reason


@pytest.mark.parametrize("mode", list(MODES))
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_an_answer_does_not_depend_on_company(large_dir: Path, mode: str, seed: int) -> None:
    rng = random.Random(seed)
    mine = request(rng, "mine")
    others = [request(rng, f"noise {i}") for i in range(rng.randint(1, 6))]
    alone = run(engine(large_dir, mode), [mine], random.Random(0))
    crowded = engine(large_dir, mode, num_blocks=12, max_num_seqs=5, max_batch_tokens=19, max_prefill_tokens=7)
    together = [mine, *others]
    rng.shuffle(together)
    assert run(crowded, together, rng)["mine"] == alone["mine"]


@pytest.mark.parametrize("mode", ["stored", "rowwise", "bf16"])
def test_an_answer_does_not_depend_on_threads(large_dir: Path, mode: str, restored_threads: None) -> None:
    mine, outputs = request(random.Random(3), "mine"), []
    for threads in (1, 3):
        started = engine(large_dir, mode, threads=threads)
        assert started.info()["threads"] == threads
        outputs.append(run(started, [mine], random.Random(0)))
    assert outputs[0] == outputs[1]


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_crowded_schedules_preempt_and_share_prefixes(large_dir: Path) -> None:
    """This shows that test_an_answer_does_not_depend_on_company covers both."""
    rng = random.Random(0)
    crowded = engine(large_dir, "bf16", num_blocks=12, max_num_seqs=5, max_batch_tokens=19, max_prefill_tokens=7)
    for batch in range(8):
        run(crowded, [request(rng, f"{batch} {i}") for i in range(7)], rng)
    stats = crowded.stats()
    assert stats["preemptions_total"] > 0
    assert stats["prefix_hit_tokens_total"] > 0
