from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8serve.calibration import generated
from fp8serve.calibration.data import Sample, make_batches
from fp8serve.calibration.generated import (
    MAX_CHAT_PROMPT_TOKENS,
    MAX_PROMPT_TOKENS,
    TEMPERATURE,
    TOO_LARGE,
    _Cache,
    _gumbel,
    _prompts,
    generate_continuations,
)
from fp8serve.calibration.pipeline import calibrate
from fp8serve.calibration.reports.page import html_report
from fp8serve.calibration.result import CalibrationReport
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.text.tokenizer import Tokenizer
from tests.tiny import CHATS, write_tiny_model

SMALL = {"samples": 8, "seq_len": 48}
PROMPTS = [
    [5, 9, 300, 17, 4],
    [44],
    [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116],
]


def test_greedy_tokens_are_those_of_transformers(model_dir: Path) -> None:
    ours = generate_continuations(load_servable(model_dir, "bf16"), PROMPTS, tokens=20, temperature=0)
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    for prompt, continuation in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt + continuation])
        logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert torch.all(
            chosen >= logits.max(-1).values - 0.1
        )  # two libraries break near ties of BF16 logits differently


def test_continuations_do_not_depend_on_other_prompts(model_dir: Path) -> None:
    model = load_servable(model_dir, "bf16")
    alone = [generate_continuations(model, [prompt], tokens=12)[0] for prompt in PROMPTS]
    assert sum(a == b for a, b in zip(generate_continuations(model, PROMPTS, tokens=12), alone, strict=True)) >= 2


def test_the_prompt_is_the_question_of_a_chat_or_the_beginning_of_a_text() -> None:
    chat = Sample(tuple(range(40)), (False,) * 30 + (True,) * 10)
    text = Sample(tuple(range(60)), (True,) * 60)
    without_answer = Sample(tuple(range(20)), (False,) * 20)
    long = Sample(tuple(range(MAX_CHAT_PROMPT_TOKENS + 20)), (False,) * (MAX_CHAT_PROMPT_TOKENS + 10) + (True,) * 10)
    prompts = list(_prompts(make_batches([chat, text, without_answer, long], 3)))
    assert [len(prompt) for prompt in prompts] == [30, MAX_PROMPT_TOKENS, 10, MAX_PROMPT_TOKENS]
    assert all(prompt == list(range(len(prompt))) for prompt in prompts)


def test_a_prompt_is_shown_with_its_special_tokens(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "chats.jsonl").write_text(CHATS)
    files = {"data": [tmp_path / "chats.jsonl"], "holdout": [tmp_path / "chats.jsonl"]}
    report = calibrate(tmp_path / "tiny", out=tmp_path / "out", generated_samples=2, samples=16, seq_len=64, **files)  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_dir(tmp_path / "tiny")
    marks = [tokenizer.token_text(i) for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == ""]
    for sample in report.generated:
        assert any(mark and mark in sample.prompt for mark in marks)
        assert "assistant" in sample.prompt[-24:]  # the prompt is not truncated within the question
        assert f'<p class="text">{escape(sample.prompt)}</p>' in html_report(report)


def test_both_models_sample_with_the_same_random_numbers(model_dir: Path) -> None:
    """Equal models generate equal tokens, and the random numbers of a prompt do not depend on the batch."""
    logits = torch.zeros(2, 50)
    first = _gumbel(logits, [torch.Generator().manual_seed(seed) for seed in (1, 2)])
    (again,) = _gumbel(logits[:1], [torch.Generator().manual_seed(2)])
    assert torch.equal(first[1], again)
    assert not torch.equal(first[0], first[1])
    model = load_servable(model_dir, "bf16")
    assert generate_continuations(model, PROMPTS) == generate_continuations(model, PROMPTS)
    assert generate_continuations(model, PROMPTS) != generate_continuations(model, PROMPTS, temperature=0)


def test_gumbel_noise_samples_from_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    drawn = [int((logits + TEMPERATURE * _gumbel(logits, [generator])).argmax()) for _ in range(20_000)]
    shares = torch.tensor([drawn.count(i) / len(drawn) for i in range(3)])
    torch.testing.assert_close(shares, torch.softmax(logits[0] / TEMPERATURE, 0), atol=0.015, rtol=0)


def test_a_continuation_ends_with_the_context(model_dir: Path) -> None:
    model = load_servable(model_dir, "bf16")
    model.config = replace(model.config, max_position_embeddings=20)
    assert [len(ids) for ids in generate_continuations(model, PROMPTS)] == [3, 3, 3]


@pytest.mark.parametrize("kv_cache", [False, True])
def test_the_report_has_both_texts(model_dir: Path, tmp_path: Path, kv_cache: bool) -> None:
    report = calibrate(model_dir, out=tmp_path / "out", kv_cache=kv_cache, generated_samples=1, **SMALL)  # type: ignore[arg-type]
    (sample,) = report.generated
    assert sample.prompt
    assert sample.before
    assert 0 <= sample.same_tokens <= sample.tokens == 48
    assert report.seconds["generate"] > 0
    assert CalibrationReport.from_json((tmp_path / "out" / "calibration.json").read_text()) == report


def test_nothing_is_generated_on_request_or_if_the_model_is_too_large(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = calibrate(model_dir, out=tmp_path / "none", generated_samples=0, **SMALL)  # type: ignore[arg-type]
    assert (report.generated, report.notes) == ((), ())
    monkeypatch.setattr(generated, "free_memory", lambda: 1000)
    report = calibrate(model_dir, out=tmp_path / "large", **SMALL)  # type: ignore[arg-type]
    assert (report.generated, report.notes) == ((), (TOO_LARGE,))


def test_cache_scales_are_on_the_device_of_the_cache(model_dir: Path) -> None:
    """They are loaded on the CPU, and kernels on a GPU refuse tensors of the CPU."""
    one, decoder = torch.ones(()), load_servable(model_dir, "bf16")
    cache = _Cache(decoder, [4], torch.device("meta"), {0: (one, one)})
    assert [scale.device.type for scale in cache._scales[0]] == ["meta", "meta"]
