"""A model of each family, divided among ranks, computes what one process does, with each kind of weights: with
`invariant` the same bits, and otherwise the same numbers up to the rounding of sums."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from fp8serve.engine.loading import prepare_for_serving
from fp8serve.errors import ModelError
from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.elementwise import silu_mul
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import from_name
from fp8serve.fp8.sharded import TWO_STEPS, ReducedFrozenLinear, ReducedLinear, Shard, keep_columns
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.sharding import shard_config
from fp8serve.model.network.decoder import Decoder, make_attend
from fp8serve.model.network.sharding import ReducedMixture, shard_decoder
from tests.fp8.distributed.ranks import on_ranks

from .oracle import IDS, MODELS, make_model

KINDS = ["llama-tied", "llama-bias", "gemma2", "granite", "mixtral", "qwen2-moe", "qwen3-moe-sparse", "gpt-oss",
         "deepseek-v2", "deepseek-v3", "glm4-moe", "phimoe", "apertus", "phi3", "glm", "cohere-qk-norm",
         "stablelm-parallel"]  # fmt: skip
UNQUANTIZED = ("bf16", "w8a16", "mxfp4-w4a16", "nvfp4-w4a16")  # recipes that leave inputs in BF16
DIVISIBLE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128, "v_head_dim": 16}
"""Sizes of which two ranks get multiples of 16."""
RECIPES = ["current", "rowwise", "block", "w8a16", "mxfp8", "mxfp4-w4a16", "nvfp4-w4a16", "nvfp4", "bf16"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("families")
    for kind in KINDS:
        make_model(kind, folder / kind, overrides={k: v for k, v in DIVISIBLE.items() if k in MODELS[kind][1]})
    return [folder / kind for kind in KINDS]


def load(path: Path, recipe: str, shard: Shard | None, invariant: bool) -> Decoder:
    """Returns a model, or a rank's part of it."""
    head = "fp8" if recipe == "rowwise" else "bf16"
    model = cast(Decoder, load_servable(path, from_name(recipe) or "bf16", head=head))
    if shard is not None:
        shard_config(model.config, shard.size)
        shard_decoder(model, shard, invariant=invariant)
    prepare_for_serving(model, "cpu")
    return model


def logits(path: Path, recipe: str, shard: Shard | None = None, invariant: bool = True) -> Tensor:
    """Returns the logits of a prompt, all of them and those of two rows, by the model or by a rank's part of it."""
    return compute(load(path, recipe, shard, invariant))


def compute(model: Decoder) -> Tensor:
    """Returns the logits of a prompt, all of them and those of two rows."""
    ids, positions, none = torch.tensor(IDS), torch.arange(len(IDS)), torch.zeros(0, dtype=torch.long)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, [len(q)], *model.attention_options(layer))

    with torch.inference_mode():
        results = [model.logits(model(ids, positions, make_attend(attention), rows)) for rows in (None, ids[:2], none)]
    return torch.cat(results)


def rank_logits(rank: int, size: int, cases: Sequence[tuple[Path, str]], invariant: bool = True) -> list[Tensor]:
    return [logits(path, recipe, Shard(rank, size), invariant) for path, recipe in cases]


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


def assert_close(size: int, cases: Sequence[tuple[Path, str]]) -> None:
    """Compares reduced layers with one process. All ranks, and a second run of some cases, must have the same bits.

    Roundings of one process move its logits away from those in FP32. Reduced layers round as often and in other places,
    so their distance from FP32 is about the same, and their distance from one process is at most the sum of both. The
    roundings of inputs count where the recipe casts them: a BF16 value that differs in its last bit may be cast to
    another FP8 value. The typical row is compared, because a row with other experts may differ more.
    """
    expected = [logits(path, recipe) for path, recipe in cases]
    first, *others = on_ranks(size, rank_logits, size, cases, False)
    for results in others:
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
    for again, result in zip(on_ranks(size, rank_logits, size, cases[::6], False)[0], first[::6], strict=True):
        assert torch.equal(again, result)
    for (path, recipe), result, one in zip(cases, first, expected, strict=True):
        rounded = logits(path, "bf16") if recipe in UNQUANTIZED else one
        exact = compute(cast(Decoder, load_servable(path, "bf16").float()))
        error, noise = distance(result, one), distance(rounded, exact)
        assert error < 2 * noise, f"{path.name} {recipe}: {error:.4f}, {noise:.4f}"


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Returns the distance between two rows, relative to b's, of the typical row."""
    return ((a - b).norm(dim=1) / b.norm(dim=1)).median()


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_sums_over_ranks_of_every_family_are_close_to_one_process(recipe: str, models: list[Path]) -> None:
    assert_close(2, [(path, recipe) for path in models])


@pytest.mark.distributed
def test_sums_over_four_ranks_are_close_to_one_process_with_every_recipe(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4, "vocab_size": 322}
    for kind in ("llama", "mixtral"):
        make_model(kind, tmp_path / kind, overrides=sizes)
    assert_close(4, [(tmp_path / kind, recipe) for kind in ("llama", "mixtral") for recipe in RECIPES])


def reduced_layers(rank: int, cases: Sequence[tuple[Path, str]]) -> list[tuple[int, int]]:
    """Returns how many layers the models have, and how many linears and mixtures are reduced."""
    kinds = ReducedFrozenLinear, ReducedLinear, ReducedMixture
    models = [load(path, recipe, Shard(rank, 2), invariant=False) for path, recipe in cases]
    return [(len(m.model.layers), sum(isinstance(module, kinds) for module in m.modules())) for m in models]


@pytest.mark.distributed
def test_a_layer_has_two_reductions(models: list[Path]) -> None:
    for layers, reduced in on_ranks(2, reduced_layers, [(path, "bf16") for path in models])[0]:
        assert reduced == 2 * layers


@pytest.mark.distributed
def test_layers_whose_blocks_would_be_divided_gather(tmp_path: Path) -> None:
    """o has 64 columns and down 512: two ranks can divide the blocks of down, and those of 32 or 16 columns of o."""
    make_model("llama", tmp_path / "llama", overrides={"intermediate_size": 512})
    recipes = ["bf16", "current", "rowwise", "w8a16", "mxfp8", "nvfp4-w4a16", "block", "nvfp4"]
    counts = on_ranks(2, reduced_layers, [(tmp_path / "llama", recipe) for recipe in recipes])[0]
    assert [reduced for _, reduced in counts] == [4, 4, 4, 4, 4, 4, 2, 0]


def casts(rank: int, size: int, recipe: str) -> None:
    noise = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(9, 512, generator=noise).bfloat16() * 2 for _ in range(2))
    linear = nn.Linear(512, 32, dtype=torch.bfloat16)
    layer = FrozenLinear.from_linear(linear, from_name(recipe), *[torch.tensor(100.0)] * 2 * (recipe == "delayed"))
    layer.make_rows_independent()
    x, expected = silu_mul(gate, up), layer.cast(silu_mul(gate, up))
    keep_columns(layer, Shard(rank, size))
    part = slice(rank * 512 // size, (rank + 1) * 512 // size)
    for q, scale in (layer.cast(x[:, part]), layer.cast_silu_mul(gate[:, part], up[:, part])):
        assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8)[:, part])
        whole_scale = expected[1]
        if whole_scale.dim() and whole_scale.shape[1] > 1:
            whole_scale = whole_scale.chunk(size, 1)[rank]
        assert torch.equal(scale.float(), whole_scale.float())


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "mxfp8"])
def test_a_rank_casts_its_columns_as_one_process_casts_them(recipe: str) -> None:
    on_ranks(2, casts, 2, recipe)


def sums(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's terms, [T, N], and their sum over the ranks, with the two ways to compute it."""
    rows = -(-TWO_STEPS // 96)
    terms = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rank)).bfloat16()
    shard = Shard(rank, size)
    halves = [shard.sum_over_ranks(part) for part in terms.chunk(2)]  # too few elements for two steps
    assert torch.equal(shard.sum_over_ranks(terms), torch.cat(halves))
    return terms, torch.cat(halves)


@pytest.mark.distributed
def test_sums_are_in_fp32_in_the_order_of_the_ranks() -> None:
    results = on_ranks(3, sums, 3)
    (a, _), (b, _), (c, _) = results
    for _, total in results:
        assert torch.equal(total, (a.float() + b.float() + c.float()).bfloat16())


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
