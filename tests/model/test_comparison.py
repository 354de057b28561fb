"""`inspect A B`: compares two checkpoints of a model, scales files alone, a BF16 with an FP8 checkpoint, and refuses
different models."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fp8serve.cli import main
from fp8serve.comparison import Comparison, compare
from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.fp8.recipe import from_name
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, open_checkpoint, save_scales
from fp8serve.model.export import write_calibrated
from fp8serve.model.formats.scales import FILE_NAME, read_scales
from tests.model.oracle import state_for

LINEAR = "model.layers.0.mlp.up_proj"
ModelDir = Callable[[str], Path]


@pytest.fixture
def source(model_dir: ModelDir) -> Path:
    return model_dir("llama")


@pytest.fixture
def fp8(source: Path, tmp_path: Path) -> Path:
    write_calibrated(tmp_path / "fp8", source, state_for(source))
    return tmp_path / "fp8"


def copy(folder: Path, name: str = "copy") -> Path:
    return Path(shutil.copytree(folder, folder.parent / name))


def rewrite(path: Path, changes: dict[str, torch.Tensor]) -> None:
    """Change tensors of a file, and keep its metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | changes, path, metadata)


def is_equal(comparison: Comparison) -> bool:
    return not (
        comparison.config or comparison.weights or comparison.scales or comparison.only_in_a or comparison.only_in_b
    )


def test_a_checkpoint_equals_its_copy(fp8: Path) -> None:
    comparison = compare(fp8, copy(fp8))
    assert is_equal(comparison)
    assert comparison.same_weights == len(open_checkpoint(fp8))
    assert comparison.same_scales == 14 * 2


def test_a_bf16_checkpoint_is_compared_with_its_fp8_version(source: Path, fp8: Path) -> None:
    comparison = compare(source, fp8)
    weight = next(w for w in comparison.weights if w.tensor == f"{LINEAR}.weight")
    exact, rounded = open_checkpoint(source)[f"{LINEAR}.weight"].float(), open_checkpoint(fp8)[f"{LINEAR}.weight"]
    assert len(comparison.weights) == 14
    assert comparison.same_weights == len(open_checkpoint(source)) - 14
    assert (weight.a.split()[0], weight.b.split()[0], weight.differing) == ("BF16", "FP8", None)
    assert weight.largest == pytest.approx(float((exact - rounded).abs().max()))
    noise = (exact - rounded).double().square().sum()
    assert weight.sqnr_db == pytest.approx(float(10 * torch.log10(exact.double().square().sum() / noise)), abs=1e-3)
    assert "quantization_config" in comparison.config
    assert len(comparison.only_in_b) == 28
    assert comparison.only_in_a == ()


def test_changed_codes_are_counted_and_the_largest_change_comes_first(fp8: Path) -> None:
    other = copy(fp8)
    name, second = f"{LINEAR}.weight", "model.layers.1.mlp.up_proj.weight"
    codes, few = (load_file(other / "model.safetensors")[n].view(torch.uint8).clone() for n in (name, second))
    codes[:, ::4] ^= 0x80  # the sign of every fourth code is flipped
    few[0, 0] ^= 0x80
    changes = {name: codes.view(torch.float8_e4m3fn), second: few.view(torch.float8_e4m3fn)}
    rewrite(other / "model.safetensors", changes)
    comparison = compare(fp8, other)
    assert [w.tensor for w in comparison.weights] == [name, second]
    assert comparison.weights[0].differing == 0.25
    assert comparison.weights[1].differing == pytest.approx(1 / few.numel())
    matrix = open_checkpoint(fp8).quantized_matrix(LINEAR)
    assert matrix is not None
    assert comparison.weights[0].largest == pytest.approx(2 * float(matrix.weight()[:, ::4].abs().max()))


def test_slices_add_up(source: Path, fp8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(source, fp8)
    monkeypatch.setattr("fp8serve.comparison.SLICE_ELEMENTS", 100)
    parts = compare(source, fp8)
    assert {w.tensor: w.largest for w in whole.weights} == {w.tensor: w.largest for w in parts.weights}


@pytest.mark.parametrize("name", ["rowwise", "block"])
def test_scales_by_rows_and_blocks_are_compared(name: str, source: Path, fp8: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_calibrated(tmp_path / folder, source, ScalingCheckpoint(from_name(name), {}))
    comparison = compare(tmp_path / "a", tmp_path / "b")
    assert is_equal(comparison)
    assert comparison.same_scales == 14
    mixed = compare(fp8, tmp_path / "a")
    assert all((s.ratio is None) == (name == "rowwise") for s in mixed.scales)  # one scale against many, or one block
    assert name == "block" or len(mixed.weights) == 14


def change_scale(folder: Path, tensor: str, factor: float) -> None:
    state = read_scales(folder / FILE_NAME)
    entry = state.tensors[tensor]
    save_scales(folder / FILE_NAME, replace(state, tensors=state.tensors | {tensor: TensorScale(entry.scale * factor)}))


def test_scales_are_sorted_by_their_ratio(fp8: Path) -> None:
    other = copy(fp8)
    for tensor, factor in ((f"{LINEAR}.input", 0.25), (f"{LINEAR}.weight", 3.0)):
        change_scale(other, tensor, factor)
    for pair in ((fp8 / FILE_NAME, other / FILE_NAME), (fp8 / FILE_NAME, other), (fp8, other / FILE_NAME)):
        comparison = compare(*pair)
        assert [(s.tensor, s.ratio) for s in comparison.scales] == [
            (f"{LINEAR}.input", 0.25),
            (f"{LINEAR}.weight", 3.0),
        ]
        assert comparison.same_scales == 26
        assert comparison.config == {}


def test_the_command_marks_scales_that_differ_by_more_than_a_factor_of_2(
    fp8: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy(fp8)
    change_scale(other, f"{LINEAR}.input", 0.25)
    change_scale(other, f"{LINEAR}.weight", 1.5)
    assert main(["inspect", str(fp8 / FILE_NAME), str(other / FILE_NAME)]) == 0
    output = capsys.readouterr().out
    assert "Scales: 26 the same, 2 different, 1 of them by more than a factor of 2." in output
    assert f"! {LINEAR}.input " in output
    assert f"! {LINEAR}.weight " not in output
    assert main(["inspect", str(fp8 / FILE_NAME), str(other / FILE_NAME), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [s["ratio"] for s in printed["scales"]] == [0.25, 1.5]


def test_long_tables_are_truncated_with_a_note(source: Path, fp8: Path, capsys: pytest.CaptureFixture[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("fp8serve.commands.inspect.MAX_ROWS", 5)
    assert main(["inspect", str(source), str(fp8)]) == 0
    output = capsys.readouterr().out
    assert "... and 9 more; --json lists all." in output
    assert f"Only in B: 28 tensors, {'model.layers.0.mlp.down_proj'}.input (scale)" in output


def test_configurations_are_compared_key_by_key(fp8: Path) -> None:
    other = copy(fp8)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 12345.0
    config["quantization_config"]["version"] = "mine"
    (other / "config.json").write_text(json.dumps(config))
    comparison = compare(fp8, other).config
    assert comparison.keys() == {"rope_parameters.rope_theta", "quantization_config.version"}
    assert comparison["rope_parameters.rope_theta"][1] == 12345.0


def test_checkpoints_without_common_tensors_are_refused(
    model_dir: ModelDir, source: Path, fp8: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="no weight and no scale in common"):
        compare(source, fp8 / FILE_NAME)
    with pytest.raises(Fp8ServeError, match="is not a scales file of fp8serve"):
        compare(fp8, fp8 / "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json"):
        compare(fp8, tmp_path)


def test_tensors_of_different_shapes_are_reported(source: Path, tmp_path: Path) -> None:
    other = copy(source, tmp_path / "wide")
    tensors = load_file(other / "model.safetensors")
    config = json.loads((other / "config.json").read_text())
    vocabulary = config["vocab_size"]
    wider = {n: torch.cat([t, t[:8]]) for n, t in tensors.items() if t.shape[0] == vocabulary}
    rewrite(other / "model.safetensors", wider)
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": vocabulary + 8}))
    comparison = compare(source, other)
    assert {w.tensor for w in comparison.weights} == set(wider)
    assert all(w.largest is None and w.sqnr_db is None for w in comparison.weights)


# -- finding what to inspect -----------------------------------------------------------------------------------------


def test_inspect_finds_models_as_other_commands_do(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8serve.hub._download", lambda name: source)
    assert main(["inspect", "org/name"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    monkeypatch.setattr("fp8serve.model.gguf.smollm2", lambda tell: source)
    assert main(["inspect", "smollm2"]) == 0
    assert main(["inspect", "smollm2", "org/name"]) == 0


@pytest.mark.parametrize("name", ["model.gguf", "org/scales.safetensors"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fp8serve.hub._download", lambda name: pytest.fail("asked the hub"))
    assert main(["inspect", name]) == 1
    assert capsys.readouterr().err == f"fp8serve: There is no {name}.\n"
