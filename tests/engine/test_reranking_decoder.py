"""Decoders that rerank: Qwen3-Reranker as published, and its conversion to a classification head with one label."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from fp8serve.calibration.pipeline import calibrate
from fp8serve.cli import main
from fp8serve.engine.classifying import QWEN3_TEMPLATE, Classifier
from fp8serve.engine.task import task_of
from fp8serve.errors import ModelError
from fp8serve.fp8.ops import reference
from fp8serve.model.checkpoint import load_trainable
from fp8serve.model.network import fusion, norms
from tests.model.encoders import letters, randomized
from tests.model.oracle import SIZES, make_random

PAIRS = [("query", "some text"), ("a", "b c"), ("other words", "x")]
OPTIONS = SIZES | {"head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True}


def words(folder: Path) -> None:
    """Writes a tokenizer without special tokens around a text, with tokens for yes and no."""
    letters(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw = json.loads(backend.to_str()) | {"post_processor": None}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))


def published(folder: Path, says: bool = True) -> Any:
    model = make_random("Qwen3", OPTIONS, folder)
    words(folder)
    kinds = {"": "Transformer", "1_LogitScore": "LogitScore"}
    rows = [{"path": path, "type": f"sentence_transformers.base.modules.{kind}"} for path, kind in kinds.items()]
    if says:
        (folder / "modules.json").write_text(json.dumps(rows))
        (folder / "1_LogitScore").mkdir()
        (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 30, "false_token_id": 31}')
    return model


def converted(folder: Path, labels: int = 1) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**OPTIONS, num_labels=labels, pad_token_id=2)
    kind = transformers.Qwen3ForSequenceClassification
    randomized(kind(config)).to(torch.bfloat16).save_pretrained(folder)
    words(folder)
    return kind.from_pretrained(folder, dtype=torch.bfloat16).eval()


def as_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "rms_norm", reference.rms_norm)
    monkeypatch.setitem(fusion.GATED_ACTIVATIONS, "silu", reference.silu_mul)


def prompt(pair: tuple[str, str]) -> str:
    return QWEN3_TEMPLATE[0] + pair[0] + QWEN3_TEMPLATE[1] + pair[1] + QWEN3_TEMPLATE[2]


@torch.no_grad()
def test_a_published_reranker_scores_yes_against_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_transformers(monkeypatch)
    theirs, classifier = published(tmp_path / "m"), Classifier(tmp_path / "m", recipe="bf16")
    tokenizer, result = classifier.encoder.tokenizer, classifier.classify(PAIRS)
    yes, no = tokenizer.added_ids["yes"], tokenizer.added_ids["no"]
    for i, pair in enumerate(PAIRS):
        logits = theirs(torch.tensor([tokenizer.encode(prompt(pair))])).logits[0, -1].float()
        assert torch.equal(result.logits[i], (logits[yes] - logits[no])[None])
        assert torch.allclose(result.scores[i], logits[[no, yes]].softmax(0)[1:])
        assert torch.equal(classifier.classify([pair]).logits[0], result.logits[i])


@torch.no_grad()
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classification_head_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: int
) -> None:
    as_transformers(monkeypatch)
    theirs, classifier = converted(tmp_path / "m", labels), Classifier(tmp_path / "m", recipe="bf16")
    texts = [prompt(pair) for pair in PAIRS]
    result = classifier.classify(PAIRS if labels == 1 else texts)
    for i, text in enumerate(texts):
        logits = theirs(torch.tensor([classifier.encoder.tokenizer.encode(text)])).logits[0].float()
        torch.testing.assert_close(
            result.logits[i], logits, rtol=0.01, atol=0.001
        )  # transformers applies its head to all tokens
        assert torch.equal(classifier.classify([text]).logits[0], result.logits[i])


@pytest.mark.parametrize("make", [published, converted])
def test_a_calibrated_model_ranks_like_the_original(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "m")
    arguments = ["--out", str(tmp_path / "fp8"), "--samples", "12", "--seq-len", "64", "--recipe", "rowwise"]
    assert main(["calibrate", str(tmp_path / "m"), *arguments]) == 0
    exact, served = Classifier(tmp_path / "m", recipe="bf16"), Classifier(tmp_path / "fp8")
    assert len(served.encoder.frozen) == 14
    assert 0 < (exact.classify(PAIRS).scores - served.classify(PAIRS).scores).abs().max() < 0.2


def test_reranking_and_generating_directories_are_told_apart(tmp_path: Path) -> None:
    published(tmp_path / "says")
    published(tmp_path / "silent", says=False)
    converted(tmp_path / "head")
    assert [task_of(tmp_path / name) for name in ("says", "silent", "head")] == ["classify", "generate", "classify"]
    assert task_of(tmp_path / "silent", "classify") == "classify"
    with pytest.raises(ModelError, match="can classify and not generate"):
        task_of(tmp_path / "head", "generate")
    with pytest.raises(ModelError, match="holds a classifier"):
        load_trainable(tmp_path / "head")
    with pytest.raises(ModelError, match="use calibrate_encoder"):
        calibrate(tmp_path / "head", out=tmp_path / "no", samples=8)
    path = tmp_path / "says" / "1_LogitScore" / "config.json"
    path.write_text('{"true_token_id": 30, "false_token_id": null}')
    with pytest.raises(ModelError, match="other tokens than yes and no"):
        Classifier(tmp_path / "says", recipe="bf16")
    letters(tmp_path / "silent")
    with pytest.raises(ModelError, match="adds tokens around a text"):
        Classifier(tmp_path / "silent", recipe="bf16")
