"""Models with adapters of peft: `convert` converts the base's layers, and an adapter's file has only the adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8serve import DelayedScaling, Linear, autocast, convert, scaling_state
from tests.tiny import write_tiny_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

RECIPE = DelayedScaling(amax_history_len=4)
IDS = torch.arange(3, 19)[None]


@pytest.fixture
def base(tmp_path: Path) -> Any:
    write_tiny_model(tmp_path / "base")
    return load_base(tmp_path)


def load_base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)


def with_adapter(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def step(model: Any) -> Tensor:
    with autocast(recipe=RECIPE):
        loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach()


def save_adapter(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["gate_proj"]}])
def test_a_saved_adapter_holds_no_scaling_states(base: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    plain = save_adapter(with_adapter(base, **options), tmp_path / "plain")
    model = convert(with_adapter(load_base(tmp_path), **options))
    step(model)
    assert scaling_state(model.get_submodule("base_model.model.model.layers.0.mlp.up_proj"))["input"].steps == 1
    assert set(save_adapter(model, tmp_path / "converted")) == set(plain)


def test_the_order_of_convert_and_peft_does_not_change_the_bits(base: Any, tmp_path: Path) -> None:
    first, last = convert(with_adapter(base)), with_adapter(convert(load_base(tmp_path)))
    assert [step(first) for _ in range(3)] == [step(last) for _ in range(3)]
    gradients = ({n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (first, last))
    assert all(torch.equal(a, b) for a, b in zip(*(g.values() for g in gradients), strict=True))


def test_an_adapter_passed_to_convert_is_converted(base: Any) -> None:
    layer = with_adapter(base).get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    convert(layer.lora_A)
    assert isinstance(layer.lora_A["default"], Linear)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # by peft
def test_skip_uses_the_names_of_the_base_model(base: Any) -> None:
    model = convert(with_adapter(base, modules_to_save=["lm_head"]), skip=("lm_head", "q_proj", "model.layers.0.*"))
    converted = {name for name, child in model.named_modules() if isinstance(child, Linear)}
    prefix = "base_model.model.model.layers.1"
    assert converted == {f"{prefix}.self_attn.v_proj.base_layer"} | {
        f"{prefix}.{name}"
        for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }


def test_a_second_convert_says_that_adapters_are_left(base: Any) -> None:
    model = convert(with_adapter(base))
    with pytest.warns(UserWarning, match=r"14 converted already, 8 in adapters of peft, 1 named by skip"):
        convert(model)


def test_a_merged_model_keeps_its_states(base: Any) -> None:
    model = convert(with_adapter(base))
    step(model)
    merged: nn.Module = model.merge_and_unload()
    layer = merged.get_submodule("model.layers.0.self_attn.q_proj")
    assert scaling_state(layer)["input"].steps == 1
