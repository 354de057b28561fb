"""A model of each family, divided among ranks, computes the bits of one process, with each kind of weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from fp8serve.engine.loading import prepare_for_serving
from fp8serve.errors import ModelError
from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.recipe import from_name
from fp8serve.fp8.sharded import Shard
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.config.decoder import read_config
from fp8serve.model.network.decoder import Decoder, make_attend
from fp8serve.model.network.sharding import shard_config, shard_decoder
from tests.fp8.distributed.ranks import on_ranks

from .oracle import IDS, make_model

KINDS = ["llama-tied", "llama-bias", "gemma2", "granite", "mixtral", "qwen2-moe", "qwen3-moe-sparse", "gpt-oss",
         "deepseek-v2", "deepseek-v3", "glm4-moe", "phimoe", "apertus", "phi3", "glm", "cohere-qk-norm",
         "stablelm-parallel"]  # fmt: skip
RECIPES = ["current", "rowwise", "block", "w8a16", "mxfp8", "mxfp4-w4a16", "nvfp4-w4a16", "nvfp4", "bf16"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("families")
    for kind in KINDS:
        make_model(kind, folder / kind)
    return [folder / kind for kind in KINDS]


def logits(path: Path, recipe: str, shard: Shard | None = None) -> Tensor:
    """Returns the logits of a prompt, all of them and those of two rows, by the model or by a rank's part of it."""
    head = "fp8" if recipe == "rowwise" else "bf16"
    model = cast(Decoder, load_servable(path, from_name(recipe) or "bf16", head=head))
    if shard is not None:
        shard_config(model.config, shard.size)
        shard_decoder(model, shard)
    prepare_for_serving(model, "cpu")
    ids, positions, none = torch.tensor(IDS), torch.arange(len(IDS)), torch.zeros(0, dtype=torch.long)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, [len(q)], *model.attention_options(layer))

    with torch.inference_mode():
        results = [model.logits(model(ids, positions, make_attend(attention), rows)) for rows in (None, ids[:2], none)]
    return torch.cat(results)


def rank_logits(rank: int, size: int, cases: Sequence[tuple[Path, str]]) -> list[Tensor]:
    return [logits(path, recipe, Shard(rank, size)) for path, recipe in cases]


def assert_same_bits(size: int, cases: Sequence[tuple[Path, str]]) -> None:
    expected = [logits(path, recipe) for path, recipe in cases]
    for results in on_ranks(size, rank_logits, size, cases):
        for (path, recipe), result, one in zip(cases, results, expected, strict=True):
            assert torch.equal(result, one), f"{path.name} {recipe}"


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_every_family_computes_the_bits_of_one_process(recipe: str, models: list[Path]) -> None:
    assert_same_bits(2, [(path, recipe) for path in models])


@pytest.mark.distributed
def test_every_recipe_computes_the_bits_of_one_process_on_four_ranks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4, "vocab_size": 322}
    make_model("llama", tmp_path / "llama", overrides=sizes)
    make_model("mixtral", tmp_path / "mixtral", overrides=sizes)
    assert_same_bits(4, [(tmp_path / kind, recipe) for kind in ("llama", "mixtral") for recipe in RECIPES])


def divide_blocks(rank: int, path: Path) -> str:
    with pytest.raises(ModelError) as error:
        logits(path, "block", Shard(rank, 2))
    return str(error.value)


@pytest.mark.distributed
def test_blocks_of_scales_are_not_divided(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "llama", overrides={"intermediate_size": 384})
    for message in on_ranks(2, divide_blocks, tmp_path / "llama"):
        assert "a rank would get a part of a block; use a smaller tensor_parallel" in message


def test_the_configuration_of_a_rank_has_its_heads(models: list[Path]) -> None:
    for path in models:
        config = read_config(path)
        divided = shard_config(config, 2)
        shares = 1 if config.latent else 2
        assert (divided.num_heads * 2, divided.num_kv_heads * shares) == (config.num_heads, config.num_kv_heads)
