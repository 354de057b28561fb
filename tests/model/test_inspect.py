"""The table of scales: directions, shapes, origins, and problems that loading would refuse."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.errors import ModelError
from fp8serve.fp8.recipe import from_name
from fp8serve.model.checkpoint import ScalingCheckpoint, write_calibrated
from fp8serve.model.inspect import describe_scales
from tests.model.oracle import state_for

LINEAR = "model.layers.0.mlp.up_proj"
ModelDir = Callable[[str], Path]


def test_calibrated_directory_shows_both_directions(model_dir: ModelDir, tmp_path: Path) -> None:
    state = state_for(model_dir("llama"))
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state)
    rows = {(r.key, r.origin): r for r in describe_scales(tmp_path / "fp8")}
    theirs = rows[f"{LINEAR}.input_scale", "model.safetensors"]
    ours = rows[f"{LINEAR}.input.scale", "scales.safetensors"]
    assert (theirs.module, theirs.role, theirs.direction, theirs.shape) == (LINEAR, "input", "dequantizes", (1,))
    assert (ours.module, ours.role, ours.direction, ours.shape) == (LINEAR, "input", "quantizes", ())
    amax = 448 / float(state.tensors[f"{LINEAR}.input"].scale)
    assert theirs.reaches == pytest.approx(amax)
    assert ours.reaches == pytest.approx(amax)
    assert ours.history == pytest.approx((0, amax / 2, amax))
    assert len(rows) == 14 * 4
    assert not any(r.problem for r in rows.values())


def test_block_scales_show_their_range(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "fp8", model_dir("llama"), ScalingCheckpoint(from_name("rowwise"), {}))
    row = next(r for r in describe_scales(tmp_path / "fp8") if r.module == LINEAR)
    assert (row.role, row.shape, row.dtype) == ("weight", (96, 1), "float32")
    assert 0 < row.smallest < row.largest


def test_problems_are_shown_where_loading_refuses(model_dir: ModelDir, tmp_path: Path) -> None:
    write_calibrated(tmp_path / "fp8", model_dir("llama"), state_for(model_dir("llama")), format="fp8")
    bad = {f"{LINEAR}.input_scale": torch.tensor([0.0]), f"{LINEAR}.weight_scale_2": torch.ones(1)}
    path = tmp_path / "fp8" / "model.safetensors"
    save_file(load_file(path) | bad, path)
    problems = {r.key: r.problem for r in describe_scales(path) if r.problem}
    assert problems[f"{LINEAR}.input_scale"] == "holds 0.0, which cannot be served"
    assert "meaning is not known" in str(problems[f"{LINEAR}.weight_scale_2"])
    assert len(problems) == 2


def test_scales_file_on_its_own_never_observed_included(tmp_path: Path) -> None:
    metadata = {"format": "fp8serve.scales", "version": "1"}
    tensors = {f"{LINEAR}.grad_output.scale": torch.tensor(2.0), f"{LINEAR}.grad_output.amax_history": torch.zeros(3)}
    save_file(tensors, tmp_path / "scales.safetensors", metadata)
    for place in (tmp_path, tmp_path / "scales.safetensors"):
        (row,) = describe_scales(place)
        assert (row.role, row.problem, row.reaches) == ("output gradient", "never observed", 57344 / 2)


def test_plain_directory_has_no_scales(model_dir: ModelDir) -> None:
    assert describe_scales(model_dir("llama")) == []


def test_layers_come_in_order(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.k_scale": torch.ones(1) for i in (10, 9, 0)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert [r.module.split(".")[2] for r in describe_scales(tmp_path)] == ["0", "9", "10"]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        describe_scales(tmp_path / "none")
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        describe_scales(tmp_path)
