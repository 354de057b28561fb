"""Decoders that embed texts (Qwen3-Embedding): vectors equal those of transformers bit for bit, and a directory of such
a model is distinguished from one that generates text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fp8serve.calibration.pipeline import calibrate_encoder
from fp8serve.cli import main
from fp8serve.engine.embedding import Embedder
from fp8serve.engine.engine import Engine
from fp8serve.engine.task import task_of
from fp8serve.errors import ModelError, RequestError
from fp8serve.fp8.ops import reference
from fp8serve.fp8.recipe import from_name
from fp8serve.model.building import hidden_states
from fp8serve.model.checkpoint import load_any_servable
from fp8serve.model.network import fusion, norms
from fp8serve.model.network.pooling import read_pooling
from tests.engine.tiny import write_model
from tests.model.encoders import ids_of, letters, pooled
from tests.model.oracle import SIZES, make_random

TEXTS = ["some text", "other words here", "a"]
Spelling = str  # variants of the directory: a class with a head, one without, and one whose head is missing in the file


def embedding(folder: Path, spelling: Spelling = "head", **config: Any) -> Path:
    tied = spelling != "left out"
    options = SIZES | {"head_dim": 32, "tie_word_embeddings": tied, **config}
    model = make_random("Qwen3", options, folder)
    if spelling != "head":
        model.model.save_pretrained(folder)  # `embed_tokens.weight`, and not `model.embed_tokens.weight`
    if spelling == "left out":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}))
    letters(folder)
    pooled(folder, "lasttoken", normalize=True, prompts={"query": "Query: "})
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding(tmp_path_factory.mktemp("decoder") / "m")


@torch.no_grad()
@pytest.mark.parametrize("spelling", ["head", "no head", "left out"])
def test_last_vectors_are_transformers_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: Spelling
) -> None:
    monkeypatch.setattr(norms, "rms_norm", reference.rms_norm)
    monkeypatch.setitem(fusion.GATED_ACTIVATIONS, "silu", reference.silu_mul)
    folder = embedding(tmp_path / "m", spelling)
    theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model = load_any_servable(folder, "bf16")
    pooling = read_pooling(folder)
    sequences = [ids_of(n, seed=n) for n in (1, 7, 33)]
    hidden = hidden_states(model, torch.cat(sequences), [1, 7, 33])
    for ids, ours in zip(sequences, pooling(hidden, [1, 7, 33]), strict=True):
        last = theirs(input_ids=ids[None], attention_mask=torch.ones(1, len(ids))).last_hidden_state[0, -1]
        assert torch.equal(ours, torch.nn.functional.normalize(last.float(), dim=0))


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "block", "current"])
def test_a_text_gets_the_same_bits_alone_and_in_a_batch(tiny: Path, recipe: str) -> None:
    embedder = Embedder(tiny, recipe=recipe, max_batch_tokens=32)
    texts = [ids_of(n, seed=n).tolist() for n in (1, 3, 24, 17, 3, 9, 20)]
    together = embedder.embed(texts)
    for text, vector in zip(texts, together.vectors, strict=True):
        assert torch.equal(embedder.embed([text]).vectors[0], vector)


@pytest.mark.parametrize("spelling", ["head", "left out"])
def test_a_calibrated_model_embeds_like_the_original(tmp_path: Path, spelling: Spelling) -> None:
    source, out = embedding(tmp_path / "m", spelling), tmp_path / "fp8"
    assert main(["calibrate", str(source), "--out", str(out), "--samples", "12", "--seq-len", "24"]) == 0
    quality = json.loads((out / "calibration.json").read_text())["quality"]
    assert 0.98 < quality["median"] < 1
    exact, served = Embedder(source, recipe="bf16"), Embedder(out)
    assert len(served.frozen) == 14
    cosines = (exact.embed(TEXTS).vectors * served.embed(TEXTS).vectors).sum(1)
    assert 0.97 < cosines.min() <= cosines.max() < 1


def test_gptq_and_a_target_are_of_decoders_too(tiny: Path, tmp_path: Path) -> None:
    options: Any = {"samples": 32, "seq_len": 24, "recipe": from_name("rowwise"), "rounding": "gptq"}
    plain = calibrate_encoder(tiny, out=tmp_path / "plain", **options)
    target = (1 + plain.quality.median) / 2
    report = calibrate_encoder(tiny, out=tmp_path / "fp8", target_cosine=target, **options)
    assert plain.quality.median < target <= report.quality.median
    assert 0 < len(report.layers) < len(plain.layers) == 14


def test_embedding_and_generating_directories_are_told_apart(tiny: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "writes")
    headless = embedding(tmp_path / "m", "left out")
    assert [task_of(f) for f in (tiny, tmp_path / "writes", headless)] == ["embed", "generate", "embed"]
    assert task_of(tiny, "generate") == "generate"
    for folder, task in ((headless, "generate"), (tmp_path / "writes", "embed"), (tiny, "classify")):
        with pytest.raises(ModelError, match=f"not {task}"):
            task_of(folder, task)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="is served to embed and not to write text"):
        Engine(tiny, recipe="bf16")
    assert Engine(tiny, recipe="bf16", task="generate").generate(["ab"], max_new_tokens=2)[0].token_ids
    with pytest.raises(ModelError, match=r"holds no modules\.json"):
        Embedder(tmp_path / "writes", recipe="bf16")


def test_options_of_an_embedder_are_checked(tiny: Path) -> None:
    with pytest.raises(RequestError, match="1 to 8"):
        Embedder(tiny, recipe="bf16", max_model_len=8).embed(["abcdefghijkl"])
    for option, value, words in (
        ("task", "generate", "loaded to embed"),
        ("speculative_tokens", 4, "does not generate tokens; leave speculative_tokens out"),
        ("draft_model", "small", "does not generate tokens; leave draft_model out"),
        ("head_dtype", "fp8", "no logits of tokens"),
        ("max_model_len", 10**6, "beyond the 256"),
    ):
        with pytest.raises(RequestError, match=words):
            Embedder(tiny, recipe="bf16", **{option: value})
