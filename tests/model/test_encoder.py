"""Encoders: hidden states equal those of transformers; the vector of a text does not depend on the rest of the
batch."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from fp8serve.engine.embedding import Embedder
from fp8serve.errors import ModelError, RequestError
from fp8serve.model.checkpoint import load_any_servable, open_checkpoint
from fp8serve.model.network.encoder import gelu
from fp8serve.model.network.pooling import Pooling, read_pooling
from tests.model.encoders import BERT, FAMILIES, MODERN, ids_of, make, pooled, randomized


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", [*FAMILIES, MODERN], ids=lambda c: f"{c.model_type}-{c.to_dict().get('hidden_act')}")
@torch.no_grad()
def test_hidden_states_are_transformers_bit_for_bit(
    tmp_path: Path, config: transformers.PretrainedConfig, dtype: torch.dtype
) -> None:
    make(tmp_path / "m", config)
    ours = load_any_servable(tmp_path / "m", "bf16", dtype=dtype)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "m", dtype=dtype).eval()
    for length in (1, 7, 30):
        ids = ids_of(length)
        expected = theirs(input_ids=ids[None], attention_mask=torch.ones(1, length)).last_hidden_state[0]
        assert torch.equal(ours(ids, [length]), expected)


@torch.no_grad()
def test_the_second_text_of_a_pair_has_its_own_segment(tmp_path: Path) -> None:
    make(tmp_path / "m", BERT)
    ids, segments = ids_of(9), torch.tensor([0] * 5 + [1] * 4)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "m", dtype=torch.bfloat16).eval()
    expected = theirs(input_ids=ids[None], token_type_ids=segments[None]).last_hidden_state[0]
    actual = load_any_servable(tmp_path / "m", "bf16")(ids, [9], segments)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, load_any_servable(tmp_path / "m", "bf16")(ids, [9]))


def test_a_file_that_was_saved_with_a_head_is_the_same_model(tmp_path: Path) -> None:
    model = randomized(transformers.BertForMaskedLM(BERT))
    model.save_pretrained(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    name = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(open_checkpoint(tmp_path / "head")[name], model.bert.state_dict()[name])


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gelu_does_not_depend_on_the_position_in_a_tensor(kind: str) -> None:
    x = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = gelu(x, kind)  # type: ignore[arg-type]
    alone = [gelu(x[:, i : i + 1], kind) for i in range(1000)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(alone, 1), whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_attention_heads": 3}, "not a multiple"),
        ({"layer_norm_eps": 0}, "layer_norm_eps"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"alibi": True}, "alibi"),
    ],
)
def test_unsupported_configurations_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    make(tmp_path / "m", BERT)
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=words):
        load_any_servable(tmp_path / "m", "bf16")


@torch.no_grad()
def test_the_published_layout_of_modernbert_is_read(tmp_path: Path) -> None:
    """It has a pretraining head, and the key names of transformers 4."""
    model = randomized(transformers.ModernBertForMaskedLM(MODERN)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    raw = json.loads(path.read_text()) | {"norm_eps": 1e-4}
    kinds = raw.pop("layer_types"), raw.pop("rope_parameters")
    assert kinds[0] == ["full_attention", *["sliding_attention"] * 2, "full_attention"]
    old = {"global_rope_theta": 5e4, "local_rope_theta": 2e3, "global_attn_every_n_layers": 2}
    path.write_text(json.dumps(raw | old | {"local_attention": 6}))
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "m", dtype=torch.bfloat16).eval()
    ids = ids_of(30)
    expected = theirs(input_ids=ids[None], attention_mask=torch.ones(1, 30)).last_hidden_state[0]
    assert torch.equal(load_any_servable(tmp_path / "m", "bf16")(ids, [30]), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"norm_bias": True},
        {"attention_bias": True},
        {"hidden_activation": "relu"},
        {"layer_types": ["full_attention"]},
        {"local_attention": 0},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}},
        {"rope_parameters": [1]},
        {"architectures": ["ModernBertForSequenceClassification"]},
    ],
)
def test_unsupported_modernbert_configurations_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    make(tmp_path / "m", MODERN)
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=f"{next(iter(change))}|architecture"):
        load_any_servable(tmp_path / "m", "bf16")


def test_an_encoder_is_no_language_model(tmp_path: Path) -> None:
    make(tmp_path / "m", BERT)
    with pytest.raises(ModelError, match="an encoder, which cannot generate text"):
        _ = open_checkpoint(tmp_path / "m").config


# -- pooling -----------------------------------------------------------------------------------------------------------


def test_pooling_equals_a_manual_computation() -> None:
    hidden = torch.tensor([[1.0, 3.0], [3.0, 5.0], [4.0, 3.0]])
    assert Pooling("mean", normalized=False)(hidden, [2, 1]).tolist() == [[2, 4], [4, 3]]
    assert Pooling("cls", normalized=False)(hidden, [2, 1]).tolist() == [[1, 3], [4, 3]]
    assert Pooling("lasttoken", normalized=False)(hidden, [2, 1]).tolist() == [[3, 5], [4, 3]]
    unit = Pooling("lasttoken", normalized=True)
    assert torch.allclose(unit(hidden, [2, 1])[1], torch.tensor([0.8, 0.6]))
    assert unit(hidden, [2, 1], 1).tolist() == [[1], [1]]  # truncated vectors are normalized again


def test_pooling_is_read_from_the_files(tmp_path: Path) -> None:
    pooled(tmp_path, "lasttoken", normalize=True, max_length=20, prompts={"query": "Query: "}, default="query")
    pooling = read_pooling(tmp_path)
    assert pooling == Pooling("lasttoken", True, 20, {"query": "Query: "}, "query")
    assert pooling.prompt(None) == "Query: "
    with pytest.raises(RequestError, match="no prompt of the name 'document'; it has query"):
        pooling.prompt("document")


def test_missing_or_unsupported_pooling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no modules\.json"):
        read_pooling(tmp_path)
    pooled(tmp_path, "max_tokens")
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"):
        read_pooling(tmp_path)
    for text in ("{}", "[", '[{"type": "a.Transformer", "path": ""}]', "[1]"):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(ModelError, match=r"modules\.json"):
            read_pooling(tmp_path)


# -- the embedder ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "m"
    make(folder, BERT)
    pooled(folder, "mean_tokens", normalize=True, max_length=24, prompts={"query": "abc "})
    return folder


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "block", "current"])
def test_a_text_gets_the_same_bits_alone_and_in_a_batch(tiny: Path, recipe: str) -> None:
    embedder = Embedder(tiny, recipe=recipe, max_batch_tokens=32)
    texts = [ids_of(n, seed=n).tolist() for n in (1, 3, 24, 17, 3, 9, 20)]
    together = embedder.embed(texts)
    assert together.tokens == [1, 3, 24, 17, 3, 9, 20]
    for text, vector in zip(texts, together.vectors, strict=True):
        assert torch.equal(embedder.embed([text]).vectors[0], vector)


def test_texts_prompts_dimensions_and_truncation(tiny: Path) -> None:
    embedder = Embedder(tiny, recipe="bf16")
    plain, prompted = embedder.embed(["a b"]), embedder.embed(["a b"], prompt_name="query")
    assert prompted.tokens[0] > plain.tokens[0]
    assert torch.allclose(plain.vectors.norm(dim=1), torch.ones(1))
    short = embedder.embed(["a b"], dimensions=8).vectors
    assert short.shape == (1, 8)
    assert torch.allclose(short, torch.nn.functional.normalize(plain.vectors[:, :8], dim=1))
    ids = embedder.tokenizer.encode("a " * 40)
    cut = embedder.embed(["a " * 40], truncate=True)
    assert torch.equal(cut.vectors, embedder.embed([ids[:23] + ids[-1:]]).vectors)


def test_what_cannot_be_embedded_is_refused(tiny: Path) -> None:
    embedder = Embedder(tiny, recipe="bf16")
    for texts, options, words in [
        ("text", {}, "put the text in a list"),
        ([], {}, "one or more texts"),
        ([[]], {}, "0 tokens"),
        (["a " * 40], {}, "reads texts of 1 to 24"),
        ([[10**6]], {}, "outside the vocabulary"),
        ([[-1]], {}, "outside the vocabulary"),
        (["a"], {"dimensions": 65}, "1 to 64"),
        (["a"], {"prompt_name": "x"}, "no prompt"),
    ]:
        with pytest.raises(RequestError, match=words):
            embedder.embed(texts, **options)  # type: ignore[arg-type]
