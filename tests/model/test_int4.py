"""INT4 weights of compressed-tensors (`pack-quantized`) are read as high precision, as its own decompression does."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8serve.engine.loading import load
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import ModelError
from fp8serve.fp8.recipe import from_name
from fp8serve.inspection import inspect
from fp8serve.model.checkpoint import load_servable, load_trainable, open_checkpoint
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.verify import verify
from tests.model.oracle import make_model
from tests.model.test_microscaling import quantized as mx_quantized

LINEAR = "model.layers.0.mlp.up_proj"
SIZES = {"hidden_size": 128, "intermediate_size": 256}
KINDS = {  # group size, or None for a scale per channel; whether it is symmetric; the type of the scales
    "group": (32, True, torch.bfloat16),
    "group, asymmetric": (64, False, torch.bfloat16),
    "channel": (None, True, torch.bfloat16),
    "channel, asymmetric": (None, False, torch.float16),
    "group in FP32": (128, True, torch.float32),
}


def pack(codes: Tensor) -> Tensor:
    """int32 [N, ceil(K / 8)] of codes 0 to 15, the first in the lowest bits. Independent of the product."""
    padded = np.pad(codes.numpy().astype(np.uint32), ((0, 0), (0, -codes.shape[1] % 8))).reshape(len(codes), -1, 8)
    numbers = sum(padded[:, :, i] << np.uint32(4 * i) for i in range(8))
    return torch.from_numpy(np.asarray(numbers, dtype=np.uint32).view(np.int32).copy())


def quantized(weight: Tensor, group: int | None, is_symmetric: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a weight by suffix."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, group or columns)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (torch.maximum(low.abs(), high.abs()) / 7 if is_symmetric else (high - low) / 15).to(dtype)
    zero = torch.zeros_like(low) if is_symmetric else (-8 - low / scale.float()).round().clamp(-8, 7)
    codes = ((groups / scale.float()).round() + zero).clamp(-8, 7).view(rows, columns) + 8
    tensors = {
        "weight_packed": pack(codes),
        "weight_scale": scale.view(rows, -1),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return (
        tensors if is_symmetric else tensors | {"weight_zero_point": pack(zero.view(rows, -1).t() + 8).t().contiguous()}
    )


def configuration(group: int | None, is_symmetric: bool, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "channel" if group is None else "group", "group_size": group,
               "symmetric": is_symmetric, "dynamic": False, **others}  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme},
            "ignore": ["lm_head"]}  # fmt: skip


def edit(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write(out: Path, kind: str, model: str = "llama", **sizes: int) -> dict[str, Tensor]:
    """Writes a directory; returns the weight of each linear by compressed-tensors' decompression."""
    group, is_symmetric, dtype = KINDS[kind]
    make_model(model, out, overrides=SIZES | sizes)
    config = configuration(group, is_symmetric)
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    decompress = BaseCompressor.get_value_from_registry("pack-quantized").decompress
    tensors, expected = load_file(out / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        owner, parts = name.removesuffix(".weight"), quantized(tensors.pop(name), group, is_symmetric, dtype)
        expected[name] = decompress(parts, scheme)["weight"]
        tensors |= {f"{owner}.{suffix}": tensor for suffix, tensor in parts.items()}
    save_file(tensors, out / "model.safetensors")
    edit(out, quantization_config=config)
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_compressed_tensors(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = write(tmp_path / "m", kind)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert not checkpoint.quantized_linears
    for name, weight in expected.items():
        assert checkpoint[name].dtype is weight.dtype
        assert torch.equal(checkpoint[name], weight)
    with caplog.at_level(logging.WARNING, "fp8serve.engine"):
        loaded = load(tmp_path / "m", EngineOptions(recipe="stored"))
    assert "14 weights, model.layers.0." in caplog.text
    assert "are in INT4 and run in BF16" in caplog.text
    assert torch.equal(loaded.runner.model.get_parameter(f"{LINEAR}.weight"), expected[f"{LINEAR}.weight"].bfloat16())
    trainable = load_trainable(tmp_path / "m").get_parameter(f"{LINEAR}.weight")
    assert torch.equal(trainable, expected[f"{LINEAR}.weight"].float())
    assert load_servable(tmp_path / "m", from_name("nvfp4-w4a16")).get_submodule(LINEAR).is_4bit
    assert not [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]
    report = inspect(tmp_path / "m")
    assert report["problem"] is None
    assert any("are in INT4 and run in BF16" in note for note in report["notes"])
    in_bf16 = sum(parameter.numel() * 2 for parameter in loaded.runner.model.parameters())
    assert estimate_weight_memory(tmp_path / "m", "stored").served == pytest.approx(in_bf16, rel=0.05)
    with pytest.raises(ModelError, match="holds no quantized layers to be written as modelopt"):
        convert_format(tmp_path / "m", tmp_path / "out", "modelopt")


def test_inspect_counts_the_widened_weights_of_all_formats(tmp_path: Path) -> None:
    write(tmp_path / "m", "group")
    codes, scales, _ = mx_quantized(torch.randn(256, 128), 4)
    path, other = tmp_path / "m" / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = {k: v for k, v in load_file(path).items() if not k.startswith(f"{other}.")}
    save_file(tensors | {f"{other}.weight_packed": codes, f"{other}.weight_scale": scales}, path)
    report = inspect(tmp_path / "m")
    assert "14 weights that run in BF16" in report["holds"]
    assert [note.partition(",")[0] for note in report["notes"]] == ["1 weights", "13 weights"]


def test_experts_are_read(tmp_path: Path) -> None:
    expected = write(tmp_path / "m", "group", "qwen3-moe", moe_intermediate_size=64)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert sum(".experts." in name for name in expected) > 8
    assert all(torch.equal(checkpoint[name], weight) for name, weight in expected.items())
    load_servable(tmp_path / "m")


def replaced(position: tuple[int, ...], value: float) -> Callable[[Tensor], Tensor]:
    def function(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[position] = value
        return tensor

    return function


BAD: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "zero scale": ("group", "weight_scale", replaced((3, 1), 0.0), "weight_scale holds the scale 0.0"),
    "negative scale": ("group", "weight_scale", replaced((3, 1), -0.5), "weight_scale holds the scale -0.5"),
    "NaN scale": ("group", "weight_scale", replaced((3, 1), torch.nan), "weight_scale holds the scale nan"),
    "infinite scale": ("channel", "weight_scale", replaced((3, 0), torch.inf), "weight_scale holds the scale inf"),
    "scales of another group": (
        "group", "weight_scale", lambda t: t[:, ::2].contiguous(),
        r"weight_scale is bfloat16 \[256, 2\]; an INT4 weight of 256 x 128 in groups of 32 takes .* \[256, 4\]",
    ),
    "scales in FP8": ("group", "weight_scale", lambda t: t.to(torch.float8_e4m3fn), "weight_scale is float8_e4m3fn"),
    "no scales": ("group", "weight_scale", lambda t: None, "an INT4 weight and lacks weight_scale; download"),
    "no shape": ("group", "weight_shape", lambda t: None, "an INT4 weight and lacks weight_shape; download"),
    "shape of three": ("group", "weight_shape", lambda t: torch.tensor([1, 2, 3]), r"shape is int64 \[3\] where"),
    "negative shape": ("group", "weight_shape", lambda t: -t, r"weight_shape is \[-256, -128\], and the number"),
    "huge shape": ("channel", "weight_shape", lambda t: t * 2**40, r"weight_packed is int32 \[256, 16\]"),
    "columns": ("group", "weight_shape", lambda t: t - torch.tensor([0, 8]), "must be a multiple of the group of 32"),
    "other rows": ("channel", "weight_shape", lambda t: t - torch.tensor([1, 0]), r"packed is int32 \[256, 16\]"),
    "other width": ("channel", "weight_packed", lambda t: t[:, :8].contiguous(), r"weight_packed is int32 \[256, 8\]"),
    "no zero point": ("group, asymmetric", "weight_zero_point", lambda t: None, "lacks its weight_zero_point; correct"),
    "other zero point": (
        "group, asymmetric", "weight_zero_point", lambda t: t[:, :1].contiguous(),
        r"weight_zero_point is int32 \[32, 1\]; an INT4 weight of 256 x 128 in groups of 64 takes int32 \[32, 2\]",
    ),
}  # fmt: skip


def change(directory: Path, suffix: str, function: Callable[[Tensor], Tensor | None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    changed = function(tensors.pop(f"{LINEAR}.{suffix}"))
    tensors |= {} if changed is None else {f"{LINEAR}.{suffix}": changed}
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_sentence_and_found(name: str, tmp_path: Path) -> None:
    kind, suffix, function, message = BAD[name]
    write(tmp_path / "m", kind)
    change(tmp_path / "m", suffix, function)
    with pytest.raises(ModelError, match=message):
        load_servable(tmp_path / "m")
    assert [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "weight_g_idx",
            "weight_g_idx orders the columns of an INT4 weight by their activations, which is not supported",
        ),
        ("weight_zero_point", "up_proj is symmetric INT4, and the file has its weight_zero_point"),
    ],
)
def test_further_tensors_of_a_weight_are_refused(part: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "m", "group")
    tensors = load_file(tmp_path / "m" / "model.safetensors") | {f"{LINEAR}.{part}": torch.zeros(32, 4).int()}
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_servable(tmp_path / "m")
    assert [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (configuration(32, True, actorder="group"), "with actorder 'group', which is not supported"),
        (configuration(32, True, strategy="tensor"), "with INT4 weight strategy 'tensor', which is not supported"),
        (configuration(-1, True), "with INT4 group_size -1, which is not supported"),
        (configuration(32, True, num_bits=8), "with weights '8-bit int', which is not supported"),
        (configuration(64, True), r"weight_scale is bfloat16 \[.*, 8\]; an INT4 weight .* in groups of 64"),
        (None, "is in INT4, and config.json has no group with it"),
        ({"quant_method": "fp8"}, "is in INT4, and config.json has FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "is in INT4, and config.json has NVFP4"),
    ],
)  # fmt: skip
def test_contradicting_configurations_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "m", "group")
    edit(tmp_path / "m", quantization_config=config)
    with pytest.raises(ModelError, match=message):
        load_servable(tmp_path / "m")
    assert [finding for finding in verify(tmp_path / "m") if finding.severity == "error"]


def test_fp8_weights_under_a_configuration_of_int4_are_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides=SIZES)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors[f"{LINEAR}.weight"] = tensors[f"{LINEAR}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors | {f"{LINEAR}.weight_scale": torch.ones(1)}, tmp_path / "m" / "model.safetensors")
    edit(tmp_path / "m", quantization_config=configuration(32, True))
    with pytest.raises(ModelError, match="up_proj has FP8 weights but quantization_config says INT4; correct"):
        load_servable(tmp_path / "m")
    assert any("is FP8, but quantization_config says INT4" in finding.what for finding in verify(tmp_path / "m"))


def test_verify_finds_mxfp4_weights_under_a_configuration_of_int4(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "m", overrides=SIZES)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    rows, columns = tensors.pop(f"{LINEAR}.weight").shape
    tensors[f"{LINEAR}.weight_packed"] = torch.full((rows, columns // 2), 0x21, dtype=torch.uint8)
    tensors[f"{LINEAR}.weight_scale"] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    edit(tmp_path / "m", quantization_config=configuration(32, True))
    whats = [finding.what for finding in verify(tmp_path / "m")]
    assert "is in MXFP4, but quantization_config says INT4" in whats
