"""Model directories of transformers and of fp8serve, loaded for training and for serving."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from fp8serve.errors import ModelError, ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling, Float8CurrentScaling, from_name
from fp8serve.model.checkpoint import (
    ScalingCheckpoint,
    TensorScale,
    fingerprint,
    kv_scales,
    load_scales,
    load_servable,
    load_trainable,
    open_checkpoint,
    save_scales,
)
from fp8serve.model.export import write_calibrated
from tests.model.oracle import all_logits, make_model, state_for

ModelDir = Callable[[str], Path]
IDS = torch.randint(0, 320, (32,), generator=torch.Generator().manual_seed(1)).tolist()


def frozen(model: nn.Module, name: str) -> FrozenLinear:
    module = model.get_submodule(name)
    assert isinstance(module, FrozenLinear)
    return module


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return all_logits(model, IDS)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_sharded_directory_of_transformers_gives_its_logits(kind: str, tmp_path: Path) -> None:
    theirs = make_model(kind, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0].float()
    torch.testing.assert_close(logits(load_servable(tmp_path, "bf16")), expected, rtol=0, atol=0)


def test_trainable_weights_are_fp32_copies_that_can_be_written(model_dir: ModelDir) -> None:
    model = load_trainable(model_dir("llama-tied"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = (model_dir("llama-tied") / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert (model_dir("llama-tied") / "model.safetensors").read_bytes() == before


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight.*set tie_word"):
        open_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_trainable(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_plain_directory_needs_a_recipe_and_the_error_says_what_to_do(model_dir: ModelDir) -> None:
    with pytest.raises(ModelError, match=r"not quantized.*calibrate it first.*--recipe current"):
        load_servable(model_dir("llama"))
    with pytest.raises(ModelError, match="calibrate it first"):
        load_servable(model_dir("llama"), DelayedScaling())


@pytest.mark.parametrize("name", ["current", "rowwise", "block", "mxfp8"])
def test_dynamic_recipes_quantize_on_the_fly(name: str, model_dir: ModelDir) -> None:
    model = load_servable(model_dir("qwen3"), from_name(name))
    assert all(frozen(model, n).input_scale is None for n in model.linear_names())
    assert type(model.lm_head) is nn.Linear
    assert sqnr(logits(load_servable(model_dir("qwen3"), "bf16")), logits(model)) > 15


def sqnr(reference: torch.Tensor, actual: torch.Tensor) -> float:
    """Returns the signal-to-quantization-noise ratio in dB."""
    return float(10 * torch.log10(reference.square().sum() / (reference - actual).square().sum()))


def test_fprop_in_high_precision_gives_the_logits_of_bf16(model_dir: ModelDir) -> None:
    recipe = Float8CurrentScaling(override_linear_precision=(True, False, False))
    model = load_servable(model_dir("llama"), recipe)
    torch.testing.assert_close(logits(model), logits(load_servable(model_dir("llama"), "bf16")), rtol=0, atol=0)


def test_plain_weights_with_scales_serve_like_the_calibrated_directory(model_dir: ModelDir, tmp_path: Path) -> None:
    source = model_dir("llama")
    write_calibrated(tmp_path / "fp8", source, state_for(source))
    expected = logits(load_servable(tmp_path / "fp8"))
    with_file = load_servable(source, DelayedScaling(), scales=tmp_path / "fp8" / "scales.safetensors")
    torch.testing.assert_close(logits(with_file), expected, rtol=0, atol=0)


def test_the_scales_of_the_format_give_the_same_model_as_the_scales_file(model_dir: ModelDir, tmp_path: Path) -> None:
    """Without scales.safetensors, scales come from the tensors of the format and differ at most by the rounding of
    1/x."""
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state_for(model_dir("llama")))
    (tmp_path / "fp8" / "scales.safetensors").unlink()
    scale = frozen(load_servable(tmp_path / "fp8"), "model.layers.0.mlp.up_proj").input_scale
    expected = state_for(model_dir("llama")).tensors["model.layers.0.mlp.up_proj.input"].scale
    torch.testing.assert_close(scale, expected, rtol=2e-7, atol=0)


def test_scales_only_directory_is_served_with_the_scales_beside_its_weights(llama: Path) -> None:
    state = state_for(llama)
    save_scales(llama / "scales.safetensors", ScalingCheckpoint(state.recipe, state.tensors, fingerprint(llama)))
    assert frozen(load_servable(llama), "model.layers.1.mlp.down_proj").input_scale is not None


def test_scales_of_another_model_are_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state_for(model_dir("llama")))
    with pytest.raises(ScalesError, match="belongs to another model"):
        load_servable(model_dir("llama-wide-head"), DelayedScaling(), scales=tmp_path / "fp8" / "scales.safetensors")


def test_scales_with_a_recipe_that_computes_its_own_are_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    with pytest.raises(ScalesError, match="leave one of the two out"):
        load_servable(model_dir("llama"), Float8CurrentScaling(), scales=tmp_path / "x")


def test_scales_that_miss_a_layer_are_refused(llama: Path) -> None:
    state = state_for(llama)
    del state.tensors["model.layers.1.self_attn.k_proj.input"]
    save_scales(llama / "scales.safetensors", ScalingCheckpoint(state.recipe, state.tensors, fingerprint(llama)))
    with pytest.raises(ScalesError, match=r"model.layers.1.self_attn.k_proj.input was never observed"):
        load_servable(llama)


def test_delayed_recipe_on_a_dynamic_checkpoint_says_what_is_missing(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "fp8", model_dir("llama"), ScalingCheckpoint(from_name("rowwise"), {}))
    with pytest.raises(ScalesError, match="stores no input scales"):
        load_servable(tmp_path / "fp8", DelayedScaling())


def test_fp8_weights_stay_views_of_the_file(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state_for(model_dir("llama")))
    weight = frozen(load_servable(tmp_path / "fp8"), "model.layers.0.mlp.up_proj").weight_q
    mapped = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines() if "model.safe" in line]
    assert any(0 <= weight.data_ptr() - int(start, 16) < 1 << 20 for start in mapped)
    assert weight.data_ptr() % 64 == 0


def test_kv_scales_from_the_scales_file_and_from_the_checkpoint(model_dir: ModelDir, tmp_path: Path) -> None:
    state = state_for(model_dir("llama"))
    for layer in range(2):
        for role, value in (("k", 2.0 + layer), ("v", 8.0)):
            state.tensors[f"model.layers.{layer}.self_attn.{role}"] = TensorScale(torch.tensor(value))
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state)
    expected = {0: (2.0, 8.0), 1: (3.0, 8.0)}
    assert {i: (float(k), float(v)) for i, (k, v) in kv_scales(tmp_path / "fp8").items()} == expected
    (tmp_path / "fp8" / "scales.safetensors").unlink()
    scales = kv_scales(tmp_path / "fp8")
    torch.testing.assert_close(torch.tensor([scales[1][0], scales[1][1]]), torch.tensor([3.0, 8.0]))
    assert kv_scales(model_dir("llama")) == {}


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks the tensor model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"shape \[3\].*config.json requires \[64\]"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(3)}), "which LlamaForCausalLM does not"),
        (lambda t: t.update({"model.norm.bias": torch.ones(64)}), "holds the tensor model.norm.bias"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.int32)}), "stored as int32"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_3": torch.ones(1)}), "meaning is not known"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(1)}),
            "belongs to no weight in NVFP4",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            "is FP8 but has no weight_scale",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e5m2)}),
            "stored as float8_e5m2",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(llama: Path, change: Any, message: str) -> None:
    edit_weights(llama, change)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(llama)


def test_old_rotary_buffers_are_ignored(llama: Path) -> None:
    edit_weights(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert "model.norm.weight" in open_checkpoint(llama)


def test_fp8_weights_without_quantization_config_are_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state_for(model_dir("llama")))
    edit_config(tmp_path / "fp8", quantization_config=None)
    with pytest.raises(ModelError, match="no quantization_config"):
        load_servable(tmp_path / "fp8")


def test_dequantized_fp8_directory_is_trainable_from_there(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state_for(model_dir("llama")))
    name = "model.layers.0.mlp.up_proj.weight"
    before = load_trainable(model_dir("llama")).get_parameter(name).detach()
    after = load_trainable(tmp_path / "fp8").get_parameter(name).detach()
    assert sqnr(before, after) > 25


def test_scaling_state_survives_the_round_trip(model_dir: ModelDir, tmp_path: Path) -> None:
    state = state_for(model_dir("llama"))
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state)
    back = load_scales(tmp_path / "fp8" / "scales.safetensors", tmp_path / "fp8")
    assert back.recipe == state.recipe
    assert set(back.tensors) == set(state.tensors)
    for key, entry in state.tensors.items():
        torch.testing.assert_close(back.tensors[key].scale, entry.scale, rtol=0, atol=0)
        torch.testing.assert_close(back.tensors[key].amax_history, entry.amax_history, rtol=0, atol=0)


def test_transformers_block_checkpoint_is_read(tmp_path: Path) -> None:
    """Weights quantized by transformers' own FineGrainedFP8 recipe, 128 x 128 blocks, ragged edges included."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
    transformers_model = make_model("llama", tmp_path, overrides=sizes)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name], tensors[name + "_scale_inv"] = block_quantize(tensors[name].float())
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    edit_config(tmp_path, quantization_config=config)
    model = load_servable(tmp_path)
    assert frozen(model, "model.layers.0.mlp.up_proj").input_spec.granularity == "block1x128"
    with torch.no_grad():
        expected = transformers_model(torch.tensor([IDS])).logits[0].float()
    assert sqnr(expected, logits(model)) > 15


def block_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes as DeepSeek does: scale = amax / 448 of each zero-padded 128 x 128 block."""
    rows, cols = weight.shape
    padded = nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    q = (blocks / scale).view(padded.shape)[:rows, :cols].to(torch.float8_e4m3fn)
    return q.contiguous(), scale[:, 0, :, 0].contiguous()


def test_missing_directory_and_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_servable(tmp_path / "nothing")
    with pytest.raises(ModelError, match="not a model directory: it holds no"):
        load_servable(tmp_path)


def test_transformers_writes_the_dtype_into_config_json(model_dir: ModelDir) -> None:
    raw = json.loads((model_dir("llama") / "config.json").read_text())
    assert raw.get("dtype") == "bfloat16", f"transformers {transformers.__version__} no longer writes `dtype`"
