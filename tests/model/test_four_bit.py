"""Weights of 4 bits in files: NVFP4 and MXFP4 of compressed-tensors and ModelOpt are read, served and written."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8serve.calibration.pipeline import calibrate
from fp8serve.cli import main
from fp8serve.engine.loading import load, read_weights
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.packing import Packer
from fp8serve.engine.weights import exchange_weights
from fp8serve.errors import ModelError, RecipeError
from fp8serve.fp8.batch_invariant import BatchInvariantLinear
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling, Float4WeightOnly, Recipe, from_name
from fp8serve.fp8.spec import MXFP4, NVFP4, UNQUANTIZED
from fp8serve.inspection import inspect
from fp8serve.model.checkpoint import (
    ScalingCheckpoint,
    TensorScale,
    fingerprint,
    load_servable,
    load_trainable,
    open_checkpoint,
    save_scales,
)
from fp8serve.model.compatibility import MODELOPT_4BIT_NOTE
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.export import write_calibrated
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.verify import verify
from tests.model.oracle import make_model, write_tokenizer

LINEAR = "model.layers.0.mlp.up_proj"
SIZES = {"hidden_size": 128, "intermediate_size": 256}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def edit(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def nibbles(scaled: Tensor) -> Tensor:
    """uint8 [N, K / 2]: the nearest codes, the even column in the lower half. Written independently of the product."""
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


@dataclass
class Packed:
    """The tensors of a weight by suffix, as a project writes them, and what they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


def nvfp4(weight: Tensor, producer: str, *, with_inputs: bool) -> Packed:
    decode = weight.abs().amax() / (448 * 6)
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 / decode).to(torch.float8_e4m3fn)
    scales = torch.where(scales.float() == 0, 1.0, scales.float()).to(torch.float8_e4m3fn)
    steps = scales.float().repeat_interleave(16, 1)
    codes = nibbles(weight / steps / decode)
    values = torch.cat([E2M1, -E2M1])[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    if producer == "modelopt":
        tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": decode}
        inputs, stands_for = {"input_scale": torch.tensor(0.002)}, decode
    else:
        encode = 1 / decode
        tensors = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": encode.reshape(1)}
        inputs, stands_for = {"input_global_scale": torch.tensor([500.0])}, 1 / encode
    return Packed(tensors | (inputs if with_inputs else {}), values * steps * stands_for)


def mxfp4(weight: Tensor, producer: str) -> Packed:
    exponents = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 6).log2().ceil()
    steps = exponents.exp2().repeat_interleave(32, 1)
    codes = nibbles(weight / steps)
    values = torch.cat([E2M1, -E2M1])[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    name = "weight" if producer == "modelopt" else "weight_packed"
    return Packed({name: codes, "weight_scale": (exponents + 127).to(torch.uint8)}, values * steps)


def compressed(preset: str, form: str) -> dict[str, Any]:
    scheme = json.loads(preset_name_to_scheme(preset, ["Linear"]).model_dump_json())
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": scheme}, "ignore": ["lm_head"]}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": ["lm_head"]}


Make = Callable[[Tensor], Packed]
FILES: dict[str, tuple[dict[str, Any], Make]] = {
    "compressed-tensors NVFP4A16": (
        compressed("NVFP4A16", "nvfp4-pack-quantized"),
        lambda weight: nvfp4(weight, "compressed-tensors", with_inputs=False),
    ),
    "compressed-tensors NVFP4": (
        compressed("NVFP4", "nvfp4-pack-quantized"),
        lambda weight: nvfp4(weight, "compressed-tensors", with_inputs=True),
    ),
    "modelopt W4A16_NVFP4": (modelopt("W4A16_NVFP4"), lambda weight: nvfp4(weight, "modelopt", with_inputs=False)),
    "modelopt NVFP4": (modelopt("NVFP4"), lambda weight: nvfp4(weight, "modelopt", with_inputs=True)),
    "compressed-tensors MXFP4A16": (
        compressed("MXFP4A16", "mxfp4-pack-quantized"),
        lambda weight: mxfp4(weight, "compressed-tensors"),
    ),
    "modelopt MXFP4": (modelopt("MXFP4") | {"group_size": 32}, lambda weight: mxfp4(weight, "modelopt")),
    "mxfp4": ({"quant_method": "mxfp4"}, lambda weight: mxfp4(weight, "compressed-tensors")),
}
WITH_INPUTS = ("compressed-tensors NVFP4", "modelopt NVFP4", "modelopt MXFP4")


def write(out: Path, file: str) -> dict[str, Tensor]:
    """Writes a directory; returns the weight of each linear."""
    config, make = FILES[file]
    make_model("llama", out, overrides=SIZES)
    tensors, expected = load_file(out / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        packed, owner = make(tensors.pop(name).float()), name.removesuffix(".weight")
        tensors |= {f"{owner}.{suffix}": tensor for suffix, tensor in packed.tensors.items()}
        expected[name] = packed.weight
    save_file(tensors, out / "model.safetensors")
    edit(out, quantization_config=config)
    return expected


def change(directory: Path, suffix: str, function: Callable[[Tensor], Tensor | None]) -> None:
    """Replaces a tensor of LINEAR, or removes it if `function` returns None."""
    tensors = load_file(directory / "model.safetensors")
    changed = function(tensors.pop(f"{LINEAR}.{suffix}"))
    tensors |= {} if changed is None else {f"{LINEAR}.{suffix}": changed}
    save_file(tensors, directory / "model.safetensors")


def served_layer(directory: Path, recipe: Any = "stored") -> FrozenLinear:
    layer = load_servable(directory, recipe).get_submodule(LINEAR)
    assert isinstance(layer, FrozenLinear)
    return layer


@pytest.mark.parametrize("file", FILES)
def test_weights_are_read_exactly_and_stay_in_4_bits(file: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "m", file)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert sorted(checkpoint.quantized_linears) == sorted(checkpoint.linears)
    for name, weight in expected.items():
        assert torch.equal(checkpoint[name], weight)
    spec = NVFP4 if "NV" in file else MXFP4
    matrix = checkpoint.quantized_matrix(LINEAR)
    assert matrix is not None
    assert matrix.specs == (UNQUANTIZED, spec)
    layer = served_layer(tmp_path / "m")
    assert layer.is_4bit
    assert layer.weight_q.shape == (256, 64)
    assert torch.equal(layer.quantized_weight.dequantize(), expected[f"{LINEAR}.weight"])
    assert served_layer(tmp_path / "m", from_name("rowwise")).weight_q.dtype is torch.float8_e4m3fn
    trainable = load_trainable(tmp_path / "m").get_parameter(f"{LINEAR}.weight")
    assert torch.equal(trainable, expected[f"{LINEAR}.weight"])
    assert not [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]


@pytest.mark.parametrize("file", FILES)
def test_inspect_names_the_format_and_the_second_scale(file: str, tmp_path: Path) -> None:
    write(tmp_path / "m", file)
    report = inspect(tmp_path / "m")
    assert f"with 14 {'NVFP4' if 'NV' in file else 'MXFP4'} linear layers" in report["holds"]
    assert report["problem"] is None
    assert any("inputs of 4 bits" in note for note in report["notes"]) is (file in WITH_INPUTS)
    assert (MODELOPT_4BIT_NOTE in report["notes"]) is file.startswith("modelopt")
    scales = {scale["key"]: scale for scale in report["scales"] if scale["tensor"].startswith(LINEAR)}
    assert not any(scale["problem"] for scale in scales.values())
    seconds = [scale["direction"] for key, scale in scales.items() if key.endswith(("global_scale", "scale_2"))]
    assert ("NV" in file) is bool(seconds)
    assert ("dequantizes" if file.startswith("modelopt") else "quantizes") in seconds or not seconds
    assert all("stay in BF16" in scale["origin"] for key, scale in scales.items() if ".input_" in key)


@pytest.mark.parametrize("file", FILES)
def test_the_engine_says_that_inputs_are_not_in_4_bits(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "m", file)
    with caplog.at_level(logging.WARNING, "fp8serve.engine"):
        load(tmp_path / "m", EngineOptions(recipe="stored"))
    assert ("The model was made for inputs of 4 bits" in caplog.text) is (file in WITH_INPUTS)


@torch.no_grad()
@pytest.mark.parametrize("file", ["compressed-tensors MXFP4A16", "modelopt MXFP4", "mxfp4"])
def test_mxfp4_in_4_bits_answers_with_the_bits_of_the_weights_in_bf16(file: str, tmp_path: Path) -> None:
    write(tmp_path / "m", file)
    outputs = []
    for recipe in ("stored", "bf16"):
        model = load(tmp_path / "m", EngineOptions(recipe=recipe)).runner.model
        layer = model.get_submodule(LINEAR)
        assert isinstance(layer, FrozenLinear) is (recipe == "stored")
        outputs.append(layer(_input()))
    assert torch.equal(*outputs)


def _input() -> Tensor:
    return torch.randn(7, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize(
    ("preset", "form"), [("NVFP4A16", "nvfp4-pack-quantized"), ("MXFP4A16", "mxfp4-pack-quantized")]
)
def test_what_is_written_means_the_same_to_compressed_tensors(preset: str, form: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides=SIZES)
    recipe = Float4WeightOnly("nvfp4" if preset == "NVFP4A16" else "mxfp4")
    write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(recipe, {}))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    expected = preset_name_to_scheme(preset, ["Linear"])
    assert scheme.weights is not None
    assert expected.weights is not None
    for field in ("num_bits", "type", "strategy", "group_size", "scale_dtype", "zp_dtype", "dynamic", "symmetric"):
        assert getattr(scheme.weights, field) == getattr(expected.weights, field)
    assert scheme.input_activations is expected.input_activations is None
    assert config["format"] == scheme.format == form
    tensors, checkpoint = load_file(tmp_path / "out" / "model.safetensors"), open_checkpoint(tmp_path / "out")
    for linear in checkpoint.linears:
        suffixes = ["weight_packed", "weight_scale", *(["weight_global_scale"] if preset == "NVFP4A16" else [])]
        parts = {suffix: tensors[f"{linear}.{suffix}"] for suffix in suffixes}
        theirs = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"]
        ours = checkpoint[f"{linear}.weight"]
        assert torch.allclose(ours.to(theirs.dtype), theirs, rtol=2**-7, atol=0)
        if preset == "MXFP4A16":
            assert torch.equal(ours, theirs.float())


FORMATS = [("nvfp4-w4a16", "compressed-tensors"), ("nvfp4-w4a16", "modelopt"), ("mxfp4-w4a16", "compressed-tensors")]


def recipe_of(name: str) -> Recipe:
    recipe = from_name(name)
    assert recipe is not None
    return recipe


def tensors_of(layer: FrozenLinear) -> list[Tensor]:
    tensors = layer.weight_q, layer.weight_scale_inv, layer.weight_global_scale
    return [tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in tensors if tensor is not None]


@pytest.mark.parametrize(("name", "format_"), FORMATS)
def test_what_is_written_is_what_is_served_and_what_is_converted(name: str, format_: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides=SIZES)
    write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(recipe_of(name), {}), format=format_)
    cast, served = load_servable(tmp_path / "m", recipe_of(name)), load_servable(tmp_path / "out")
    for linear in open_checkpoint(tmp_path / "m").linears:
        layers = cast.get_submodule(linear), served.get_submodule(linear)
        assert all(map(torch.equal, *map(tensors_of, layers)))  # type: ignore[arg-type]
    if name == "mxfp4-w4a16":
        with pytest.raises(ModelError, match="format 'modelopt' cannot express the recipe 'mxfp4-w4a16'"):
            convert_format(tmp_path / "out", tmp_path / "other", "modelopt")
    else:
        other = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}[format_]
        convert_format(tmp_path / "out", tmp_path / "other", other)
        convert_format(tmp_path / "other", tmp_path / "back", format_)
        for folder in ("other", "back"):
            layer = served_layer(tmp_path / folder)
            assert all(map(torch.equal, tensors_of(layer), tensors_of(served_layer(tmp_path / "out"))))
    with pytest.raises(ModelError, match="format 'fp8' always quantizes inputs"):
        convert_format(tmp_path / "out", tmp_path / "fp8", "fp8")
    assert not (tmp_path / "fp8").exists()
    bytes_ = sum(file.stat().st_size for file in (tmp_path / "out").glob("model*.safetensors"))
    assert estimate_weight_memory(tmp_path / "out", "stored").served == pytest.approx(bytes_, rel=0.05)


@pytest.mark.parametrize("file", ["compressed-tensors NVFP4A16", "compressed-tensors NVFP4"])
def test_convert_says_that_scales_of_inputs_are_dropped(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "m", file)
    assert main(["convert", str(tmp_path / "m"), "--out", str(tmp_path / "out"), "--format", "modelopt"]) == 0
    assert ("The result has no scales of inputs." in capsys.readouterr().err) is (file in WITH_INPUTS)


@pytest.mark.parametrize("format_", ["compressed-tensors", "modelopt"])
def test_four_over_six_is_recorded_and_converted(format_: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides=SIZES)
    recipe = Float4WeightOnly("nvfp4", four_over_six=True)
    write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(recipe, {}), format=format_)
    other = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}[format_]
    convert_format(tmp_path / "out", tmp_path / "other", other)
    for folder in ("out", "other"):
        matrix = open_checkpoint(tmp_path / folder).quantized_matrix(LINEAR)
        assert matrix is not None
        assert matrix.specs == (UNQUANTIZED, recipe.specs.linear["weight"])
        assert not [finding for finding in verify(tmp_path / folder) if finding.severity == "error"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if format_ == "compressed-tensors":
        scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
        assert scheme.weights is not None
        assert scheme.weights.observer_kwargs == {"four_over_six": True}


@torch.no_grad()
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["nvfp4-w4a16", "mxfp4-w4a16"])
def test_weights_are_exchanged_in_place_and_back(name: str, is_packed: bool, tmp_path: Path) -> None:
    for seed, folder in enumerate(("a", "b")):
        make_model("llama", tmp_path / f"m{folder}", overrides=SIZES | {"initializer_range": 0.02 * (seed + 1)})
        write_calibrated(tmp_path / folder, tmp_path / f"m{folder}", ScalingCheckpoint(recipe_of(name), {}))
    loaded = load(tmp_path / "a", EngineOptions(recipe="stored"))
    layer, x = loaded.runner.model.get_submodule(LINEAR), _input()
    before, expected = layer(x), served_layer(tmp_path / "b")(x)
    if is_packed:
        Packer(
            [module for module in loaded.runner.model.matrices() if not isinstance(module, BatchInvariantLinear)]
        ).pack()
    assert isinstance(layer, FrozenLinear)
    assert layer.is_packed is is_packed
    previous = exchange_weights(loaded.runner.model, read_weights(tmp_path / "b", loaded))
    assert torch.equal(layer(x), expected)
    exchange_weights(loaded.runner.model, previous)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("name", ["nvfp4-w4a16", "mxfp4-w4a16"])
def test_scales_of_another_file_quantize_the_weights_again(name: str, tmp_path: Path) -> None:
    """A row of one block has as many scales as a weight in FP8 per row."""
    columns = 16 if name.startswith("nv") else 32
    make_model(
        "llama", tmp_path / "m", overrides={"hidden_size": columns, "intermediate_size": columns, "head_dim": 16}
    )
    write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(recipe_of(name), {}))
    state = ScalingCheckpoint(
        DelayedScaling(amax_history_len=1, weight_granularity="row"),
        {f"{linear}.input": TensorScale(torch.tensor(8.0)) for linear in open_checkpoint(tmp_path / "m").linears},
        model=fingerprint(tmp_path / "out"),
    )
    save_scales(tmp_path / "scales.safetensors", state)
    layer = load_servable(tmp_path / "out", scales=tmp_path / "scales.safetensors").get_submodule(LINEAR)
    assert isinstance(layer, FrozenLinear)
    assert layer.weight_q.dtype is torch.float8_e4m3fn


def with_byte(value: int) -> Callable[[Tensor], Tensor]:
    def function(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(torch.uint8)[3, 1] = value
        return tensor

    return function


NV, MX = "compressed-tensors NVFP4A16", "compressed-tensors MXFP4A16"
BAD: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "zero": (NV, "weight_scale", with_byte(0), r"weight_scale holds the scale 0.0, which cannot be served"),
    "negative": (
        NV,
        "weight_scale",
        with_byte(0x80 | 9),
        r"weight_scale holds the scale -0.0\d+, which cannot be served",
    ),
    "NaN": (NV, "weight_scale", with_byte(0x7F), r"weight_scale holds the scale nan, which cannot be served"),
    "exponent NaN": (MX, "weight_scale", with_byte(255), r"weight_scale holds NaN or an exponent too large for BF16"),
    "exponent too large": (MX, "weight_scale", with_byte(253), r"weight_scale holds NaN or an exponent too large"),
    "missing": (NV, "weight_scale", lambda t: None, r"up_proj.weight is packed but has no weight_scale"),
    "shape": (
        NV,
        "weight_scale",
        lambda t: t[:, :4].contiguous(),
        r"\[256, 4\]; a weight of 256 x 128 in NVFP4 takes \[256, 8\]",
    ),
    "type": (
        NV,
        "weight_scale",
        lambda t: t.float(),
        r"is float32; the scales of 4-bit weights are exponents of 8 bits",
    ),
    "exponents": (
        NV,
        "weight_scale",
        lambda t: torch.full((256, 4), 127, dtype=torch.uint8),
        r"in MXFP4 by the type of .*weight_scale, and config.json has NVFP4",
    ),
    "no second": (NV, "weight_global_scale", lambda t: None, r"is in NVFP4 and lacks weight_global_scale"),
    "second zero": (NV, "weight_global_scale", lambda t: 0 * t, r"weight_global_scale holds the scale 0.0"),
    "second negative": (NV, "weight_global_scale", lambda t: -t, r"weight_global_scale holds the scale -"),
    "second NaN": (NV, "weight_global_scale", lambda t: t * torch.nan, r"weight_global_scale holds the scale nan"),
    "second for each row": (
        NV,
        "weight_global_scale",
        lambda t: t.repeat(256),
        r"weight_global_scale has the shape \[256\]",
    ),
    "decoding second": ("modelopt NVFP4", "weight_scale_2", lambda t: -t, r"weight_scale_2 holds the scale -"),
    "columns": (
        NV,
        "weight_packed",
        lambda t: t[:, :32].contiguous(),
        r"has the shape \[256, 32\]; config.json requires \[256, 64\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_sentence_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    file, suffix, function, message = BAD[name]
    write(tmp_path / "m", file)
    change(tmp_path / "m", suffix, function)
    for work in (load_servable, lambda path: convert_format(path, tmp_path / "out", "modelopt")):
        with pytest.raises(ModelError, match=message):
            work(tmp_path / "m")
    assert not (tmp_path / "out").exists()
    assert [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]


def test_a_second_scale_of_a_weight_in_fp8_is_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides=SIZES)
    write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(recipe_of("w8a16"), {}))
    tensors = load_file(tmp_path / "out" / "model.safetensors") | {f"{LINEAR}.weight_scale_2": torch.ones(1)}
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"up_proj.weight is FP8 and has .*weight_scale_2, which only NVFP4 has"):
        load_servable(tmp_path / "out")
    assert f"{LINEAR}.weight_scale_2" in [f.tensor for f in verify(tmp_path / "out") if f.severity == "error"]


def test_columns_that_are_no_whole_blocks_are_refused_before_a_file_is_written(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides={"hidden_size": 128, "intermediate_size": 144})
    write_tokenizer(tmp_path / "m")
    message = r"^model.layers.0.mlp.down_proj in MXFP4 needs a multiple of 32 input features, found 144"
    for work in (
        lambda: write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(recipe_of("mxfp4-w4a16"), {})),
        lambda: load_servable(tmp_path / "m", recipe_of("mxfp4-w4a16")),
        lambda: calibrate(tmp_path / "m", out=tmp_path / "out", recipe=recipe_of("mxfp4-w4a16"), samples=2, seq_len=16),
    ):
        with pytest.raises(RecipeError, match=message):
            work()
    assert not (tmp_path / "out").exists()
    assert served_layer(tmp_path / "m", recipe_of("nvfp4-w4a16")).is_4bit


@pytest.mark.parametrize(("file", "suffix"), [(NV, "weight_global_scale"), ("modelopt W4A16_NVFP4", "weight_scale_2")])
def test_verify_reports_the_second_scale_of_the_other_project(file: str, suffix: str, tmp_path: Path) -> None:
    """compressed-tensors stores the reciprocal of what ModelOpt stores."""
    write(tmp_path / "m", file)
    change(tmp_path / "m", suffix, lambda t: 1 / t)
    findings = [f for f in verify(tmp_path / "m") if f.severity == "error"]
    assert [(f.check, f.tensor) for f in findings] == [("reciprocal", f"{LINEAR}.{suffix}")]


@pytest.mark.parametrize("power", [2.0**-12, 2.0**12])
def test_verify_reports_a_weight_of_another_size_than_the_others(power: float, tmp_path: Path) -> None:
    write(tmp_path / "m", NV)
    change(tmp_path / "m", "weight_global_scale", lambda t: t * power)
    findings = [f for f in verify(tmp_path / "m") if f.severity == "error"]
    assert [(f.check, f.tensor) for f in findings] == [("implausible", f"{LINEAR}.weight_global_scale")]


@pytest.mark.parametrize(("file", "function"), [(NV, lambda t: t.roll(3, 1)), (MX, lambda t: t & 0xBB)])
def test_verify_reports_blocks_that_no_cast_produces(
    file: str, function: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """Codes of several blocks are mixed, or a block has no code above 1.5."""
    write(tmp_path / "m", file)
    change(tmp_path / "m", "weight_packed", function)
    findings = [f for f in verify(tmp_path / "m") if f.severity == "error"]
    assert [f.tensor for f in findings] == [f"{LINEAR}.weight_packed"]
    assert "order" in findings[0].do
