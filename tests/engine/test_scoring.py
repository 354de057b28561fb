"""`prompt_logprobs`: they are those of the model and do not depend on chunks, cached prefixes, the batch or
preemption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.calibration.data import Sample, make_batches
from fp8serve.calibration.passes import forward
from fp8serve.engine.engine import Engine
from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError

PROMPT = [256, *b"Once upon a time, and then once more upon a time."]
OPTIONS = {"recipe": "bf16", "max_num_seqs": 4, "max_batch_tokens": 64, "max_prefill_tokens": 64}


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return Engine(model_dir, **OPTIONS)


def prompt_logprobs_of(engine: Engine, prompt: list[int] = PROMPT, **sampling: Any) -> list[TokenLogprob]:
    options = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True, "prompt_logprobs": 2, **sampling}
    logprobs = engine.generate([prompt], **options)[0].prompt_logprobs
    assert logprobs is not None
    return logprobs


def test_prompt_logprobs_equal_the_logprobs_of_generated_tokens(engine: Engine) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    answer = engine.generate([PROMPT], **params, logprobs=2)[0]
    assert answer.logprobs is not None
    assert prompt_logprobs_of(engine, PROMPT + answer.token_ids)[len(PROMPT) - 1 :] == answer.logprobs


def test_prompt_logprobs_are_close_to_a_forward_pass_of_the_model(engine: Engine) -> None:
    """Attention sums in another order, and BF16 rounding then changes a random model's logits by up to 0.2."""
    logprobs = prompt_logprobs_of(engine)
    assert [item.token_id for item in logprobs] == PROMPT[1:]
    (batch,) = make_batches([Sample(tuple(PROMPT), (True,) * len(PROMPT))], 1)
    decoder = engine.loaded.runner.model
    with torch.no_grad():
        expected = decoder.logits(forward(decoder, batch)).log_softmax(-1)
    for row, item in zip(expected, logprobs, strict=False):
        assert item.logprob == pytest.approx(float(row[item.token_id]), abs=0.2)
        assert [value for _, value in item.top] == pytest.approx(row.topk(2).values.tolist(), abs=0.2)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_change_no_bit(chunk: int, engine: Engine, model_dir: Path) -> None:
    small = Engine(model_dir, **OPTIONS | {"max_prefill_tokens": chunk})
    assert prompt_logprobs_of(small) == prompt_logprobs_of(engine)


def test_a_scored_prompt_uses_no_cached_prefix(engine: Engine) -> None:
    first = prompt_logprobs_of(engine)
    engine.generate([PROMPT], max_new_tokens=1)
    before = engine.stats()["prefix_hit_tokens_total"]
    assert prompt_logprobs_of(engine) == first
    assert engine.stats()["prefix_hit_tokens_total"] == before
    engine.generate([PROMPT], max_new_tokens=1)
    assert (
        engine.stats()["prefix_hit_tokens_total"] > before
    )  # blocks computed for scoring are shared with other requests


def test_neighbours_change_no_bit(engine: Engine) -> None:
    alone, others = prompt_logprobs_of(engine), [PROMPT[:9], PROMPT[:30], [256, *b"something else"]]
    params = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    for index, prompt in enumerate(others):
        engine.add_request(Request(f"plain-{index}", tuple(prompt), SamplingParams(**params)))  # type: ignore[arg-type]
    assert prompt_logprobs_of(engine) == alone
    engine.abort_all()
    together = engine.generate([PROMPT, PROMPT[:20], PROMPT], **params, prompt_logprobs=2)
    assert together[0].prompt_logprobs == together[2].prompt_logprobs == alone
    assert together[1].prompt_logprobs == alone[:19]


def test_prompt_logprobs_do_not_change_the_answer(engine: Engine) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True, "logprobs": 1}
    one, other = (engine.generate([PROMPT], **params, **more)[0] for more in ({}, {"prompt_logprobs": 0}))
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert one.prompt_logprobs is None
    assert other.prompt_logprobs is not None
    assert all(item.top == () for item in other.prompt_logprobs)


def test_a_preempted_request_returns_its_prompt_logprobs_once(model_dir: Path, engine: Engine) -> None:
    """The cache is too small for both sequences, so that one is preempted and computed again."""
    small = Engine(model_dir, **OPTIONS, block_size=16, num_blocks=8)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, prompt_logprobs=2)
    for name in ("a", "b"):
        small.add_request(Request(name, tuple(PROMPT[:40]), params))
    outputs_of: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    while small.has_work():
        for output in small.step():
            outputs_of[output.request_id].append(output)
    assert small.stats()["preemptions_total"] > 0
    expected = tuple(prompt_logprobs_of(engine, PROMPT[:40]))
    for outputs in outputs_of.values():
        assert [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None] == [expected]
        assert len(outputs) == 40


def test_a_prompt_of_one_token_has_no_prompt_logprobs(engine: Engine) -> None:
    assert prompt_logprobs_of(engine, [256]) == []


def test_prompt_logprobs_survive_json() -> None:
    output = RequestOutput("r", prompt_logprobs=(TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.5))),))
    assert RequestOutput.from_json(output.to_json()) == output
    assert "prompt_logprobs" not in RequestOutput("r").to_json()


def test_too_many_alternatives_are_refused() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)
