"""`inspect` shows every scale of a checkpoint and, if it cannot be loaded, the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.cli import main
from fp8serve.errors import ModelError
from fp8serve.inspection import inspect
from fp8serve.model.export import write_calibrated
from tests.model.oracle import state_for

LINEAR = "model.layers.0.mlp.up_proj"
ModelDir = Callable[[str], Path]


@pytest.fixture
def calibrated(model_dir: ModelDir, tmp_path: Path) -> Path:
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state_for(model_dir("llama")))
    return tmp_path / "fp8"


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {scale["key"]: scale for scale in report["scales"]}


def rename_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))


def test_a_model_shows_both_directions(calibrated: Path) -> None:
    report = inspect(calibrated)
    theirs, ours = (rows(report)[f"{LINEAR}.{key}"] for key in ("input_scale", "input.scale"))
    assert (theirs["tensor"], theirs["direction"], theirs["origin"][:17]) == (
        f"{LINEAR}.input",
        "dequantizes",
        "model.safetensors",
    )
    assert (ours["tensor"], ours["direction"]) == (f"{LINEAR}.input", "quantizes")
    assert theirs["largest"] == pytest.approx(1 / ours["largest"])
    assert len(ours["history"]) == 2
    assert len(report["scales"]) == 14 * 4
    assert not any(scale["problem"] for scale in report["scales"])


def test_an_unknown_architecture_shows_the_same_scales(calibrated: Path) -> None:
    original_report = inspect(calibrated)
    rename_architecture(calibrated)
    report = inspect(calibrated)
    assert report["holds"] == "a model that cannot be loaded here"
    assert "OtherForCausalLM" in report["problem"]
    values = [
        {key: (s["tensor"], s["largest"], s["history"]) for key, s in rows(r).items()}
        for r in (original_report, report)
    ]
    assert values[0] == values[1]


def test_the_command_shows_what_cannot_be_loaded_and_fails(
    calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rename_architecture(calibrated)
    assert main(["inspect", str(calibrated)]) == 1
    printed = capsys.readouterr()
    assert f"{LINEAR}.input" in printed.out
    assert "cannot be served" in printed.err
    assert "OtherForCausalLM" in printed.err


def test_a_missing_shard_leaves_the_scales_of_the_others(calibrated: Path) -> None:
    tensors = load_file(calibrated / "model.safetensors")
    here = {key: tensor for key, tensor in tensors.items() if "layers.0." in key}
    save_file(here, calibrated / "one.safetensors")
    places = {key: "one.safetensors" if key in here else "two.safetensors" for key in tensors}
    (calibrated / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (calibrated / "model.safetensors").unlink()
    (calibrated / "scales.safetensors").unlink()
    report = inspect(calibrated)
    assert "two.safetensors" in report["problem"]
    assert set(rows(report)) == {key for key in here if key.endswith("_scale")}


def test_a_file_of_weights_on_its_own_marks_what_is_unknown_or_bad(calibrated: Path) -> None:
    path = calibrated / "model.safetensors"
    bad = {
        f"{LINEAR}.input_scale": torch.tensor([0.0]),
        f"{LINEAR}.weight_scale_3": torch.ones(1),
        f"{LINEAR}.output_scale": torch.ones(0),
    }
    save_file(load_file(path) | bad, path)
    problems = {key: scale["problem"] for key, scale in rows(inspect(path)).items() if scale["problem"]}
    assert problems == {
        f"{LINEAR}.input_scale": "holds 0.0, which cannot be served",
        f"{LINEAR}.weight_scale_3": "has a meaning that is not known",
        f"{LINEAR}.output_scale": "has a meaning that is not known",
    }


def test_an_empty_scale_is_a_problem(tmp_path: Path) -> None:
    save_file({f"{LINEAR}.weight_scale": torch.ones(0)}, tmp_path / "model.safetensors")
    (scale,) = inspect(tmp_path / "model.safetensors")["scales"]
    assert scale["problem"] == "is empty"


def test_layers_come_in_order(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.k_scale": torch.ones(1) for i in (10, 9, 0)}
    save_file(tensors, tmp_path / "model.safetensors")
    report = inspect(tmp_path / "model.safetensors")
    assert [scale["tensor"].split(".")[2] for scale in report["scales"]] == ["0", "9", "10"]


def test_a_model_in_high_precision_has_no_scales(model_dir: ModelDir) -> None:
    assert inspect(model_dir("llama"))["scales"] == []


def test_inspect_refuses_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no"):
        inspect(tmp_path / "none")
    with pytest.raises(ModelError, match=r"neither config\.json nor"):
        inspect(tmp_path)
