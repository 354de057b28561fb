"""Training a LoRA adapter on a frozen model: the loss falls, files are in peft's format, and a killed run ends with the
same bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.errors import Fp8ServeError, JobError, ModelError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.adapters import read_adapter
from fp8serve.model.config.decoder import read_config
from fp8serve.train.config import TrainConfig
from fp8serve.train.lora import adapted_model, adapter_parameters
from fp8serve.train.trainer import Trainer

from .conftest import Configure
from .test_resume import assert_same_when_killed, every_file

TARGETS = ["q_proj", "model.layers.1.mlp.*"]


@pytest.fixture
def lora(configure: Configure, fp8_dir: Path) -> Configure:
    def make(**values: Any) -> TrainConfig:
        base = {"model": str(fp8_dir), "amax_history_len": None, "lora_rank": 4, "lr": 1e-2}
        return configure(**{**base, **values})

    return make


def test_a_killed_and_resumed_run_writes_the_same_files(tmp_path: Path, lora: Configure) -> None:
    names = ("model/adapter_model.safetensors", "model/adapter_config.json", "checkpoints/step-6/manifest.json")
    assert_same_when_killed(tmp_path, lora, names, max_steps=6, dora=True, lora_dropout=0.1)


@pytest.mark.parametrize("recipe", ["delayed", "bf16"])
def test_only_the_adapter_is_trained_and_its_files_hold_the_masters(
    lora: Configure, model_dir: Path, recipe: str
) -> None:
    base = {} if recipe == "delayed" else {"model": str(model_dir)}
    config = lora(recipe=recipe, lora_targets=TARGETS, lora_alpha=6.0, max_steps=12, **base)
    before = every_file(Path(config.model))
    losses: list[float] = []
    result = Trainer(config).run(lambda e: losses.append(e["train_loss"]) if e["type"] == "metrics" else None)
    assert losses[-1] < losses[0] - 0.2
    assert every_file(Path(config.model)) == before

    out = Path(str(result.model))
    adapter_config = json.loads((out / "adapter_config.json").read_text())
    layers = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    layers += [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["use_dora"]) == (4, 6, False)
    assert adapter_config["target_modules"] == sorted(layers)  # "gate_proj" alone would match layer 0, too
    tensors = load_file(out / "adapter_model.safetensors")
    assert set(tensors) == {f"base_model.model.{name}.lora_{part}.weight" for name in layers for part in "AB"}

    masters = load_file(Path(str(result.checkpoint)) / "model.safetensors")
    adapter = read_adapter(out, read_config(config.model))
    for name in layers:
        assert torch.equal(adapter[name].a, masters[f"{name}.lora_A"].bfloat16())
        assert torch.equal(adapter[name].b, masters[f"{name}.lora_B"].bfloat16())
        assert adapter[name].scaling == 1.5
        assert adapter[name].magnitude is None


def test_the_base_model_is_frozen_in_fp8_with_stored_scales(lora: Configure) -> None:
    model = adapted_model(lora(dora=True))
    frozen = [m for m in model.modules() if isinstance(m, FrozenLinear)]
    assert len(frozen) == 14
    assert all(layer.input_scale is not None for layer in frozen)
    assert all(layer.weight_q.dtype == torch.float8_e4m3fn for layer in frozen)
    masters = adapter_parameters(model)
    assert len(masters) == 3 * 14
    assert all(p.dtype == torch.float32 for p in masters.values())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(masters)


@pytest.mark.parametrize(("rank", "layers"), [(32, 0), (33, 4), (65, 14)])
def test_a_rank_larger_than_a_matrix_is_reported(lora: Configure, rank: int, layers: int) -> None:
    """The tiny model's keys and values have 32 rows, and every other side is 64 or more."""
    events: list[Any] = []
    Trainer(lora(recipe="current", lora_rank=rank, max_steps=1)).run(events.append)
    reports = [e for e in events if e.get("code") == "rank_too_large"]
    assert [e["layers"] for e in reports] == ([layers] if layers else [])
    assert all(f"Rank {rank} is more than the smaller side of {layers} of 14 matrices" in e["message"] for e in reports)


def test_resuming_with_another_base_model_is_refused(lora: Configure, model_dir: Path) -> None:
    Trainer(lora(max_steps=2, recipe="current")).run()
    with pytest.raises(JobError, match="was trained from another model"):
        Trainer(lora(max_steps=3, recipe="current", model=str(model_dir))).run()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_rank": None, "dora": True}, "dora is an option of an adapter; give lora_rank, too"),
        ({"lora_rank": 0}, "lora_rank must be at least 1"),
        ({"master_weights": "optimizer"}, "master_weights is for training the model's own weights"),
        ({"amax_history_len": 16}, "amax_history_len is for training the model's own weights"),
        ({"recipe_options": {"margin": 1}}, "recipe_options is for training the model's own weights"),
        (
            {"lora_targets": ["lm_head"]},
            "No linear layer is called 'lm_head'; those that can have an adapter are q_proj",
        ),
    ],
)
def test_invalid_options_are_refused(lora: Configure, values: dict[str, Any], message: str) -> None:
    with pytest.raises(Fp8ServeError) as caught:
        Trainer(lora(**values)).run()
    assert message in str(caught.value)


def test_a_base_without_scales_is_refused(lora: Configure, model_dir: Path) -> None:
    with pytest.raises(ModelError, match="stores no scales; calibrate it, or choose --recipe current"):
        Trainer(lora(model=str(model_dir))).run()


def peft_directory(folder: Path, *, rank: int = 2, part: str = "", **changes: Any) -> Path:
    """Writes an adapter of one projection of the tiny model as peft does. A value of None removes a field. Returns
    `folder`."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]} | changes
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    owner = f"base_model.model.model.layers.0.self_attn.{part or 'q_proj'}"
    torch.manual_seed(0)
    tensors = {f"{owner}.lora_A.weight": torch.randn(2, 64), f"{owner}.lora_B.weight": torch.randn(64, 2)}
    if changes.get("use_dora"):
        tensors[f"{owner}.lora_magnitude_vector"] = torch.rand(64)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapters_of_peft_are_read(tmp_path: Path, model_dir: Path) -> None:
    name, config = "model.layers.0.self_attn.q_proj", read_config(model_dir)
    plain = read_adapter(peft_directory(tmp_path / "1"), config)[name]
    assert plain.scaling == 4
    assert plain.a.dtype == plain.b.dtype == torch.bfloat16
    assert read_adapter(peft_directory(tmp_path / "2", use_rslora=True), config)[name].scaling == 8 / 2**0.5
    dora = read_adapter(peft_directory(tmp_path / "3", use_dora=True), config)[name]
    assert dora.magnitude is not None
    assert dora.magnitude.shape == (64,)
    by_name = {"rank_pattern": {"self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    assert read_adapter(peft_directory(tmp_path / "4", rank=16, **by_name), config)[name].scaling == 1.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "is of the method 'IA3'"),
        ({"bias": "all"}, "has bias='all', which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa, which changes the base model's weights"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "patterns are not supported"),
        ({"rank": 3}, "lora_A of model.layers.0.self_attn.q_proj must be [3, 64] in this model, found [2, 64]"),
        ({"rank": True}, "r must be an integer from 1 to 4096, found true"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number above 0"),
        ({"part": "x_proj"}, "this model has no such layer"),
        ({"r": None}, "r must be an integer"),
    ],
)
def test_unsupported_adapters_are_refused(
    tmp_path: Path, model_dir: Path, changes: dict[str, Any], message: str
) -> None:
    folder = peft_directory(tmp_path / "a", **changes)
    with pytest.raises(ModelError) as caught:
        read_adapter(folder, read_config(model_dir))
    assert message in str(caught.value)
