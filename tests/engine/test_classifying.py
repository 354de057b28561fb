"""Classifiers and cross-encoders: logits equal those of transformers bit for bit; the model's files decide how scores
are computed."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fp8serve.calibration.pipeline import calibrate_encoder
from fp8serve.engine.classifying import Classifier
from fp8serve.engine.embedding import Embedder
from fp8serve.errors import Fp8ServeError, ModelError, RequestError
from fp8serve.fp8.recipe import from_name
from fp8serve.model.formats.scales import _config_fields
from tests.model.encoders import BERT, FAMILIES, make

WITH_A_HEAD = transformers.AutoModelForSequenceClassification
PAIRS = [("some text", "other words"), ("a", "b c"), ("query", "some tent")]
TEXTS = ["sometext", "a", "otherwordshere"]  # without the unknown token, which has the id of padding


def headed(folder: Path, config: Any, labels: int, **fields: Any) -> Path:
    """Writes a classifier to `folder`, with `fields` added to its config.json, and returns the directory."""
    config = deepcopy(config)
    config.num_labels = labels
    make(folder, config, WITH_A_HEAD)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def theirs(folder: Path, texts: list[Any], classifier: Classifier) -> torch.Tensor:
    model = WITH_A_HEAD.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rows = []
    for text in texts:
        ids, segments = classifier.encoder.tokenizer.encode_pair(*((text, None) if isinstance(text, str) else text))
        with torch.no_grad():
            rows.append(model(torch.tensor([ids]), token_type_ids=torch.tensor([segments])).logits[0].float())
    return torch.stack(rows)


@pytest.mark.parametrize("config", [FAMILIES[0], *FAMILIES[2:]], ids=lambda c: c.model_type)
@pytest.mark.parametrize("labels", [1, 3])
def test_logits_are_transformers_bit_for_bit(tmp_path: Path, config: Any, labels: int) -> None:
    classifier = Classifier(headed(tmp_path / "m", config, labels), recipe="bf16")
    texts: list[Any] = PAIRS if classifier.encoder.model.config.type_vocab_size > 1 else TEXTS
    result = classifier.classify(texts)
    assert torch.equal(result.logits, theirs(tmp_path / "m", texts, classifier))
    assert torch.allclose(result.scores, result.logits.sigmoid() if labels == 1 else result.logits.softmax(1))
    for i, text in enumerate(texts):  # a text alone has the bits of a batch
        assert torch.equal(classifier.classify([text]).logits[0], result.logits[i])


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({}, "softmax"),
    ],
)
def test_the_files_decide_how_scores_are_computed(tmp_path: Path, fields: dict[str, Any], activation: str) -> None:
    classifier = Classifier(headed(tmp_path / "m", BERT, 3, **fields), recipe="bf16")
    assert classifier.head.activation == activation
    assert classifier.head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_calibrated_classifier_has_the_same_scores(tmp_path: Path, recipe: str) -> None:
    headed(tmp_path / "m", BERT, 3)
    calibrate_encoder(tmp_path / "m", out=tmp_path / "fp8", recipe=from_name(recipe), samples=12, seq_len=24)
    exact, quantized = Classifier(tmp_path / "m", recipe="bf16"), Classifier(tmp_path / "fp8")
    assert len(quantized.encoder.frozen) == 12
    assert (exact.classify(PAIRS).scores - quantized.classify(PAIRS).scores).abs().max() < 0.05


def test_directories_without_a_usable_classifier_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "plain", BERT)
    with pytest.raises(ModelError, match="BertModel, which has no labels"):
        Classifier(tmp_path / "plain", recipe="bf16")
    with pytest.raises(ModelError, match=r"no modules\.json"):
        Embedder(headed(tmp_path / "m", BERT, 1), recipe="bf16")
    classifier = Classifier(tmp_path / "m", recipe="bf16")
    for texts in ([], "text", ["a" * 60], [("a" * 30, "b" * 30)], ["\ud800"]):
        with pytest.raises(RequestError):
            classifier.classify(texts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="needs a segment number"):
        classifier.classify_ids([[5, 6]], [[0, 2]])
    path = tmp_path / "m" / "config.json"
    raw = json.loads(path.read_text())
    for fields in ({"id2label": {"1": "a"}}, {"id2label": []}, {"sentence_transformers": {"activation_fn": "x.Tanh"}}):
        path.write_text(json.dumps(raw | fields))
        with pytest.raises(Fp8ServeError):
            Classifier(tmp_path / "m", recipe="bf16")


def test_old_scales_of_an_encoder_without_a_head_still_fit(tmp_path: Path) -> None:
    """The scales were written by a version that did not know heads."""
    make(tmp_path / "plain", BERT)
    assert "head" not in _config_fields(tmp_path / "plain")
    assert _config_fields(headed(tmp_path / "m", BERT, 1))["head"]["labels"] == ("LABEL_0",)
