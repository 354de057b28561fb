import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8serve.calibration.data import load_samples
from fp8serve.calibration.evaluate import evaluate
from fp8serve.calibration.pipeline import calibrate
from fp8serve.cli import main
from fp8serve.errors import Fp8ServeError, ModelError, RecipeError
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.text.tokenizer import Tokenizer

from .conftest import VOCAB, write_model

SMALL = {"samples": 6, "seq_len": 40, "batch_size": 4}


@pytest.fixture(scope="module")
def fp8_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "fp8"
    calibrate(model_dir, out=out, recipe=DelayedScaling(amax_history_len=8), samples=12, seq_len=40)
    return out


@torch.no_grad()
def test_perplexity_is_that_of_transformers(model_dir: Path) -> None:
    report = evaluate(model_dir, recipe="bf16", **SMALL)  # type: ignore[arg-type]
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    nll, tokens = 0.0, 0
    for sample in load_samples(None, Tokenizer.from_dir(model_dir), VOCAB, count=6, seq_len=40, seed=0):
        ids = torch.tensor([sample.ids])
        logits = reference(ids).logits[0, :-1].float()
        nll += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += len(sample.ids) - 1
    assert report.quality.tokens == tokens
    assert report.quality.perplexity == pytest.approx(math.exp(nll / tokens), rel=2e-3)
    assert report.quality.kl_divergence is None
    assert report.layers == ()


def test_fp8_against_its_source(model_dir: Path, fp8_dir: Path) -> None:
    report = evaluate(fp8_dir, None, model_dir, **SMALL)  # type: ignore[arg-type]
    assert report.recipe == "stored"
    assert report.quality.reference_perplexity == evaluate(model_dir, recipe="bf16", **SMALL).quality.perplexity  # type: ignore[arg-type]
    assert report.quality.kl_divergence is not None
    assert 0 < report.quality.kl_divergence < 0.5
    assert report.quality.top1_agreement is not None
    assert 0.4 < report.quality.top1_agreement <= 1
    assert len(report.layers) == 14
    for layer in report.layers:
        assert layer.sqnr_db is not None
        assert 22 < layer.sqnr_db < 40, layer


def test_a_model_against_itself_is_exact(model_dir: Path) -> None:
    report = evaluate(model_dir, None, model_dir, recipe="bf16", **SMALL)  # type: ignore[arg-type]
    assert report.quality.perplexity == report.quality.reference_perplexity
    assert report.quality.kl_divergence == 0
    assert report.quality.top1_agreement == 1


def test_a_head_in_fp8_is_measured(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--samples", "6", "--seq-len", "40", "--recipe", "bf16", "--against", str(model_dir), "--head-dtype", "fp8"]
    assert main(["eval", str(model_dir), *args, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["quality"]["kl_divergence"] < 0.1
    assert (report["head_dtype"], report["layers"]) == ("fp8", [])
    assert main(["eval", str(model_dir), *args]) == 0
    assert "(bf16, head in FP8)" in capsys.readouterr().out


def test_recipes_and_scales_of_the_caller_are_used(model_dir: Path, fp8_dir: Path) -> None:
    rowwise = evaluate(model_dir, None, model_dir, recipe=from_name("rowwise"), **SMALL)  # type: ignore[arg-type]
    assert rowwise.recipe == "rowwise"
    scales = fp8_dir / "scales.safetensors"
    with_file = evaluate(model_dir, scales=scales, **SMALL)  # type: ignore[arg-type]
    own = evaluate(fp8_dir, **SMALL)  # type: ignore[arg-type]
    assert with_file.quality.perplexity == pytest.approx(own.quality.perplexity, rel=1e-3)


@pytest.mark.parametrize("name", ["current", "rowwise", "block", "w8a16", "nvfp4-w4a16"])
def test_the_command_takes_every_recipe_that_needs_no_scales(
    name: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--samples", "2", "--seq-len", "16", "--json"]
    assert main(["eval", str(model_dir), "--recipe", name, "--against", str(model_dir), *few]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == name
    assert 0 < report["quality"]["kl_divergence"] < 0.5


def test_an_unknown_recipe_is_refused(model_dir: Path) -> None:
    with pytest.raises(RecipeError, match="There is no recipe 'rowwize'; choose one of"):
        evaluate(model_dir, recipe="rowwize", **SMALL)  # type: ignore[arg-type]


def test_unrelated_models_are_refused(fp8_dir: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(ModelError, match="num_layers is 2 in one and 3 in the other"):
        evaluate(fp8_dir, None, other, **SMALL)  # type: ignore[arg-type]
    with pytest.raises(Fp8ServeError, match="does not exist"):
        evaluate(fp8_dir, None, tmp_path / "nowhere", **SMALL)  # type: ignore[arg-type]
