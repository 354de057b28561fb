"""`fp8serve.log_probs`: a model directory has the log-probabilities that a server returns, a trainer's forward pass has
those that it trains with, and invalid calls are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp8serve
from fp8serve.engine.engine import Engine
from fp8serve.errors import RecipeError, RequestError, ScalesError
from fp8serve.fp8.attention import KvScale
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.checkpoint import kv_scales, load_trainable
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, collate, summed_loss
from fp8serve.train.log_probs import log_probs
from tests.engine.tiny import write_model, write_scales

pytestmark = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
CACHES: tuple[Any, Any] = ("fp8", "bf16")
IDS = [[5, 250, 7, 7, 9, 100, 3], list(range(40)), [8]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log-probs") / "model"
    write_scales(write_model(path), path / "scales.safetensors", kv=True)
    return path


@pytest.mark.parametrize("recipe", ["stored", "bf16", "current", "w8a16", "nvfp4-w4a16"])
@pytest.mark.parametrize("cache", CACHES)
def test_log_probs_of_a_directory_equal_the_engines(model: Path, recipe: str, cache: Any) -> None:
    engine = Engine(model, recipe=recipe, kv_cache_dtype=cache, max_batch_tokens=16)
    completions = engine.generate(IDS, max_new_tokens=1, prompt_logprobs=0)
    actual = fp8serve.log_probs(model, IDS, recipe=recipe, kv_cache_dtype=cache)
    assert [x.tolist() for x in actual] == [
        [item.logprob for item in completion.prompt_logprobs or ()] for completion in completions
    ]


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_gradients_flow_through_an_fp8_cache_in_training(model: Path, recipe: str) -> None:
    """Keys and values are cast in the forward pass, and their projections get gradients."""
    decoder, chosen = load_trainable(model), from_name(recipe)
    if chosen is not None:
        convert(decoder)
    forward = Forward(decoder, chosen, [KvScale.of(*pair) for pair in kv_scales(model).values()])
    batch = collate([Row(np.array(IDS[1], np.int32), np.ones(len(IDS[1]), bool))], "cpu")
    with_cache, without = (log_probs(model, IDS[1:2], recipe=recipe, kv_cache_dtype=c)[0] for c in CACHES)
    assert torch.equal(forward.log_probs(batch), with_cache)
    assert not torch.equal(with_cache, without)
    summed_loss(forward.logits(batch), batch.targets)[0].backward()  # type: ignore[no-untyped-call]
    for name in ("k_proj", "v_proj"):
        gradient = decoder.get_submodule(f"model.layers.0.self_attn.{name}").weight.grad
        assert isinstance(gradient, torch.Tensor)
        assert gradient.any()


def test_the_summed_loss_is_the_negative_sum_of_log_probs(model: Path) -> None:
    forward = Forward(load_trainable(model), None)
    batch = collate([Row(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in IDS[:2]], "cpu")
    loss, _ = summed_loss(forward.logits(batch), batch.targets)
    torch.testing.assert_close(-forward.log_probs(batch).sum(), loss)


def forward_with_fp8_cache(model: Path, recipe: Any) -> Forward:
    return Forward(load_trainable(model), recipe, [KvScale.of(*pair) for pair in kv_scales(model).values()])


def without_scales(model: Path) -> None:
    path = write_model(model.parent / "no-scales")
    log_probs(path, IDS, recipe="bf16", kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: log_probs(m, [[]]), RequestError, "from 1 to 128 tokens; found 0"),
        (lambda m: log_probs(m, [[1] * 129]), RequestError, "from 1 to 128 tokens; found 129"),
        (lambda m: log_probs(m, [[1, 260]]), RequestError, "from 0 to 259; found 1 to 260"),
        (lambda m: log_probs(m, [[-1, 2]]), RequestError, "from 0 to 259; found -1 to 2"),
        (lambda m: log_probs(Forward(load_trainable(m), None), [[1]], recipe="bf16"), RequestError, "options out"),
        (lambda m: log_probs(m, [[1]], recipe="int4"), RecipeError, "no recipe 'int4'"),
        (without_scales, ScalesError, "no scales of keys and values"),
        (
            lambda m: forward_with_fp8_cache(m, DelayedScaling(fp8_dpa=True)),
            RecipeError,
            "leave the scales of a cache out",
        ),
    ],
)
def test_invalid_calls_are_refused(
    model: Path, call: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(model)
