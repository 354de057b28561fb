"""Activation recomputation: it changes no bit of a run, and the activations of layers are not stored."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.checkpoint import load_trainable
from fp8serve.train.forward import Forward, collate, mean_loss
from fp8serve.train.state import scaling_tensors
from fp8serve.train.trainer import Trainer
from fp8serve.train.validate import validate
from tests.compatibility.cases import KINDS, make
from tests.model.oracle import make_model, write_tokenizer

from .conftest import Configure
from .test_forward import row
from .test_trainer import RECIPES, after, hashes


def same_checkpoint_with_recompute(configure: Configure, tmp_path: Path, **options: Any) -> bool:
    """Returns whether a run writes the same checkpoint with and without recomputation."""
    checkpoints = []
    for recompute in (False, True):
        config = configure(out=str(tmp_path / f"out-{recompute}"), recompute=recompute, **options)
        result = Trainer(config).run()
        files = hashes(Path(str(result.checkpoint)))
        del files["trainer.json"]  # it records the option itself
        checkpoints.append(files)
    return bool(checkpoints[0] == checkpoints[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_recompute_changes_no_bit_under_any_recipe(configure: Configure, tmp_path: Path, recipe: str) -> None:
    assert same_checkpoint_with_recompute(configure, tmp_path, recipe=recipe, accumulate=2, max_steps=3)


@pytest.mark.parametrize("attention", ["fp8_dpa", "fp8_mha"])
def test_recompute_changes_no_bit_with_fp8_attention(configure: Configure, tmp_path: Path, attention: str) -> None:
    assert same_checkpoint_with_recompute(configure, tmp_path, recipe_options={attention: True}, max_steps=3)


def test_recompute_changes_no_bit_of_an_adapter_with_dropout(
    configure: Configure, tmp_path: Path, fp8_dir: Path
) -> None:
    options: dict[str, Any] = {"amax_history_len": None, "lora_rank": 4, "dora": True, "lora_dropout": 0.2}
    assert same_checkpoint_with_recompute(configure, tmp_path, model=str(fp8_dir), max_steps=3, **options)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3", "gemma2", "phi3"])
def test_recompute_changes_no_gradient_in_any_family(tmp_path: Path, family: str, recipe: str) -> None:
    make_model(KINDS[family], tmp_path)
    expected, actual = (gradients(tmp_path, recipe, recompute) for recompute in (False, True))
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


def gradients(model: Path, recipe: str, recompute: bool) -> dict[str, Tensor]:
    """Returns the gradients of the second of two steps, and the scaling state after both."""
    decoder = load_trainable(model)
    convert(decoder)
    chosen = DelayedScaling(amax_history_len=4) if recipe == "delayed" else from_name(recipe)
    forward = Forward(decoder, chosen, recompute=recompute, records_kv=recipe == "delayed")
    batch = collate([row(1, 20), row(2, 9)], "cpu")
    if recipe == "delayed":
        forward.observe(mean_loss(batch))
    for _ in range(2):
        decoder.zero_grad()
        mean_loss(batch)(forward.logits).backward()  # type: ignore[no-untyped-call]
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    assert grads
    return grads | scaling_tensors(forward)


def test_recompute_stores_less_than_a_third_of_the_activations(model_dir: Path) -> None:
    batch = collate([row(1, 60), row(2, 60)], "cpu")
    stored_bytes, recompute_bytes = (saved_bytes(model_dir, batch, recompute) for recompute in (False, True))
    assert recompute_bytes < stored_bytes / 3


def saved_bytes(model: Path, batch: Any, recompute: bool) -> int:
    """Returns the bytes that the autograd graph holds between forward and backward pass, without the parameters."""
    decoder = load_trainable(model)
    forward = Forward(decoder, None, recompute=recompute)
    own = {p.data_ptr() for p in decoder.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward.network.hidden(batch)
    return sum(sizes.values())


def test_a_run_may_be_resumed_without_recompute(configure: Configure, tmp_path: Path) -> None:
    plain = Trainer(configure(out=str(tmp_path / "plain"))).run()
    stopped = Trainer(configure(out=str(tmp_path / "resumed"), recompute=True)).run(stop=after(3))
    resumed = Trainer(configure(out=str(tmp_path / "resumed"))).run()
    assert (stopped.step, resumed.step) == (3, 6)
    assert hashes(Path(str(plain.model)), ".safetensors") == hashes(Path(str(resumed.model)), ".safetensors")


@pytest.mark.parametrize("check", [validate, lambda config: Trainer(config).run()], ids=["dry run", "run"])
@pytest.mark.parametrize("option", ["recompute", "fsdp", "compile"])
def test_options_of_single_layers_are_refused_with_the_transformers_backend(
    configure: Configure, tmp_path: Path, option: str, check: Any
) -> None:
    make("gpt_neox", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    message = f"{option} works layer by layer, but transformers computes this model as a whole"
    with pytest.raises(JobError, match=message):
        check(configure(model=str(tmp_path / "model"), **{option: True}))
