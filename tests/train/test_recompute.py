"""Layers that are computed again for the backward pass: the same bits, and their activations are not kept."""

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


def runs_alike(configure: Configure, tmp_path: Path, **options: Any) -> bool:
    """Whether a run leaves the same checkpoint with recomputation and without it."""
    found = []
    for recompute in (False, True):
        config = configure(out=str(tmp_path / f"out-{recompute}"), recompute=recompute, **options)
        result = Trainer(config).run()
        files = hashes(Path(str(result.checkpoint)))
        del files["trainer.json"]  # which says how it was made
        found.append(files)
    return bool(found[0] == found[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits_in_every_recipe(configure: Configure, tmp_path: Path, recipe: str) -> None:
    assert runs_alike(configure, tmp_path, recipe=recipe, accumulate=2, max_steps=3)


@pytest.mark.parametrize("attention", ["fp8_dpa", "fp8_mha"])
def test_the_same_bits_with_attention_in_fp8(configure: Configure, tmp_path: Path, attention: str) -> None:
    assert runs_alike(configure, tmp_path, recipe_options={attention: True}, max_steps=3)


def test_the_same_bits_of_an_adapter_with_dropout(configure: Configure, tmp_path: Path, fp8_dir: Path) -> None:
    options: dict[str, Any] = {"amax_history_len": None, "lora_rank": 4, "dora": True, "lora_dropout": 0.2}
    assert runs_alike(configure, tmp_path, model=str(fp8_dir), max_steps=3, **options)


@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3", "gemma2", "phi3"])
def test_the_same_gradients_in_every_kind_of_layer(tmp_path: Path, family: str, recipe: str) -> None:
    make_model(KINDS[family], tmp_path)
    kept, again = (gradients(tmp_path, recipe, recompute) for recompute in (False, True))
    assert kept.keys() == again.keys()
    for name, tensor in kept.items():
        assert torch.equal(tensor, again[name]), name


def gradients(model: Path, recipe: str, recompute: bool) -> dict[str, Tensor]:
    """The result of the second of two steps, and the scaling state after both."""
    decoder = load_trainable(model)
    convert(decoder)
    made = DelayedScaling(amax_history_len=4) if recipe == "delayed" else from_name(recipe)
    forward = Forward(decoder, made, recompute=recompute, records_kv=recipe == "delayed")
    batch = collate([row(1, 20), row(2, 9)], "cpu")
    if recipe == "delayed":
        forward.observe(mean_loss(batch))
    for _ in range(2):
        decoder.zero_grad()
        mean_loss(batch)(forward.logits).backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    assert found
    return found | scaling_tensors(forward)


def test_activations_are_not_kept(model_dir: Path) -> None:
    batch = collate([row(1, 60), row(2, 60)], "cpu")
    kept, again = (saved_bytes(model_dir, batch, recompute) for recompute in (False, True))
    assert again < kept / 3


def saved_bytes(model: Path, batch: Any, recompute: bool) -> int:
    """The bytes that the graph of the loss holds, besides the parameters, between the forward and the backward pass."""
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


def test_a_run_may_go_on_with_the_other_choice(configure: Configure, tmp_path: Path) -> None:
    one = Trainer(configure(out=str(tmp_path / "one"))).run()
    stopped = Trainer(configure(out=str(tmp_path / "two"), recompute=True)).run(stop=after(3))
    two = Trainer(configure(out=str(tmp_path / "two"))).run()
    assert (stopped.step, two.step) == (3, 6)
    assert hashes(Path(str(one.model)), ".safetensors") == hashes(Path(str(two.model)), ".safetensors")


@pytest.mark.parametrize("check", [validate, lambda config: Trainer(config).run()], ids=["dry run", "run"])
@pytest.mark.parametrize("option", ["recompute", "fsdp"])
def test_what_works_layer_by_layer_is_refused_where_transformers_computes(
    configure: Configure, tmp_path: Path, option: str, check: Any
) -> None:
    make("gpt_neox", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    said = f"{option} works layer by layer, but transformers computes this model as a whole"
    with pytest.raises(JobError, match=said):
        check(configure(model=str(tmp_path / "model"), **{option: True}))
