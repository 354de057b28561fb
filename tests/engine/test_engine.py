"""The engine's public interface: completions, stop conditions, refused requests, failures, info and statistics."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.engine.engine import Engine
from fp8serve.engine.output import Completion, RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.scheduler import Work
from fp8serve.errors import RequestError, ScalesError
from fp8serve.fp8.recipe import DelayedScaling

from .tiny import EOS, write_scales

PROMPT = [256, *b"Once upon a time"]


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return Engine(model_dir, recipe="bf16", max_num_seqs=4, max_batch_tokens=32, max_prefill_tokens=8)


def greedy(engine: Engine, prompt: list[int] = PROMPT, **sampling: Any) -> Completion:
    options = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True, **sampling}
    return engine.generate([prompt], **options)[0]


def drive(engine: Engine, *requests: Request) -> dict[str, list[RequestOutput]]:
    """Runs the engine until it has no work. Returns all outputs by request id."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def test_text_and_token_ids_as_prompts_give_the_same_answer(engine: Engine) -> None:
    text = "naïve café"
    assert engine.tokenizer is not None
    first, second = engine.generate([text, engine.tokenizer.encode(text)], temperature=0.0, max_new_tokens=8)
    assert first == second
    assert len(first.token_ids) == 8
    assert first.finish_reason == "length"


def test_completions_come_in_the_order_of_their_prompts(engine: Engine) -> None:
    prompts = [PROMPT[:n] for n in (16, 3, 9, 1, 12, 5)]
    together = engine.generate(prompts, temperature=0.0, max_new_tokens=5)
    assert together == [engine.generate([prompt], temperature=0.0, max_new_tokens=5)[0] for prompt in prompts]


def test_streamed_text_adds_up_and_incomplete_characters_are_held_back(engine: Engine) -> None:
    assert engine.tokenizer is not None
    params = SamplingParams(temperature=1.5, seed=3, max_new_tokens=60, ignore_eos=True)
    (outputs,) = drive(engine, Request("r", tuple(PROMPT), params)).values()
    token_ids = [token for output in outputs for token in output.token_ids]
    assert "".join(output.text_delta for output in outputs) == engine.tokenizer.decode(token_ids)
    assert [output.num_generated for output in outputs] == list(range(1, 61))
    assert [output.finish_reason for output in outputs] == [None] * 59 + ["length"]


def test_an_end_of_text_token_ends_the_answer(engine: Engine) -> None:
    token = greedy(engine).token_ids[5]
    engine.eos_ids, eos_ids = (token,), engine.eos_ids
    try:
        first = greedy(engine).token_ids.index(token)
        ended = greedy(engine, ignore_eos=False)
        assert (ended.finish_reason, ended.token_ids) == ("stop", greedy(engine).token_ids[: first + 1])
        late = greedy(engine, ignore_eos=False, min_tokens=first + 2)
        assert token not in late.token_ids[: first + 2]
    finally:
        engine.eos_ids = eos_ids


def test_a_stop_token_ends_the_answer_and_is_the_stop_reason(engine: Engine) -> None:
    plain = greedy(engine)
    token = plain.token_ids[4]
    first = plain.token_ids.index(token)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True, stop_token_ids=(token,))
    (outputs,) = drive(engine, Request("r", tuple(PROMPT), params)).values()
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", token)
    assert [t for output in outputs for t in output.token_ids] == plain.token_ids[: first + 1]
    assert engine.tokenizer is not None
    assert "".join(o.text_delta for o in outputs) == engine.tokenizer.decode(plain.token_ids[:first])


def test_a_stop_string_over_several_tokens_ends_the_answer_and_is_not_returned(engine: Engine) -> None:
    plain = greedy(engine)
    stop = plain.text[4:7]
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True, stop=(stop,))
    (outputs,) = drive(engine, Request("r", tuple(PROMPT), params)).values()
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    assert "".join(output.text_delta for output in outputs) == plain.text[: plain.text.index(stop)]


def test_logprobs_are_returned_on_request(engine: Engine) -> None:
    assert greedy(engine).logprobs is None
    completion = greedy(engine, logprobs=3)
    assert completion.logprobs is not None
    assert [item.token_id for item in completion.logprobs] == completion.token_ids
    assert all(item.top[0] == (item.token_id, item.logprob) and len(item.top) == 3 for item in completion.logprobs)


@pytest.mark.parametrize(
    ("prompts", "sampling", "sentence"),
    [
        ([list(range(120))], {}, r"120 tokens and max_new_tokens is 16, together 136, .* 128"),
        ([[]], {}, r"prompt is empty"),
        ([[999]], {}, r"999 is outside the vocabulary of 260"),
        ("Hello", {}, r"list of prompts"),
        ([1, 2], {}, r"list of prompts"),
        ([[1]], {"temprature": 1}, r"no field 'temprature'"),
        ([[1], [2]], {"top_p": 2}, r"top_p"),
    ],
)
def test_invalid_requests_are_refused_and_leave_no_state(
    engine: Engine, prompts: Any, sampling: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        engine.generate(prompts, **sampling)
    assert not engine.has_work()


def test_the_id_of_a_running_request_cannot_be_used_again(engine: Engine) -> None:
    engine.add_request(Request("same", (1,)))
    with pytest.raises(RequestError, match="still running"):
        engine.add_request(Request("same", (1,)))
    assert engine.abort("same") is not None
    assert engine.abort("same") is None


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 10])
def test_aborting_at_any_point_frees_the_blocks(engine: Engine, steps: int) -> None:
    for name in ("a", "b", "c"):
        engine.add_request(Request(name, tuple(PROMPT), SamplingParams(max_new_tokens=20, ignore_eos=True)))
    for _ in range(steps):
        engine.step()
    outputs = engine.abort_all()
    assert [output.finish_reason for output in outputs] == ["abort"] * 3
    assert not engine.has_work()
    assert engine.stats()["kv_blocks_used"] == 0


def test_a_failing_batch_ends_only_its_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(work: list[Work]) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory.\nand a long story")

    monkeypatch.setattr(engine.loaded.runner, "run", out_of_memory)
    (outputs,) = drive(engine, Request("r", (1, 2))).values()
    assert (outputs[-1].finish_reason, outputs[-1].error) == (
        "error",
        "The model failed on this batch: CUDA out of memory.",
    )
    with pytest.raises(RequestError, match="out of memory"):
        greedy(engine)
    monkeypatch.undo()
    assert len(greedy(engine).token_ids) == 24


def test_an_interrupted_call_leaves_no_request_running(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(work: list[Work]) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.loaded.runner, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy(engine)
    assert not engine.has_work()
    assert engine.step() == []


def test_nonfinite_logits_end_only_their_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine.loaded.runner.run

    def sometimes_broken(work: list[Work]) -> torch.Tensor:
        logits = run(work)
        broken = [item.seq.request_id == "broken" for item in work if item.needs_sample]
        return logits.masked_fill(torch.tensor(broken)[:, None], torch.nan)

    monkeypatch.setattr(engine.loaded.runner, "run", sometimes_broken)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    outputs = drive(engine, Request("broken", (1, 2), params), Request("sound", (1, 2), params))
    assert (outputs["broken"][-1].finish_reason, outputs["sound"][-1].finish_reason) == ("error", "length")
    assert "not finite" in (outputs["broken"][-1].error or "")


@pytest.mark.parametrize("length", [1, 8, 9, 10, 17])
def test_a_prompt_of_any_length_is_counted_once(model_dir: Path, length: int) -> None:
    """This includes a prompt whose last chunk is a single token, which runs in the decoding part of the batch."""
    engine = Engine(model_dir, recipe="bf16", max_num_seqs=2, max_batch_tokens=8, max_prefill_tokens=8)
    engine.generate([list(range(1, length + 1))], max_new_tokens=2, ignore_eos=True)
    assert engine.stats()["prompt_tokens_total"] == length


def test_stats_and_info(model_dir: Path) -> None:
    engine = Engine(model_dir, recipe="bf16", num_blocks=20)
    engine.generate([PROMPT, PROMPT], temperature=0.0, max_new_tokens=4)
    engine.generate([PROMPT], temperature=0.0, max_new_tokens=4)
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["kv_usage"]) == (0, 0, 0)
    assert stats["prompt_tokens_total"] == 17 * 3
    assert stats["computed_tokens_total"] == (17 + 3) + (1 + 3) * 2
    assert stats["generated_tokens_total"] == 12
    assert stats["prefix_hit_tokens_total"] == 16 * 2
    assert stats["finished_total"] == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    info = engine.info()
    assert (info["architecture"], info["num_blocks"], info["max_model_len"]) == ("LlamaForCausalLM", 20, 128)


def test_scales_reports_headroom_and_saturation_of_stored_scales(model_dir: Path, tmp_path: Path) -> None:
    scales = write_scales(model_dir, tmp_path / "scales.safetensors")
    engine = Engine(model_dir, recipe=DelayedScaling(), scales=scales)
    assert engine.info()["input_scales"] == "stored"
    assert all(record["amax"] == 0 for record in engine.scales())
    greedy(engine)
    record = engine.scales()[0]
    assert record["name"] == "model.layers.0.self_attn.q_proj"
    assert record["headroom"] == pytest.approx(448 / (record["amax"] * 20))
    assert 0 <= record["saturation"] <= 1


def test_an_fp8_cache_needs_scales_and_uses_them(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ScalesError, match="calibrate with --kv-cache"):
        Engine(model_dir, recipe="bf16", kv_cache_dtype="fp8")
    scales = write_scales(model_dir, tmp_path / "scales.safetensors", kv=True)
    small = Engine(model_dir, recipe=DelayedScaling(), scales=scales, kv_cache_dtype="fp8", num_blocks=20)
    large = Engine(model_dir, recipe=DelayedScaling(), scales=scales, num_blocks=20)
    assert small.info()["kv_cache_bytes"] * 2 == large.info()["kv_cache_bytes"]
    params = SamplingParams(temperature=0.0, max_new_tokens=1, logprobs=0, ignore_eos=True)
    a, b = (drive(e, Request("r", tuple(PROMPT), params))["r"][0].logprobs for e in (small, large))
    assert a is not None and b is not None  # noqa: PT018
    assert a[0].logprob == pytest.approx(b[0].logprob, abs=0.3)
    assert a[0].logprob != b[0].logprob


def test_without_a_tokenizer_token_ids_can_be_used(model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_dir / name, tmp_path)
    engine = Engine(tmp_path, recipe="bf16")
    completion = greedy(engine)
    assert (completion.text, len(completion.token_ids)) == ("", 24)
    with pytest.raises(RequestError, match=r"holds no tokenizer\.json; save"):
        engine.generate(["text"])
    with pytest.raises(RequestError, match="Stop strings, bad words and grammars need a tokenizer"):
        greedy(engine, stop="x")


def test_the_end_of_text_token_is_read_from_the_model(engine: Engine) -> None:
    assert engine.eos_ids == (EOS,)
