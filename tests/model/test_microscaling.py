"""MXFP8 and MXFP4 layers are served and written as such, MXFP8 is trained, too; E8M0 scales are powers of two."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8serve.engine.loading import load
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import ModelError, RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.microscaling import dequantize_to_bf16
from fp8serve.fp8.recipe import MXFP8BlockScaling
from fp8serve.fp8.spec import MXFP8, UNQUANTIZED
from fp8serve.model.checkpoint import ScalingCheckpoint, load_servable, open_checkpoint
from fp8serve.model.export import write_calibrated
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.formats.microscaling import mxfp4
from fp8serve.model.verify import verify
from tests.model.oracle import make_model

LINEAR = "model.layers.0.mlp.up_proj"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def edit(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def exponents(weight: Tensor, largest: float) -> Tensor:
    """uint8 [N, K / 32]: powers of two that bring each block's amax to at most `largest`."""
    amax = weight.unflatten(-1, (-1, 32)).abs().amax(-1)
    return ((amax / largest).log2().ceil() + 127).clamp(0, 254).to(torch.uint8)


def quantized(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (codes or packed nibbles, exponents, what they stand for): written independently of the product."""
    scales = exponents(weight, 448 if bits == 8 else 6)
    powers = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    if bits == 8:
        codes = (weight / powers).to(torch.float8_e4m3fn)
        return codes, scales, codes.float() * powers
    grid = torch.tensor([*E2M1, *(-v for v in E2M1)])
    nibbles = ((weight / powers).unsqueeze(-1) - grid).abs().argmin(-1).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales, grid[nibbles.long()] * powers


def write_mx(out: Path, bits: int, quantization: dict[str, Any], scale: str, as_e8m0: bool) -> dict[str, Tensor]:
    """Writes an MX directory; returns the weight of each linear."""
    make_model("llama", out, overrides={"hidden_size": 128, "intermediate_size": 256})
    tensors, expected = load_file(out / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        codes, scales, expected[name] = quantized(tensors.pop(name).float(), bits)
        owner = name.removesuffix(".weight")
        packed = bits == 4 and quantization["quant_method"] != "modelopt"
        tensors[f"{owner}.weight_packed" if packed else name] = codes
        tensors[f"{owner}.{scale}"] = scales.view(torch.float8_e8m0fnu) if as_e8m0 else scales
    save_file(tensors, out / "model.safetensors")
    edit(out, quantization_config=quantization)
    return expected


def compressed(preset: str, form: str) -> dict[str, Any]:
    scheme = json.loads(preset_name_to_scheme(preset, ["Linear"]).model_dump_json())
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": scheme}, "ignore": ["lm_head"]}


FORMS: dict[str, tuple[int, dict[str, Any], str, bool]] = {
    "compressed-tensors MXFP8A16": (8, compressed("MXFP8A16", "mxfp8-quantized"), "weight_scale", False),
    "compressed-tensors MXFP8": (8, compressed("MXFP8", "mxfp8-quantized"), "weight_scale", False),
    "compressed-tensors MXFP4": (4, compressed("MXFP4A16", "mxfp4-pack-quantized"), "weight_scale", False),
    "modelopt MXFP4": (4, {"quant_method": "modelopt", "quant_algo": "MXFP4"}, "weight_scale", False),
    "modelopt": (8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "weight_scale", False),
    "fp8 in blocks of 32": (
        8,
        {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        "weight_scale_inv",
        True,
    ),
    "mxfp8": (8, {"quant_method": "mxfp8"}, "scale", True),
}


@pytest.mark.parametrize("form", FORMS)
def test_mx_weights_are_read_exactly(form: str, tmp_path: Path) -> None:
    expected = write_mx(tmp_path / "m", *FORMS[form])
    checkpoint = open_checkpoint(tmp_path / "m")
    is_mxfp8 = FORMS[form][0] == 8
    assert sorted(checkpoint.quantized_linears) == sorted(checkpoint.linears)
    for name, weight in expected.items():
        assert checkpoint[name].dtype is torch.float32
        assert torch.equal(checkpoint[name].float(), weight)
    served = load_servable(tmp_path / "m").get_submodule(LINEAR)
    assert isinstance(served, FrozenLinear)
    assert served.input_spec == (MXFP8 if is_mxfp8 and "A16" not in form else UNQUANTIZED)
    assert served.weight_scale_inv.dtype is torch.float8_e8m0fnu
    assert served.is_4bit is not is_mxfp8
    assert torch.equal(served.quantized_weight.dequantize(), expected[f"{LINEAR}.weight"])
    assert isinstance(load_servable(tmp_path / "m", _rowwise()).get_submodule(LINEAR), FrozenLinear)


def _rowwise() -> Any:
    from fp8serve import recipe

    return recipe.from_name("rowwise")


@pytest.mark.parametrize(("preset", "form"), [("MXFP8", "mxfp8-quantized"), ("MXFP4A16", "mxfp4-pack-quantized")])
def test_mx_blocks_mean_what_compressed_tensors_makes_of_them(preset: str, form: str) -> None:
    weight = torch.randn(6, 64)
    codes, scales, _ = quantized(weight, 8 if preset == "MXFP8" else 4)
    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = form
    packed = {"weight_packed" if preset != "MXFP8" else "weight": codes, "weight_scale": scales}
    theirs = BaseCompressor.get_value_from_registry(form).decompress(packed, scheme)["weight"]
    ours = dequantize_to_bf16(codes, scales.view(torch.float8_e8m0fnu)) if preset == "MXFP8" else mxfp4(codes, scales)
    assert torch.equal(ours.float(), theirs.float())


def test_an_exponent_that_is_nan_is_refused_when_its_weight_is_read(tmp_path: Path) -> None:
    write_mx(tmp_path / "m", *FORMS["mxfp8"])
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors[f"{LINEAR}.scale"].view(torch.uint8)[0, 0] = 255
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "m")
    with pytest.raises(ModelError, match=r"up_proj.scale holds NaN or an exponent too large"):
        checkpoint[f"{LINEAR}.weight"]


def test_mxfp8_without_a_configuration_runs_in_bf16(tmp_path: Path) -> None:
    expected = write_mx(tmp_path / "m", *FORMS["mxfp8"])
    edit(tmp_path / "m", quantization_config=None)
    served = load_servable(tmp_path / "m", "bf16").get_parameter(f"{LINEAR}.weight")
    assert torch.equal(served.float(), expected[f"{LINEAR}.weight"])


def change_scale(directory: Path, change: Callable[[Tensor], Tensor | None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    changed = change(tensors.pop(f"{LINEAR}.weight_scale"))
    tensors |= {} if changed is None else {f"{LINEAR}.weight_scale": changed}
    save_file(tensors, directory / "model.safetensors")


def with_nan(scale: Tensor) -> Tensor:
    scale[3, 1] = 255
    return scale


BAD_SCALES: dict[str, tuple[Callable[[Tensor], Tensor | None], str]] = {
    "NaN": (with_nan, r"up_proj.weight_scale holds NaN or an exponent too large"),
    "missing": (lambda scale: None, r"up_proj.weight is FP8 but has no weight_scale"),
    "another shape": (
        lambda scale: scale[:, :2].contiguous(),
        r"\[256, 2\]; a weight of 256 x 128 in MX blocks takes \[256, 4\]",
    ),
    "FP32": (lambda scale: torch.ones(256, 1), r"is float32 \[256, 1\]; config.json says that the layer is in MXFP8"),
    "FP32 of this shape": (
        lambda scale: torch.ones(256, 4),
        r"weight_scale is float32 and has the shape \[256, 4\] of MX blocks, whose scales are exponents of 8 bits",
    ),
}


@pytest.mark.parametrize("form", ["compressed-tensors MXFP4", "modelopt MXFP4"])
def test_fp8_weights_under_a_configuration_of_mxfp4_are_refused(form: str, tmp_path: Path) -> None:
    write_mx(tmp_path / "m", *FORMS["compressed-tensors MXFP8"])
    edit(tmp_path / "m", quantization_config=FORMS[form][1])
    with pytest.raises(ModelError, match=r"_proj has FP8 weights but quantization_config says MXFP4; correct"):
        load_servable(tmp_path / "m")
    findings = verify(tmp_path / "m")
    assert any(f.severity == "error" and f.what == "is FP8, but quantization_config says MXFP4" for f in findings)


@pytest.mark.parametrize("config", [
    FORMS["compressed-tensors MXFP8"][1] | {"ignore": ["lm_head", LINEAR]},
    FORMS["modelopt"][1] | {"ignore": ["lm_head"], "exclude_modules": ["*.layers.0.mlp.up*"]},
], ids=["compressed-tensors", "modelopt"])  # fmt: skip
def test_a_layer_that_is_ignored_and_has_fp8_weights_is_reported(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_mx(tmp_path / "m", *FORMS["compressed-tensors MXFP8"])
    edit(tmp_path / "m", quantization_config=config)
    assert f"{LINEAR}.weight" in [finding.tensor for finding in verify(tmp_path / "m") if "leaves" in finding.what]
    with caplog.at_level(logging.WARNING, "fp8serve.engine"):
        load(tmp_path / "m", EngineOptions(recipe="stored"))
    assert f"1 layers with FP8 weights, {LINEAR} among them, are ignored by quantization_config" in caplog.text


@pytest.mark.parametrize("name", BAD_SCALES)
def test_bad_scales_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    change, message = BAD_SCALES[name]
    write_mx(tmp_path / "m", *FORMS["compressed-tensors MXFP8"])
    change_scale(tmp_path / "m", change)
    for work in (load_servable, lambda path: convert_format(path, tmp_path / "out", "modelopt")):
        with pytest.raises(ModelError, match=message):
            work(tmp_path / "m")
    assert not (tmp_path / "out").exists()


def test_columns_that_are_no_whole_blocks_are_refused_before_a_file_is_written(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides={"hidden_size": 128, "intermediate_size": 144})
    message = r"^model.layers.0.mlp.down_proj in MXFP8 needs a multiple of 32 input features, found 144"
    with pytest.raises(RecipeError, match=message):
        write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(MXFP8BlockScaling(), {}))
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match=message):
        load_servable(tmp_path / "m", MXFP8BlockScaling())


@pytest.mark.parametrize("format_", ["compressed-tensors", "modelopt"])
def test_what_is_written_is_what_is_served(format_: str, tmp_path: Path) -> None:
    """The directory has the codes and scales that serving with the recipe computes, and converts without a change."""
    make_model("llama", tmp_path / "m", overrides={"hidden_size": 128, "intermediate_size": 256})
    write_calibrated(tmp_path / "out", tmp_path / "m", ScalingCheckpoint(MXFP8BlockScaling(), {}), format=format_)
    served, cast = load_servable(tmp_path / "out"), load_servable(tmp_path / "m", MXFP8BlockScaling())
    for name, module in cast.named_modules():
        if isinstance(module, FrozenLinear):
            other = served.get_submodule(name)
            assert isinstance(other, FrozenLinear)
            assert other.input_spec == module.input_spec == MXFP8
            for tensor in ("weight_q", "weight_scale_inv"):
                a, b = (getattr(m, tensor).view(torch.uint8) for m in (other, module))
                assert torch.equal(a, b)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if format_ == "compressed-tensors":
        scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
        preset = preset_name_to_scheme("MXFP8", ["Linear"])
        for ours, theirs in ((scheme.weights, preset.weights), (scheme.input_activations, preset.input_activations)):
            assert ours is not None
            assert theirs is not None
            for field in ("num_bits", "type", "strategy", "group_size", "scale_dtype", "dynamic", "symmetric"):
                assert getattr(ours, field) == getattr(theirs, field)
        assert config["format"] == scheme.format == "mxfp8-quantized"
    else:
        assert config["quant_algo"] == "MXFP8"
    assert load_file(tmp_path / "out" / "model.safetensors")[f"{LINEAR}.weight_scale"].dtype is torch.uint8
    other_format = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors"}[format_]
    convert_format(tmp_path / "out", tmp_path / "converted", other_format)
    before, after = (load_file(tmp_path / p / "model.safetensors") for p in ("out", "converted"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in before)
    with pytest.raises(ModelError, match=r"The format 'fp8' cannot express the recipe 'mxfp8'"):
        convert_format(tmp_path / "out", tmp_path / "fp8", "fp8")


def test_the_engine_says_that_mxfp4_weights_without_a_group_run_in_bf16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = compressed("MXFP4A16", "mxfp4-pack-quantized")
    config["config_groups"]["g"]["targets"] = ["lm_head"]
    write_mx(tmp_path / "m", 4, config, "weight_scale", False)
    with caplog.at_level(logging.WARNING, "fp8serve.engine"):
        load(tmp_path / "m", EngineOptions(recipe="stored"))
    assert "are in MX blocks of 32 and run in BF16" in caplog.text


def test_scales_of_deepseek_v4_are_powers_of_two(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """E4M3 weights with `.scale` in E8M0 for 128 x 128 blocks, and inputs whose scales are rounded to powers of two."""
    out = tmp_path / "m"
    make_model("llama", out, overrides={"hidden_size": 256, "intermediate_size": 384})
    tensors = load_file(out / "model.safetensors")
    scales = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        owner, weight = name.removesuffix(".weight"), tensors[name].float()
        rows, cols = (-(-size // 128) for size in weight.shape)
        scales[owner] = torch.exp2(torch.randint(-12, -10, (rows, cols)).float())
        tensors[name] = weight.to(torch.float8_e4m3fn)
        tensors[f"{owner}.scale"] = scales[owner].to(torch.float8_e8m0fnu)
    save_file(tensors, out / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    edit(out, quantization_config=config)
    layer = load_servable(out).get_submodule(LINEAR)
    assert isinstance(layer, FrozenLinear)
    assert torch.equal(layer.weight_scale_inv, scales[LINEAR])
    assert layer.input_spec.granularity == "block1x128"
    assert layer.input_spec.scale_format == "power_of_2"
    assert layer(torch.randn(3, 256).bfloat16()).isfinite().all()


def test_fbgemm_releases_are_read_as_per_channel(tmp_path: Path) -> None:
    out = tmp_path / "m"
    make_model("llama", out)
    tensors = load_file(out / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[name], tensors[f"{name}_scale"] = (weight / scale).to(torch.float8_e4m3fn), scale
    save_file(tensors, out / "model.safetensors")
    edit(out, quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})
    layer = load_servable(out).get_submodule(LINEAR)
    assert isinstance(layer, FrozenLinear)
    assert layer.input_spec.granularity == "row"
