"""Greedy tokens equal those of transformers: exactly for a model that has memorized a text, up to BF16 rounding for
random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8serve.engine.engine import Engine
from fp8serve.fp8.recipe import DelayedScaling

from .tiny import ARCHITECTURES, write_model, write_scales

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
NEW = 32


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 12},
    "qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",  # test_experts.py has mixtures, and tests/compatibility every architecture with random weights
    [pytest.param("llama", marks=pytest.mark.smoke), "gemma2", "smollm3"],
)
def test_greedy_tokens_equal_transformers(model_type: str, tmp_path: Path) -> None:
    oracle = learn(AutoModelForCausalLM.from_pretrained(write_model(tmp_path, model_type), dtype=torch.float32))
    oracle.to(torch.bfloat16).save_pretrained(tmp_path)
    prompts = [list(TEXT[at : at + size]) for at, size in ((0, 8), (30, 40), (60, 17))]
    engine = Engine(tmp_path, recipe="bf16", max_batch_tokens=24, max_prefill_tokens=8)
    for prompt, completion in zip(prompts, engine.generate(prompts, temperature=0.0, max_new_tokens=NEW), strict=True):
        expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert bytes(completion.token_ids) in TEXT * 2


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WINDOWS)
def test_windowed_models_with_cached_prefixes_and_with_an_fp8_cache(model_type: str, tmp_path: Path) -> None:
    """Prompts and answers are longer than the window; the second and third prompt find the first one's blocks."""
    directory = write_model(tmp_path, model_type, **WINDOWS[model_type])
    oracle = learn(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)).to(torch.bfloat16)
    oracle.save_pretrained(tmp_path)
    sizes = {"max_batch_tokens": 24, "max_prefill_tokens": 8}
    fp8 = {"scales": write_scales(tmp_path, tmp_path / "made-up", kv=True), "kv_cache_dtype": "fp8"}
    plain, quantized = (
        Engine(tmp_path, recipe="bf16", **sizes),
        Engine(tmp_path, recipe=DelayedScaling(), **fp8, **sizes),
    )
    for prompt in ([*TEXT[:48]], [*TEXT[:60]], [*TEXT[:48]]):
        expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert greedy(plain, prompt) == expected[0, len(prompt) :].tolist()
        tokens = greedy(quantized, prompt)
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert ((logits.amax(-1) - chosen) < 0.5 * logits.std(-1)).all()
    for engine in (plain, quantized):
        assert engine.stats()["prefix_hit_tokens_total"] >= 2 * 32


def greedy(engine: Engine, prompt: list[int]) -> list[int]:
    return [*engine.generate([prompt], temperature=0.0, max_new_tokens=NEW)[0].token_ids]


def learn(oracle: Any) -> Any:
    """Trains `oracle` until it has memorized TEXT, so that its best logit exceeds the second by more than rounding."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=3e-3)
    text = torch.tensor(list(TEXT * 3))
    for _ in range(100):
        starts = torch.randint(0, len(TEXT), (8,)).tolist()
        batch = torch.stack([text[at : at + 80] for at in starts])
        oracle(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return oracle.eval()


# If two experts have nearly equal logits, BF16 and FP32 choose different ones: more than a rounding error.
DENSE = [kind for kind, options in ARCHITECTURES.items() if "num_experts_per_tok" not in options]


@pytest.mark.parametrize(("model_type", "windows"), [*((kind, {}) for kind in DENSE), *WINDOWS.items()], ids=str)
def test_tokens_of_a_random_model_are_transformers_best_to_rounding(
    model_type: str, windows: dict[str, Any], tmp_path: Path
) -> None:
    """Random weights give near ties, of which either token is right; every generated token must be one of them."""
    directory = write_model(tmp_path, model_type, **windows)
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = Engine(tmp_path, recipe="bf16", max_batch_tokens=24, max_prefill_tokens=8)
    prompts = [[256, *b"a"], list(range(2, 60))]
    completions = engine.generate(prompts, temperature=0.0, max_new_tokens=NEW, logprobs=0)
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (
            (logits.amax(-1) - chosen) < 0.15 * logits.std(-1)
        ).all()  # BF16 changes each of two logits by up to 0.07
        logprobs = torch.tensor([item.logprob for item in completion.logprobs or ()])
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.allclose(logprobs, expected, atol=0.2)  # transformers' own BF16 logits differ by up to 0.15
