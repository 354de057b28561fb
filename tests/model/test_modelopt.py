"""ModelOpt's NVFP4_AWQ, which multiplies inputs by pre_quant_scale, and MIXED_PRECISION, a format for each layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8serve.comparison import compare
from fp8serve.engine.engine import Engine
from fp8serve.engine.loading import load, read_weights
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.packing import Packer
from fp8serve.engine.weights import exchange_weights
from fp8serve.errors import ModelError
from fp8serve.fp8.batch_invariant import BatchInvariantLinear
from fp8serve.fp8.frozen import FrozenLinear, input_gradient
from fp8serve.fp8.lora import squared_norms
from fp8serve.fp8.recipe import from_name
from fp8serve.inspection import inspect
from fp8serve.model.checkpoint import load_servable, load_trainable, open_checkpoint
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.verify import verify
from tests.model.oracle import make_model
from tests.model.test_four_bit import SIZES, edit, modelopt, mxfp4, nvfp4

SCALED = ("o_proj", "down_proj")  # ModelOpt merges the factors of other layers' inputs into the norms before them
DOWN = "model.layers.0.mlp.down_proj"


def layer_of(model: Any, name: str) -> FrozenLinear:
    layer = model.get_submodule(name)
    assert isinstance(layer, FrozenLinear)
    return layer


def write_awq(out: Path, seed: int = 0, model: str = "llama", **sizes: int) -> dict[str, Tensor]:
    """Writes a directory; returns the weight that each linear has for inputs without factors."""
    make_model(model, out, overrides=SIZES | sizes)
    tensors, expected = load_file(out / "model.safetensors"), {}
    random = torch.Generator().manual_seed(seed)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight, owner = tensors.pop(name).float(), name.removesuffix(".weight")
        factors = torch.ones(weight.shape[1])
        if owner.endswith(SCALED):
            factors = (torch.rand(weight.shape[1], generator=random) + 0.5).bfloat16().float()
            tensors[f"{owner}.pre_quant_scale"] = factors.bfloat16()
        packed = nvfp4(weight / factors, "modelopt", with_inputs=True)
        tensors |= {f"{owner}.{suffix}": tensor for suffix, tensor in packed.tensors.items()}
        expected[name] = packed.weight * factors
    save_file(tensors, out / "model.safetensors")
    edit(out, quantization_config=modelopt("NVFP4_AWQ"))
    return expected


def test_a_pre_quant_scale_multiplies_the_input(tmp_path: Path) -> None:
    expected = write_awq(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    for name, weight in expected.items():
        assert torch.equal(checkpoint[name], weight)
    assert torch.equal(load_trainable(tmp_path / "m").get_parameter(f"{DOWN}.weight"), expected[f"{DOWN}.weight"])
    layer = layer_of(load_servable(tmp_path / "m"), DOWN)
    assert layer.is_4bit
    factors = load_file(tmp_path / "m" / "model.safetensors")[f"{DOWN}.pre_quant_scale"]
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    bare = FrozenLinear(
        layer.weight_q,
        layer.weight_scale_inv,
        input_spec=layer.input_spec,
        out_dtype=layer.out_dtype,
        weight_global_scale=layer.weight_global_scale,
    )
    assert torch.equal(layer(x), bare(x * factors))
    gate, norm = torch.randn(5, 256).bfloat16(), torch.rand(256).bfloat16()
    with torch.no_grad():
        gated = torch.ops.fp8serve.silu_mul(gate, x)
        assert torch.equal(layer.product(*layer.cast_silu_mul(gate, x), x.dtype), layer(gated))
        normed = torch.ops.fp8serve.rms_norm(x, norm, 1e-6)
        assert torch.equal(layer.product(*layer.cast_norm(x, norm, 1e-6), x.dtype), layer(normed))
    dy, weight = torch.randn(5, 128).bfloat16(), expected[f"{DOWN}.weight"]
    assert torch.allclose(input_gradient(layer, dy).float(), dy.float() @ weight, rtol=0.02, atol=0.02)
    assert torch.allclose(squared_norms(layer), weight.square().sum(1), rtol=1e-5)
    assert not [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]
    report = inspect(tmp_path / "m")
    assert report["problem"] is None
    origins = {scale["key"]: scale["origin"] for scale in report["scales"]}
    assert origins[f"{DOWN}.pre_quant_scale"].endswith("multiplies inputs")
    assert any("inputs of 4 bits" in note for note in report["notes"])
    assert layer_of(load_servable(tmp_path / "m", from_name("rowwise")), DOWN).pre_quant_scale is None


def test_a_pre_quant_scale_is_exchanged_and_compared(tmp_path: Path) -> None:
    for seed, folder in enumerate("ab"):
        write_awq(tmp_path / folder, seed)
    loaded = load(tmp_path / "a", EngineOptions(recipe="stored"))
    layer, other = layer_of(loaded.runner.model, DOWN), layer_of(load_servable(tmp_path / "b"), DOWN)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = layer(x)
    Packer([m for m in loaded.runner.model.matrices() if not isinstance(m, BatchInvariantLinear)]).pack()
    assert layer.is_packed
    assert torch.equal(layer(x), before)
    previous = exchange_weights(loaded.runner.model, read_weights(tmp_path / "b", loaded))
    assert torch.equal(layer(x), other(x))
    exchange_weights(loaded.runner.model, previous)
    assert torch.equal(layer(x), before)
    changes = compare(tmp_path / "a", tmp_path / "b").weights
    assert f"{DOWN}.weight" in {change.tensor for change in changes}


def test_experts_with_a_pre_quant_scale_are_called_one_by_one(tmp_path: Path) -> None:
    write_awq(tmp_path, model="qwen3-moe", moe_intermediate_size=64)
    engine = Engine(tmp_path, max_num_seqs=4)
    experts: Any = engine.loaded.runner.model.get_submodule("model.layers.1.mlp.experts")
    assert experts[0].down_proj.pre_quant_scale is not None
    assert not experts.stacks()
    (completion,) = engine.generate([[3, 4, 5]], temperature=0.0, max_new_tokens=4, ignore_eos=True)
    assert len(completion.token_ids) == 4


def change(directory: Path, key: str, function: Callable[[Tensor], Tensor]) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors[key] = function(tensors[key])
    save_file(tensors, directory / "model.safetensors")


def at(index: int, value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor(index), value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (at(3, 0.0), "pre_quant_scale holds the scale 0.0, which cannot be served"),
        (at(3, -1.0), "pre_quant_scale holds the scale -1.0"),
        (at(3, torch.nan), "pre_quant_scale holds the scale nan"),
        (lambda t: t[:-1].clone(), r"pre_quant_scale has the shape \[255\]; an input of 256 elements takes \[256\]"),
        (lambda t: t.to(torch.float8_e4m3fn), "pre_quant_scale is of the type float8_e4m3fn"),
    ],
)
def test_a_bad_pre_quant_scale_is_refused_and_found(
    function: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    write_awq(tmp_path)
    change(tmp_path, f"{DOWN}.pre_quant_scale", function)
    with pytest.raises(ModelError, match=message):
        load_servable(tmp_path)
    assert f"{DOWN}.pre_quant_scale" in [f.tensor for f in verify(tmp_path) if f.severity == "error"]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("NVFP4", "o_proj has .*pre_quant_scale, and quantization_config does not say NVFP4_AWQ; correct"),
        ("W4A16_AWQ", "quantized by modelopt with quant_algo 'W4A16_AWQ', which is not supported"),
    ],
)
def test_another_algorithm_does_not_ignore_a_pre_quant_scale(algorithm: str, message: str, tmp_path: Path) -> None:
    write_awq(tmp_path)
    edit(tmp_path, quantization_config=modelopt(algorithm))
    with pytest.raises(ModelError, match=message):
        load_servable(tmp_path)
    assert [f for f in verify(tmp_path) if f.severity == "error"]


def test_a_pre_quant_scale_of_a_weight_in_bf16_is_refused(tmp_path: Path) -> None:
    write_awq(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    factors = {"model.embed_tokens.pre_quant_scale": torch.ones(128)}
    save_file(tensors | factors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"embed_tokens.pre_quant_scale belongs to no weight in NVFP4"):
        open_checkpoint(tmp_path)
    assert "model.embed_tokens.pre_quant_scale" in [f.tensor for f in verify(tmp_path) if f.severity == "error"]


@pytest.mark.parametrize("format_", ["modelopt", "compressed-tensors"])
def test_a_pre_quant_scale_is_not_converted(format_: str, tmp_path: Path) -> None:
    write_awq(tmp_path / "m")
    with pytest.raises(ModelError, match="has a pre_quant_scale, which fp8serve does not write; serve"):
        convert_format(tmp_path / "m", tmp_path / "out", format_)
    assert not (tmp_path / "out").exists()


ALGORITHMS = {"q_proj": "FP8", "k_proj": "W4A16_NVFP4", "v_proj": "NVFP4", "gate_proj": "NVFP4", "up_proj": "MXFP4"}


def write_mixed(out: Path, model: str = "llama", side_car: bool = False, **sizes: int) -> dict[str, Tensor]:
    """Writes a directory with layers in FP8, in several formats of 4 bits, and in BF16; returns the weights."""
    make_model(model, out, overrides=SIZES | sizes)
    tensors, expected, layers = load_file(out / "model.safetensors"), {}, {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        owner, weight = name.removesuffix(".weight"), tensors[name].float()
        algorithm = ALGORITHMS.get(owner.rpartition(".")[2])
        expected[name] = weight
        if algorithm is None:
            continue
        if algorithm == "FP8":
            scale = weight.abs().amax() / 448
            codes = (weight / scale).to(torch.float8_e4m3fn)
            parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
            expected[name] = codes.float() * scale
        else:
            is_mx = algorithm == "MXFP4"
            packed = mxfp4(weight, "modelopt") if is_mx else nvfp4(weight, "modelopt", with_inputs=algorithm == "NVFP4")
            parts, expected[name] = packed.tensors, packed.weight
        tensors |= {f"{owner}.{suffix}": tensor for suffix, tensor in parts.items()}
        layers[owner] = {"quant_algo": algorithm, "group_size": 16}
    save_file(tensors, out / "model.safetensors")
    config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    if side_car:
        (out / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    else:
        edit(out, quantization_config={"quant_method": "modelopt"} | config)
    return expected


@pytest.mark.parametrize("side_car", [False, True])
def test_mixed_precision_serves_each_layer_in_its_format(side_car: bool, tmp_path: Path) -> None:
    expected = write_mixed(tmp_path / "m", side_car=side_car)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert all(torch.equal(checkpoint[name].float(), weight.float()) for name, weight in expected.items())
    model = load(tmp_path / "m", EngineOptions(recipe="stored")).runner.model
    for leaf, algorithm in ALGORITHMS.items():
        owner = "self_attn" if leaf[0] in "qkv" else "mlp"
        layer = layer_of(model, f"model.layers.1.{owner}.{leaf}")
        assert layer.is_4bit is (algorithm != "FP8")
        assert (layer.input_scale is None) is (algorithm != "FP8")
    assert isinstance(model.get_submodule("model.layers.1.self_attn.o_proj"), BatchInvariantLinear)
    assert not [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]
    report = inspect(tmp_path / "m")
    assert report["problem"] is None
    assert "2 FP8 linear layers" in report["holds"]
    assert "6 NVFP4 linear layers" in report["holds"]
    assert "2 MXFP4 linear layers" in report["holds"]
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert estimate_weight_memory(tmp_path / "m", "stored").served == pytest.approx(size, rel=0.05)
    with pytest.raises(ModelError, match="quantize their inputs in several ways, which no format here expresses"):
        convert_format(tmp_path / "m", tmp_path / "out", "modelopt")


def test_a_module_of_experts_has_one_entry(tmp_path: Path) -> None:
    expected = write_mixed(tmp_path, "qwen3-moe", moe_intermediate_size=64)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    layers = config["quantized_layers"]
    experts = {name.partition(".experts.")[0] + ".experts" for name in layers if ".experts." in name}
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in expected if n.endswith(("up_proj.weight", "down_proj.weight")) and ".experts." in n]:
        owner = name.removesuffix(".weight")
        for suffix in ("weight", "weight_scale"):
            tensors.pop(f"{owner}.{suffix}", None)
        packed = nvfp4(expected[name].float(), "modelopt", with_inputs=False)
        tensors |= {f"{owner}.{suffix}": tensor for suffix, tensor in packed.tensors.items()}
        expected[name] = packed.weight
    save_file(tensors, tmp_path / "model.safetensors")
    layers = {name: layer for name, layer in layers.items() if ".experts." not in name}
    layers |= {name: {"quant_algo": "NVFP4"} for name in experts}
    edit(tmp_path, quantization_config=config | {"quantized_layers": layers})
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint[name].float(), weight.float()) for name, weight in expected.items())
    engine = Engine(tmp_path, max_num_seqs=4)
    mixture: Any = engine.loaded.runner.model.get_submodule("model.layers.1.mlp.experts")
    assert mixture.stacks()


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({}, "says MIXED_PRECISION and names no module in quantized_layers"),
        ({UP: {"quant_algo": "NVFP4"}}, r"up_proj.weight is in MXFP4 by the type of .*, and config.json has NVFP4"),
        ({UP: {"quant_algo": "W4A8_AWQ"}}, "quantized by modelopt with quant_algo 'W4A8_AWQ', which is not supported"),
        ({UP: {}}, "quantized by modelopt with quant_algo null, which is not supported"),
        ({UP: "NVFP4"}, "quantized_layers.*up_proj.* is 'NVFP4' where an object was expected"),
        ({UP: {"quant_algo": 4}}, "quant_algo is 4 where text was expected"),
        ({DOWN: {"quant_algo": "NVFP4"}}, None),
    ],
)
def test_bad_mixtures_of_formats_are_refused(layers: Any, message: str | None, tmp_path: Path) -> None:
    write_mixed(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    layers = config["quantized_layers"] | layers if layers else {}
    edit(tmp_path, quantization_config=config | {"quantized_layers": layers})
    if message is None:  # a layer that is listed and not quantized runs as it is stored
        load_servable(tmp_path)
        return
    with pytest.raises(ModelError, match=message):
        load_servable(tmp_path)
    assert [finding for finding in verify(tmp_path) if finding.severity == "error"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_mixed_precision_names_the_layers_of_a_wrapper_as_its_file_does(prefix: str, tmp_path: Path) -> None:
    expected = write_mixed(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config["quantization_config"]
    layers = {name.replace("model.", prefix, 1): layer for name, layer in quantization["quantized_layers"].items()}
    edit(tmp_path, quantization_config=quantization | {"quantized_layers": layers})
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint[name].float(), weight.float()) for name, weight in expected.items())
