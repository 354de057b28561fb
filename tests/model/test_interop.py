"""Quantized checkpoints of other projects: every variant of keys, tensor names and shapes must give the same model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.spec import UNQUANTIZED
from fp8serve.model.checkpoint import kv_scales, load_servable, load_trainable, open_checkpoint
from fp8serve.model.formats import interop
from fp8serve.model.formats.interop import ScaleKey, parse_scale_key, read_quantization
from fp8serve.model.verify import verify

ModelDir = Callable[[str], Path]
LINEAR = "model.layers.0.mlp.up_proj"
INPUT = 0.05  # a dequantizing scale that BF16 rounds


def quantization(name: str) -> dict[str, Any]:
    """Returns `quantization_config` as the named producer writes it."""

    def args(strategy: str, dynamic: bool, **sizes: Any) -> dict[str, Any]:
        fixed = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None}
        return fixed | {"strategy": strategy, "dynamic": dynamic, "observer": None, "actorder": None} | sizes

    def ct(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": group}, "sparsity_config": {}, "transform_config": {},
                "quantization_status": "compressed", "version": "0.12.2"}  # fmt: skip

    block = {"block_structure": [128, 128]}
    modelopt = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.30"}, "ignore": ["lm_head"]}
    return {
        "ct-static": ct(args("tensor", False), args("tensor", False)),
        "ct-dynamic": ct(args("channel", False), args("token", True)),
        "ct-block": ct(args("block", False, **block), args("group", True, group_size=128)),
        "ct-weights": ct(args("channel", False), None),
        "fp8-static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "fp8-dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                      "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        "modelopt": modelopt | {"quant_algo": "FP8"},
        "modelopt-channel": modelopt | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "modelopt-block": modelopt | {"quant_algo": "FP8_PB_WO"},
        "torchao-row": torchao("Float8DynamicActivationFloat8WeightConfig", granularity=granular("PerRow", dim=-1)),
        "torchao-tensor": torchao("Float8DynamicActivationFloat8WeightConfig", granularity=granular("PerTensor")),
        "torchao-weights": torchao("Float8WeightOnlyConfig", granularity=granular("PerRow", dim=-1)[0]),
    }[name]  # fmt: skip


def torchao(kind: str, **fields: Any) -> dict[str, Any]:
    bounds = {"activation_value_lb": None, "activation_value_ub": None}
    config = {"_type": kind, "_version": 2, "_data": fields | (bounds if "Dynamic" in kind else {})}
    return {"quant_method": "torchao", "quant_type": {"default": config}, "modules_to_not_convert": None,
            "include_input_output_embeddings": False, "untie_embedding_weights": False}  # fmt: skip


def granular(kind: str, **fields: Any) -> list[dict[str, Any]]:
    """Returns the granularity of inputs and of weights."""
    return [{"_type": kind, "_version": 1, "_data": fields}] * 2


def quantize(weight: Tensor, per: str) -> tuple[Tensor, Tensor]:
    """Returns the FP8 weight and its dequantizing scale, computed independently of the product. Weights here are
    smaller than 128 x 128."""
    amax = weight.abs().amax(1, keepdim=True) if per == "channel" else weight.abs().max()
    scale = amax / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


# (config, name of weight scales, their granularity, function from a scale to the stored tensor, name of input scales,
# granularity of inputs)
VARIANTS: dict[str, tuple[str, str, str, Callable[[Tensor], Tensor], str | None, str]] = {
    "ct-static": ("ct-static", "weight_scale", "tensor", lambda s: s.reshape(1).bfloat16(), "input_scale", "tensor"),
    "ct-static-fp32": ("ct-static", "weight_scale", "tensor", lambda s: s.reshape(1), "input_scale", "tensor"),
    "ct-dynamic": ("ct-dynamic", "weight_scale", "channel", lambda s: s.bfloat16(), None, "row"),
    "ct-block": ("ct-block", "weight_scale", "tensor", lambda s: s.reshape(1, 1).bfloat16(), None, "block1x128"),
    "fp8-static": ("fp8-static", "weight_scale", "tensor", lambda s: s, "input_scale", "tensor"),
    "fp8-static-hf": ("fp8-static", "weight_scale_inv", "tensor", lambda s: s, "activation_scale", "tensor"),
    "fp8-dynamic": ("fp8-dynamic", "weight_scale", "tensor", lambda s: s.reshape(1), None, "row"),
    "fp8-block": ("fp8-block", "weight_scale_inv", "tensor", lambda s: s.reshape(1, 1), None, "block1x128"),
    "modelopt": ("modelopt", "weight_scale", "tensor", lambda s: s, "input_scale", "tensor"),
    "modelopt-channel": ("modelopt-channel", "weight_scale", "channel", lambda s: s.reshape(-1), None, "row"),
    "torchao-row": ("torchao-row", "_weight_scale", "channel", lambda s: s, None, "row"),
    "torchao-tensor": ("torchao-tensor", "_weight_scale", "tensor", lambda s: s.reshape(1, 1), None, "row"),
}


def write(source: Path, out: Path, variant: str) -> Path:
    config_name, scale_name, per, shape, input_name, _ = VARIANTS[variant]
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        linear = name.removesuffix(".weight")
        tensors[name], scale = quantize(tensors[name].float(), per)
        tensors[f"{linear}.{scale_name}"] = shape(scale).contiguous()
        if input_name:
            tensors[f"{linear}.{input_name}"] = torch.tensor([INPUT])
        if config_name.startswith("torchao"):
            tensors[f"{linear}._weight_qdata"] = tensors.pop(name)
    save_file(tensors, out / "model.safetensors")
    edit(out, quantization_config=quantization(config_name))
    return out


def edit(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_same_model(variant: str, model_dir: ModelDir, tmp_path: Path) -> None:
    _, _, per, _, input_name, granularity = VARIANTS[variant]
    directory = write(model_dir("llama"), tmp_path / "m", variant)
    model = load_servable(directory)
    source = load_trainable(model_dir("llama"))
    for name in source.linear_names():
        layer = model.get_submodule(name)
        assert isinstance(layer, FrozenLinear)
        weight, scale = quantize(source.get_parameter(f"{name}.weight").detach(), per)
        assert torch.equal(layer.weight_q.view(torch.uint8), weight.view(torch.uint8))
        expected = scale.reshape(layer.weight_scale_inv.shape)
        torch.testing.assert_close(
            layer.weight_scale_inv, expected, rtol=2**-8, atol=0
        )  # some files hold scales rounded to BF16
        assert layer.weight_scale_inv.dtype is torch.float32
        assert layer.input_spec.granularity == granularity
        assert (layer.input_scale is not None) == (input_name is not None)
        if layer.input_scale is not None:  # the file has the dequantizing scale, fp8serve the quantizing one
            torch.testing.assert_close(layer.input_scale, torch.tensor(1 / INPUT), rtol=1e-6, atol=0)


def test_weight_only_checkpoints_keep_their_inputs_in_bf16(model_dir: ModelDir, tmp_path: Path) -> None:
    directory = write(model_dir("llama"), tmp_path / "m", "fp8-block")
    tensors = load_file(directory / "model.safetensors")
    for name in [n for n in tensors if n.endswith("weight_scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name).reshape(
            1, 1, 1, 1
        )  # ModelOpt stores FP8_PB_WO scales with 4 dimensions
    save_file(tensors, directory / "model.safetensors")
    edit(directory, quantization_config=quantization("modelopt-block"))
    layer = load_servable(directory).get_submodule(LINEAR)
    assert isinstance(layer, FrozenLinear)
    assert layer.input_spec == UNQUANTIZED
    weight, scale = quantize(load_trainable(model_dir("llama")).get_parameter(f"{LINEAR}.weight").detach(), "tensor")
    x = torch.randn(3, layer.in_features).bfloat16()
    exact = x.double() @ (weight.double() * scale).t()
    assert (layer(x) - exact).norm() < 2**-8 * exact.norm()


def test_weight_only_torchao_checkpoints_keep_their_inputs_in_bf16(model_dir: ModelDir, tmp_path: Path) -> None:
    directory = write(model_dir("llama"), tmp_path / "m", "torchao-row")
    edit(directory, quantization_config=quantization("torchao-weights"))
    layer = load_servable(directory).get_submodule(LINEAR)
    assert isinstance(layer, FrozenLinear)
    assert layer.input_spec == UNQUANTIZED
    assert verify(directory) == []


def test_hf_quant_config_side_car_is_read(model_dir: ModelDir, tmp_path: Path) -> None:
    directory = write(model_dir("llama"), tmp_path / "m", "modelopt")
    edit(directory, quantization_config=None)
    side_car = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (directory / "hf_quant_config.json").write_text(json.dumps(side_car))
    assert load_servable(directory).get_submodule(LINEAR).input_scale is not None


KV = {
    "llm-compressor": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "old compressed-tensors": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "vllm": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "autofp8": ("self_attn.kv_scale", "self_attn.kv_scale"),
}


@pytest.mark.parametrize("producer", KV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cache_scales_are_read_by_every_name(
    producer: str, dtype: torch.dtype, model_dir: ModelDir, tmp_path: Path
) -> None:
    directory = write(model_dir("llama"), tmp_path / "m", "ct-static")
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        for key in KV[producer]:
            tensors[f"model.layers.{layer}.{key}"] = torch.tensor([0.25], dtype=dtype)
    save_file(tensors, directory / "model.safetensors")
    scales = kv_scales(directory)
    assert {i: (float(k), float(v)) for i, (k, v) in scales.items()} == {0: (4.0, 4.0), 1: (4.0, 4.0)}


def test_kv_scale_on_some_layers_or_of_one_kind_is_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    directory = write(model_dir("llama"), tmp_path / "m", "ct-static")
    add(directory, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    with pytest.raises(Exception, match="only one of k and v"):
        kv_scales(directory)
    add(directory, {"model.layers.0.self_attn.v_scale": torch.ones(1)})
    with pytest.raises(Exception, match="for 1 of 2 layers"):
        kv_scales(directory)


def add(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(load_file(directory / "model.safetensors") | tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{LINEAR}.input_scale": torch.tensor([0.0])}, "holds the scale 0.0, which cannot be served"),
        ({f"{LINEAR}.input_scale": torch.tensor([-1.0])}, "holds the scale -1.0"),
        ({f"{LINEAR}.weight_scale": torch.tensor([float("nan")])}, "holds the scale nan"),
        ({f"{LINEAR}.weight_scale": torch.tensor([float("inf")])}, "holds the scale inf"),
        ({f"{LINEAR}.input_scale": torch.ones(2)}, r"shape \[2\], but fp8serve supports only one number"),
        ({f"{LINEAR}.weight_scale": torch.ones(5)}, r"shape \[5\]; a weight of 96 x 64 takes \[\], \[96, 1\] or"),
        ({f"{LINEAR}.weight_scale": torch.ones(1, dtype=torch.int32)}, "of the type int32"),
        ({f"{LINEAR}.weight_scale_inv": torch.ones(1)}, "holds both .* which mean the same scale"),
        ({f"{LINEAR}.weight_zero_point": torch.ones(1)}, "meaning is not known"),
        ({f"{LINEAR}.output_scale": torch.ones(1)}, "meaning is not known"),
        ({f"{LINEAR}.k_scale": torch.ones(1)}, "meaning is not known"),
        ({"model.layers.0.self_attn.input_scale": torch.ones(1)}, "meaning is not known"),
        ({"model.layers.0.self_attn.q_scale": torch.ones(1)}, "meaning is not known"),
    ],
)
def test_bad_scales_are_refused(tensors: dict[str, Tensor], message: str, model_dir: ModelDir, tmp_path: Path) -> None:
    directory = write(model_dir("llama"), tmp_path / "m", "ct-static")
    add(directory, tensors)
    with pytest.raises(ModelError, match=message):
        load_servable(directory)


def test_static_checkpoint_without_input_scale_is_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    directory = write(model_dir("llama"), tmp_path / "m", "fp8-dynamic")
    edit(directory, quantization_config=quantization("fp8-static"))
    with pytest.raises(ModelError, match="has no input_scale, which static activation"):
        load_servable(directory)


def changed(name: str, *path: str, to: Any) -> dict[str, Any]:
    """Returns the named configuration with some values replaced."""
    config = quantization(name)
    place: Any = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return config


GROUP = ("config_groups", "group_0")
AO = ("quant_type", "default", "_data")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quantized by 'gptq'; supported are compressed-tensors, fp8, fbgemm_fp8, modelopt",
        ),
        ({}, "quantized by null"),
        ("fp8", "quantized by 'fp8'"),
        (changed("ct-static", "format", to="marlin-24"), "format 'marlin-24'"),
        (changed("ct-static", "sparsity_config", to={"format": "24"}), "sparse or rotated"),
        (changed("ct-static", *GROUP, "weights", "num_bits", to=4), "weights '4-bit float'"),
        (changed("ct-static", *GROUP, "weights", "num_bits", to="8"), "num_bits is '8' where a whole number"),
        (changed("ct-static", *GROUP, "weights", "symmetric", to=0), "symmetric is 0 where true or false"),
        (changed("ct-static", *GROUP, "weights", "type", to="int"), "weights '8-bit int'"),
        (changed("ct-static", *GROUP, "weights", "symmetric", to=False), "asymmetric"),
        (changed("ct-static", *GROUP, "weights", "strategy", to="group"), "weight strategy 'group'"),
        (changed("ct-static", *GROUP, "input_activations", "strategy", to="token"), "static activation strategy"),
        (changed("ct-dynamic", *GROUP, "input_activations", "strategy", to="channel"), "activation strategy 'channel'"),
        (changed("ct-block", *GROUP, "input_activations", "group_size", to=64), "group_size 64"),
        (changed("ct-block", *GROUP, "weights", "block_structure", to=[64, 64]), r"block_structure \[64, 64\]"),
        (changed("ct-static", "config_groups", to=[1]), "config_groups"),
        (changed("fp8-block", "weight_block_size", to=[64, 64]), r"weight_block_size \[64, 64\]"),
        (changed("fp8-block", "activation_scheme", to="static"), "activation_scheme 'static'"),
        (changed("fp8-static", "activation_scheme", to="often"), "activation_scheme 'often'"),
        (changed("fp8-block", "fmt", to="e5m2"), "fmt 'e5m2'"),
        (changed("modelopt", "quant_algo", to="NVFP4_SVD"), "quant_algo 'NVFP4_SVD'"),
        (torchao("Int4WeightOnlyConfig"), "quant_type 'Int4WeightOnlyConfig'"),
        (changed("torchao-row", "quant_type", to={"default": 4}), "quant_type"),
        (changed("torchao-row", "quant_type", to="float8"), "quant_type 'float8'"),
        (changed("torchao-row", *AO, "activation_value_ub", to=1200.0), "activation_value_ub 1200.0"),
        (changed("torchao-row", *AO, "granularity", to=granular("PerGroup", group_size=32)), "granularity"),
        (changed("torchao-row", *AO, "granularity", to=granular("PerBlock", block_size=[64, 64])), "block_size"),
    ],
)
def test_other_quantizations_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_quantization(tmp_path, {"quantization_config": config})


def test_groups_claim_layers_by_class_pattern_and_name() -> None:
    config = quantization("ct-static")
    group = config["config_groups"]["group_0"]
    config["config_groups"] = {"a": group | {"targets": ["re:.*mlp.*"]}, "b": group | {"targets": ["lm_head"]}}
    result = read_quantization(Path("."), {"quantization_config": config})
    assert result is not None
    assert result.require_scheme(LINEAR).input_spec == interop.STATIC
    with pytest.raises(ModelError, match="no group for it"):
        result.require_scheme("model.layers.0.self_attn.q_proj")


def test_parse_scale_key_returns_none_for_parameters() -> None:
    assert parse_scale_key("model.layers.0.mlp.up_proj.weight") is None
    assert parse_scale_key("model.norm.weight") is None
    assert parse_scale_key(f"{LINEAR}.weight_scale") == ScaleKey(LINEAR, "weight")


def test_ragged_blocks(tmp_path: Path) -> None:
    scale = torch.rand(3, 2) + 0.1
    assert interop.to_weight_scale_inv("x", scale, 257, 200).shape == (3, 2)
    assert interop.to_weight_scale_inv("x", scale.reshape(3, 1, 2, 1), 257, 200).shape == (3, 2)
    with pytest.raises(ModelError, match=r"\[\], \[256, 1\] or \[2, 2\]"):
        interop.to_weight_scale_inv("x", scale, 256, 200)


def test_opening_reads_no_weight(model_dir: ModelDir, tmp_path: Path) -> None:
    """Opening checks names and shapes only; bad values of scales are found when they are used."""
    directory = write(model_dir("llama"), tmp_path / "m", "ct-static")
    add(directory, {f"{LINEAR}.input_scale": torch.tensor([0.0])})
    assert LINEAR in open_checkpoint(directory).quantized_linears


def test_quantizing_scales_are_restored_exactly() -> None:
    scales = [*(torch.rand(500, generator=torch.Generator().manual_seed(0)) * 1000), torch.tensor(8e37)]
    pairs = [interop.to_dequantizing_scale(scale) for scale in scales]
    assert any(note is not None for _, note in pairs)  # 1 / (1 / s) may differ from s
    for scale, (value, note) in zip(scales, pairs, strict=True):
        assert torch.equal(value, scale.reciprocal())
        assert torch.equal(interop.to_quantizing_scale("x", value.reshape(1), note), scale)


@pytest.mark.parametrize("note", ["0x1.8p+3", "nan", "-0x1p+0", "0x1p+9999", "twelve"])
def test_metadata_that_contradict_a_stored_scale_are_ignored(note: str) -> None:
    """This happens if a tool changes scales and keeps the metadata of a file."""
    assert interop.to_quantizing_scale("x", torch.tensor(0.5), note) == 2.0
