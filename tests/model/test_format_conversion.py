"""Conversion between formats keeps the FP8 codes: logits stay equal, and transformers loads the result."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8serve.cli import main
from fp8serve.errors import ModelError
from fp8serve.model.checkpoint import kv_scales, load_servable, open_checkpoint
from fp8serve.model.export import write_calibrated
from fp8serve.model.format_conversion import convert_format
from fp8serve.model.formats.scales import load_scales
from fp8serve.model.verify import verify
from tests.model import checkpoints as drafts
from tests.model.checkpoints import Draft
from tests.model.oracle import all_logits, state_for
from tests.model.test_compatibility import assert_same_parameters, exact_dtype, logits, read_by_transformers

IDS = [1, 5, 9, 33, 60, 2]
Base = Callable[[], Draft]


def static() -> Draft:
    return drafts.fp8("fp8-static", spelled="weight_scale_inv", inputs="activation_scale", cache="{}_scale")


def modelopt_rows() -> Draft:
    return drafts.fp8("modelopt-channel", "row", convert_scale=lambda scale: scale.reshape(-1))


def fp8_dynamic() -> Draft:
    return drafts.fp8("fp8-dynamic")


def ct_blocks() -> Draft:
    return drafts.fp8("ct-block", "block", convert_scale=lambda scale: scale.bfloat16())


def deepseek_v4() -> Draft:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return drafts.fp8(config, "block", "scale", lambda s: s.to(torch.float8_e8m0fnu), power_of_2=True)


CONVERTED: list[tuple[Base, str]] = [
    (drafts.static, "fp8"), (drafts.static, "modelopt"), (drafts.static, "compressed-tensors"),
    (static, "compressed-tensors"), (static, "modelopt"),
    (drafts.rows, "modelopt"), (modelopt_rows, "compressed-tensors"),
    (fp8_dynamic, "compressed-tensors"), (fp8_dynamic, "modelopt"), (fp8_dynamic, "fp8"),
    (drafts.blocks, "compressed-tensors"), (ct_blocks, "fp8"), (deepseek_v4, "fp8"),
    (lambda: drafts.fp8("ct-weights", "row"), "compressed-tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "format_"), CONVERTED)
def test_the_model_stays_the_same(base: Base, format_: str, tmp_path: Path) -> None:
    source = base().write(tmp_path / "source")
    convert_format(source, tmp_path / "out", format_)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for name in before.quantized_linears:
        bits = [c.shards[f"{name}.weight"].view(torch.uint8) for c in (before, after)]
        assert torch.equal(*bits)
    results = [all_logits(load_servable(folder), IDS) for folder in (source, tmp_path / "out")]
    assert torch.equal(*results)
    assert kv_scales(source) == kv_scales(tmp_path / "out")
    assert [f for f in verify(tmp_path / "out") if f.severity == "error"] == []


@pytest.mark.parametrize(
    ("base", "format_"),
    [(static, "compressed-tensors"), (modelopt_rows, "compressed-tensors"), (fp8_dynamic, "compressed-tensors"),
     (ct_blocks, "fp8"), (deepseek_v4, "fp8")],
)  # fmt: skip
def test_transformers_loads_what_is_written(base: Base, format_: str, tmp_path: Path) -> None:
    source = base().write(tmp_path / "source")
    convert_format(source, tmp_path / "out", format_)
    theirs, problems = read_by_transformers(tmp_path / "out", exact_dtype(format_))
    assert problems == {}
    assert_same_parameters(theirs, tmp_path / "out", exact_dtype(format_))
    assert logits(theirs).isfinite().all()


def weight_only_mxfp8() -> drafts.Draft:
    draft = drafts.mx(8)
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    draft.config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return draft


REFUSED: list[tuple[Base, str, str]] = [
    (
        drafts.blocks,
        "modelopt",
        "cannot express the recipe 'block', so that the weights of .* quantized again; calibrate",
    ),
    (drafts.rows, "fp8", "has no scale per output channel, so that the weights of .* quantized again"),
    (lambda: drafts.fp8("ct-weights", "row"), "fp8", "always quantizes inputs, so that"),
    (drafts.plain, "fp8", "holds no quantized layers to be written as fp8; calibrate it with --format fp8"),
    (lambda: drafts.mx(8), "fp8", "cannot express the recipe 'mxfp8', so that .* quantized again"),
    (lambda: drafts.mx(4), "fp8", "always quantizes inputs, so that"),
    (
        lambda: drafts.fp8("modelopt-block", "block", convert_scale=lambda s: s.reshape(len(s), 1, s.shape[1], 1)),
        "compressed-tensors",
        "has weights with a scale per block128x128 and unquantized inputs, which no recipe .* serve it as it is",
    ),
    (
        weight_only_mxfp8,
        "compressed-tensors",
        "has weights with a scale per block1x32 and unquantized inputs, which no recipe .* serve it as it is",
    ),
]


@pytest.mark.parametrize(("base", "format_", "message"), REFUSED)
def test_conversions_that_would_round_are_refused(base: Base, format_: str, message: str, tmp_path: Path) -> None:
    source = base().write(tmp_path / "source")
    with pytest.raises(ModelError, match=message):
        convert_format(source, tmp_path / "out", format_)
    assert not (tmp_path / "out").exists()


def test_conversion_keeps_amax_histories(tmp_path: Path) -> None:
    source = drafts.plain().write(tmp_path / "source")
    write_calibrated(tmp_path / "fp8", source, state_for(source, "delayed"))
    convert_format(tmp_path / "fp8", tmp_path / "out", "modelopt")
    before, after = (load_scales(tmp_path / name / "scales.safetensors") for name in ("fp8", "out"))
    for key, entry in before.tensors.items():
        assert entry.amax_history is not None
        assert after.tensors[key].amax_history is not None
        assert torch.equal(entry.amax_history, after.tensors[key].amax_history)
        assert torch.equal(entry.scale, after.tensors[key].scale)


def test_the_command_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = drafts.static().write(tmp_path / "source")
    assert main(["convert", str(source), "--out", str(tmp_path / "out"), "--format", "modelopt"]) == 0
    assert "in FP8, as modelopt, with the same FP8 values" in capsys.readouterr().out
    assert (tmp_path / "out" / "hf_quant_config.json").exists()
    assert f"{drafts.NAMES[0]}.k_scale".replace("q_proj", "k_proj") in load_file(tmp_path / "out" / "model.safetensors")
    assert main(["convert", str(source), "--out", str(tmp_path / "two")]) == 1
    assert "Give the format of the result" in capsys.readouterr().err


def test_a_weight_of_one_block_is_written(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_dir("llama")
    write_calibrated(tmp_path / "fp8", source, state_for(source, "block"))
    convert_format(tmp_path / "fp8", tmp_path / "out", "fp8")
    results = [all_logits(load_servable(tmp_path / name), IDS) for name in ("fp8", "out")]
    assert torch.equal(*results)


def test_a_repeated_scale_does_not_count_as_stale(tmp_path: Path) -> None:
    draft = fp8_dynamic()
    weight = draft.tensors[f"{drafts.NAMES[0]}.weight"]
    weight[: len(weight) // 2] = torch.ones(1).to(weight.dtype)  # rows that have a small part of the range
    convert_format(draft.write(tmp_path / "source"), tmp_path / "out", "compressed-tensors")
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("more", [(), ("--format", "fp8"), ("--format", "gguf")])
def test_a_missing_source_is_reported(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "model"), "--out", str(tmp_path / "out"), *more]) == 1
    assert f"{tmp_path / 'model'} is not a directory; give a model directory" in capsys.readouterr().err


def test_a_file_that_is_no_gguf_gets_its_own_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = drafts.static().write(tmp_path / "source") / "model.safetensors"
    assert main(["convert", str(source), "--out", str(tmp_path / "out"), "--format", "fp8"]) == 1
    assert "model.safetensors is not a GGUF file" in capsys.readouterr().err
