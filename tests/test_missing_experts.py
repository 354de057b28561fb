"""If a part of an expert is missing, every command names it in one sentence and leaves no output."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8serve.cli import main
from tests.engine.tiny import write_model
from tests.model.test_experts import stacked
from tests.tiny import CHATS

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
STACK = "model.layers.1.mlp.experts.down_proj"
Tensors = dict[str, Tensor]


def separate(tensors: Tensors) -> Tensors:
    del tensors[EXPERT]
    return tensors


def whole_stack(tensors: Tensors) -> Tensors:
    result = stacked(tensors, "qwen3-moe")
    del result[STACK]
    return result


def short_stack(tensors: Tensors) -> Tensors:
    result = stacked(tensors, "qwen3-moe")
    result[STACK] = result[STACK][:-1].clone()
    return result


def fp8_without_a_scale(tensors: Tensors) -> Tensors:
    """Returns the tensors with every expert in FP8, of which one has no scale."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        in_fp8 = ".experts." in name
        result[name] = tensor.to(torch.float8_e4m3fn) if in_fp8 else tensor
        if in_fp8 and name != EXPERT:
            result[f"{name}_scale_inv"] = torch.ones(1, 1)
    return result


def nan_in_one(tensors: Tensors) -> Tensors:
    tensors[EXPERT][0, 0] = torch.nan
    return tensors


DAMAGES: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (separate, f"lacks the tensor {EXPERT}; the checkpoint is incomplete"),
    (whole_stack, "lacks the tensor model.layers.1.mlp.experts.0.down_proj.weight and"),
    (short_stack, f"{STACK} holds"),
    (fp8_without_a_scale, f"{EXPERT} is FP8 but has no weight_scale"),
]


def spoil(model: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = model / "model.safetensors"
    save_file(change({name: tensor.clone() for name, tensor in load_file(file).items()}), file)
    if change is fp8_without_a_scale:
        config = json.loads((model / "config.json").read_text())
        quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize(("change", "message"), DAMAGES)
@pytest.mark.parametrize("command", ["generate", "calibrate", "serve"])
def test_every_command_names_a_missing_part_of_an_expert(
    command: str,
    change: Callable[[Tensors], Tensors],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe")
    spoil(model, change)
    (tmp_path / "chats.jsonl").write_text(CHATS)
    options: dict[str, list[str]] = {
        "generate": ["a", "--recipe", "bf16"],
        "calibrate": ["--data", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "out")],
        "serve": ["--recipe", "rowwise", "--port", "0", "--data-dir", str(tmp_path / "data")],
    }
    before = {path.name for path in tmp_path.iterdir()}
    assert main([command, str(model), *options[command]]) == 1
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "Traceback" not in stderr
    assert {path.name for path in tmp_path.iterdir()} - {"data"} == before


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_experts_per_tok", 9, "num_experts_per_tok is 9 where at most the 6 experts was expected"),
        ("num_experts", 7, "has the shape [6, 64]; config.json requires [7, 64]"),
        ("num_experts", 200_000_000, "names 200000000 experts in each of 2 layers, and the files hold only"),
        ("moe_intermediate_size", 47, "has the shape [64, 48]; config.json requires [64, 47]"),
    ],
)
def test_a_configuration_of_other_experts_is_refused(
    field: str, value: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {field: value}))
    assert main(["generate", str(model), "a", "--recipe", "bf16"]) == 1
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "Traceback" not in stderr


def test_an_expert_that_is_not_finite_ends_an_answer_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe", num_experts_per_tok=6)
    spoil(model, nan_in_one)
    assert main(["generate", str(model), "a", "--recipe", "rowwise"]) == 1
    stderr = capsys.readouterr().err
    assert "is not finite" in stderr
    assert "Traceback" not in stderr
