from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8serve.calibration import generated
from fp8serve.calibration.generated import TOO_LARGE, _Cache, continued
from fp8serve.calibration.pipeline import calibrate
from fp8serve.calibration.result import CalibrationReport
from fp8serve.model.checkpoint import load_servable

SMALL = {"samples": 8, "seq_len": 48}
PROMPTS = [
    [5, 9, 300, 17, 4],
    [44],
    [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116],
]


def test_the_likeliest_tokens_are_those_of_transformers(model_dir: Path) -> None:
    ours = continued(load_servable(model_dir, "bf16"), PROMPTS, tokens=20)
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    for prompt, found in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt + found])
        logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert torch.all(chosen >= logits.max(-1).values - 0.1)  # BF16 has ties that two libraries break differently


def test_prompts_do_not_know_each_other(model_dir: Path) -> None:
    model = load_servable(model_dir, "bf16")
    alone = [continued(model, [prompt], tokens=12)[0] for prompt in PROMPTS]
    assert sum(a == b for a, b in zip(continued(model, PROMPTS, tokens=12), alone, strict=True)) >= 2


def test_a_continuation_ends_with_the_context(model_dir: Path) -> None:
    model = load_servable(model_dir, "bf16")
    model.config = replace(model.config, max_position_embeddings=20)
    assert [len(ids) for ids in continued(model, PROMPTS)] == [3, 3, 3]


@pytest.mark.parametrize("kv_cache", [False, True])
def test_the_report_has_both_texts(model_dir: Path, tmp_path: Path, kv_cache: bool) -> None:
    report = calibrate(model_dir, out=tmp_path / "out", kv_cache=kv_cache, generated_samples=1, **SMALL)  # type: ignore[arg-type]
    (sample,) = report.generated
    assert sample.prompt
    assert sample.before
    assert 0 <= sample.same_tokens <= sample.tokens == 48
    assert report.seconds["generate"] > 0
    assert CalibrationReport.from_json((tmp_path / "out" / "calibration.json").read_text()) == report


def test_none_are_generated_where_none_are_wanted_or_the_model_is_too_large(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = calibrate(model_dir, out=tmp_path / "none", generated_samples=0, **SMALL)  # type: ignore[arg-type]
    assert (report.generated, report.notes) == ((), ())
    monkeypatch.setattr(generated, "free_memory", lambda: 1000)
    report = calibrate(model_dir, out=tmp_path / "large", **SMALL)  # type: ignore[arg-type]
    assert (report.generated, report.notes) == ((), (TOO_LARGE,))


def test_the_scales_of_a_cache_lie_where_it_lies(model_dir: Path) -> None:
    """They are read on the CPU, and a GPU's kernels refuse them there."""
    one, decoder = torch.ones(()), load_servable(model_dir, "bf16")
    cache = _Cache(decoder, [4], torch.device("meta"), {0: (one, one)})
    assert [scale.device.type for scale in cache._scales[0]] == ["meta", "meta"]
