"""The effect of FP8 on an encoder: on its vectors, its scores, and the texts found with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.calibration.data import load_samples
from fp8serve.calibration.embedding import CosineSummary, Ranking, candidate_indices, split_texts
from fp8serve.calibration.evaluate import evaluate_encoder
from fp8serve.calibration.pipeline import calibrate_encoder
from fp8serve.cli import main
from fp8serve.engine.classifying import Classifier
from fp8serve.engine.embedding import Embedder
from fp8serve.errors import ModelError, RecipeError
from fp8serve.fp8.recipe import from_name
from fp8serve.model.text.tokenizer import Tokenizer
from tests.engine.test_classifying import headed
from tests.model.encoders import BERT, letters, make, pooled

SAMPLES: Any = {"samples": 12, "seq_len": 24}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An embedding model, and the same model in FP8."""
    folder = tmp_path_factory.mktemp("tiny")
    make(folder / "m", BERT)
    pooled(folder / "m", "mean_tokens", normalize=True, max_length=20)
    calibrate_encoder(folder / "m", out=folder / "fp8", **SAMPLES)
    return folder / "m", folder / "fp8"


def test_vectors_of_the_engine_are_compared(tiny: tuple[Path, Path]) -> None:
    exact, fp8 = tiny
    report = evaluate_encoder(fp8, against=exact, **SAMPLES)
    samples = load_samples(None, Tokenizer.from_dir(exact), 96, count=12, seq_len=20, seed=0)
    ids = [list(sample.ids) for sample in samples]
    one, other = (Embedder(folder, recipe=recipe).embed(ids) for folder, recipe in ((exact, "bf16"), (fp8, "stored")))
    expected = CosineSummary.of(one.vectors, other.vectors)  # whose BF16 products are ours, and sum in another order
    assert report.cosine is not None
    for name in ("median", "percentile_5", "minimum", "mean"):
        assert 1 - getattr(report.cosine, name) == pytest.approx(1 - getattr(expected, name), rel=0.05)
    assert report.cosine.minimum <= report.cosine.percentile_5 <= report.cosine.median < 1
    assert len(report.layers) == 12
    assert report.notes[0] == "Texts were cut to 20 tokens, the limit of the model."
    same = evaluate_encoder(exact, against=exact, recipe="bf16", **SAMPLES)
    assert same.cosine is not None
    assert same.cosine.minimum == pytest.approx(1)
    assert same.ranking is not None
    assert (same.ranking.same_top1, same.ranking.top_k_overlap) == (1, 1)
    assert same.ranking.top1_accuracy == same.ranking.reference_top1_accuracy


def test_without_a_reference_there_is_only_what_is_found(tiny: tuple[Path, Path]) -> None:
    report = evaluate_encoder(tiny[1], **SAMPLES)
    assert (report.cosine, report.scores, report.layers) == (None, None, ())
    assert report.ranking is not None
    assert report.ranking.queries == report.ranking.candidates == 12
    assert 0 <= report.ranking.top1_accuracy <= 1
    assert report.ranking.same_top1 is None
    assert evaluate_encoder(tiny[1], samples=1, seq_len=24).ranking is None


@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_compared(tmp_path: Path, labels: int) -> None:
    exact = headed(tmp_path / "m", BERT, labels)
    calibrate_encoder(exact, out=tmp_path / "fp8", recipe=from_name("rowwise"), **SAMPLES)
    report = evaluate_encoder(tmp_path / "fp8", against=exact, **SAMPLES)
    ids = [list(s.ids) for s in load_samples(None, Tokenizer.from_dir(exact), 96, count=12, seq_len=24, seed=0)]
    segments = [[0] * len(row) for row in ids]
    one, other = (
        Classifier(folder, recipe=recipe).classify_ids(ids, segments).scores.double()
        for folder, recipe in ((exact, "bf16"), (tmp_path / "fp8", "stored"))
    )
    assert report.scores is not None
    assert report.scores.mean == pytest.approx(float((one - other).abs().mean()), rel=0.1)
    assert report.scores.maximum == pytest.approx(float((one - other).abs().max()), rel=0.2)
    assert report.scores.mean > 0
    if labels == 1:
        assert report.scores.same_label is None
        assert report.ranking is not None
        assert (report.ranking.queries, report.ranking.candidates) == (12, 10)
    else:
        same = float((one.argmax(1) == other.argmax(1)).double().mean())
        assert report.scores.same_label == pytest.approx(same, abs=1.5 / 12)
        assert report.ranking is None
    with pytest.raises(RecipeError, match="name it with --against"):
        evaluate_encoder(tmp_path / "fp8", **SAMPLES)


def test_unrelated_models_are_refused(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    make(tmp_path / "other", type(BERT)(**(BERT.to_dict() | {"num_hidden_layers": 3})))
    pooled(tmp_path / "other", "mean_tokens", normalize=True)
    with pytest.raises(ModelError, match="num_layers is 2 in one and 3 in the other"):
        evaluate_encoder(tiny[1], against=tmp_path / "other", **SAMPLES)


def test_ranking_figures_equal_a_manual_computation() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    other = torch.tensor([[3.0, 1.0, 2.0], [1.0, 3.0, 2.0], [3.0, 2.0, 1.0]])
    ranking = Ranking.of(scores, torch.arange(3), other)
    assert (ranking.top1_accuracy, ranking.reference_top1_accuracy) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (ranking.same_top1, ranking.top_k_overlap) == (pytest.approx(1 / 3), 1)
    many = torch.arange(40.0)[None]
    shifted = torch.cat([many[:, 5:], many[:, :5]], 1)  # five of the first ten are in both
    assert Ranking.of(many, torch.tensor([0]), shifted).top_k_overlap == pytest.approx(0.5)
    assert candidate_indices(3).tolist() == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert candidate_indices(40).shape == (40, 10)


def test_split_texts_divides_a_text_into_halves(tmp_path: Path) -> None:
    letters(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    rows = [tokenizer.encode(text) for text in ("abcdefg", "abc", "")]
    assert [("".join(a.split()), "".join(b.split())) for a, b in split_texts(rows, tokenizer)] == [("abc", "defg")]


def test_the_command_prints_json_and_writes_a_page(
    tiny: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    arguments = ["eval", str(tiny[1]), "--against", str(tiny[0]), "--samples", "6", "--seq-len", "16"]
    assert main([*arguments, "--json", "--report", str(page)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cosine"]["texts"] == 6
    assert report["against"] == str(tiny[0])
    assert f"{report['cosine']['percentile_5']:.5f}" in page.read_text()
    assert "encoder.layer.1.output.dense" in page.read_text()
    assert "fp8serve eval" in page.read_text()
    assert main(arguments) == 0
    assert "retrieval top-1" in capsys.readouterr().out
