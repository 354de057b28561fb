"""The engine computes the log-probabilities of training, and an exported FP8 model can be trained further."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from fp8serve.cli import main
from fp8serve.engine.engine import Engine
from fp8serve.errors import JobError, ModelError, RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling, Format
from fp8serve.model.checkpoint import kv_scales, load_scales, load_servable
from fp8serve.train import checkpoint, state
from fp8serve.train.data import Row
from fp8serve.train.export import export
from fp8serve.train.forward import collate
from fp8serve.train.log_probs import log_probs
from fp8serve.train.setup import Setup, prepare
from fp8serve.train.trainer import Trainer, TrainResult

from .conftest import Configure


def trained(configure: Configure, **values: Any) -> tuple[TrainResult, Setup]:
    """Returns the result of a short run, and its last checkpoint loaded as for training."""
    config = configure(**values)
    result = Trainer(config).run()
    assert result.checkpoint is not None
    path = Path(result.checkpoint)
    setup = prepare(config, path, lambda event: None)
    state.restore(setup.forward, setup.optimizer, checkpoint.read_checkpoint(path))
    return result, setup


def served(model: str | None, rows: Sequence[Row], **options: Any) -> Tensor:
    """Returns the log-probabilities of the rows' targets, FP32 [targets], from an engine that prefills 16 tokens a
    step."""
    assert model is not None
    engine = Engine(model, max_batch_tokens=16, max_num_seqs=4, block_size=4, **options)
    assert engine.info()["log_probs_as_trained"]
    completions = engine.generate(
        [row.ids.tolist() for row in rows], max_new_tokens=1, prompt_logprobs=0, temperature=0.0
    )
    logprobs = [torch.tensor([item.logprob for item in one.prompt_logprobs or ()]) for one in completions]
    return torch.cat([values[torch.from_numpy(row.loss[1:])] for values, row in zip(logprobs, rows, strict=True)])


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("delayed", {}),
        ("delayed", {"weight_granularity": "row"}),
        ("rowwise", {}),
        ("block", {}),
        ("bf16", {}),
        ("delayed", {"override_linear_precision": [True, False, False]}),
    ],
)
@pytest.mark.parametrize("place", ["model", "optimizer"])
@torch.no_grad()
def test_trainer_and_server_compute_the_same_bits(
    configure: Configure, recipe: str, options: dict[str, Any], place: str
) -> None:
    with torch.enable_grad():
        result, setup = trained(configure, recipe=recipe, recipe_options=options, master_weights=place, max_steps=3)
    assert result.model is not None
    in_bf16 = recipe == "bf16" or "override_linear_precision" in options
    how: Any = {"recipe": "bf16"} if in_bf16 else {}
    layers = load_servable(result.model, **how).modules()
    assert sum(isinstance(module, FrozenLinear) for module in layers) == (0 if in_bf16 else 14)
    rows = setup.items[:6]
    assert torch.equal(setup.forward.log_probs(collate(rows, "cpu")), served(result.model, rows, **how))


def test_a_recipe_that_depends_on_its_batch_says_so(configure: Configure) -> None:
    events: list[dict[str, Any]] = []
    result = Trainer(configure(recipe="current", max_steps=1)).run(events.append)
    assert result.model is not None
    [reason] = Engine(result.model).info()["log_probs_differ_because"]
    assert "from each token alone" in reason
    assert [e["message"] for e in events if e.get("code") == "log_probs_differ"] == [
        f"A server computes other log-probabilities than this run: {reason}"
    ]
    forward = prepare(configure(recipe="current"), Path(result.model), events.append).forward
    with pytest.raises(RecipeError, match="would differ from a server's: The recipe has one scale for a whole input"):
        log_probs(forward, [[1, 2, 3]])


def test_a_run_with_bf16_forward_pass_is_exported_without_quantization(configure: Configure) -> None:
    options = {"override_linear_precision": [True, False, False]}
    result, _ = trained(configure, recipe_options=options, max_steps=2)
    assert result.model is not None
    assert "quantization_config" not in json.loads((Path(result.model) / "config.json").read_text())


def test_serving_scales_are_the_training_histories(configure: Configure) -> None:
    result, setup = trained(configure, max_steps=4)
    assert result.model is not None
    exported = load_scales(Path(result.model) / "scales.safetensors", result.model)
    training = state.scaling_tensors(setup.forward)
    assert len(exported.tensors) == 14 * 3
    for name, entry in exported.tensors.items():
        assert torch.equal(entry.scale, training[f"{name}.scale"])
        assert entry.amax_history is not None
        assert torch.equal(entry.amax_history, training[f"{name}.amax_history"])
    assert exported.recipe == setup.forward.recipe
    assert (
        exported.observations["tensors"]["model.layers.0.mlp.up_proj.input"] == 1 + 4
    )  # one observation, then four steps


@pytest.mark.parametrize("format_", ["compressed-tensors", "modelopt", "fp8"])
def test_training_with_fp8_attention_exports_scales_of_an_fp8_cache(configure: Configure, format_: str) -> None:
    result, setup = trained(configure, recipe_options={"fp8_dpa": True}, format=format_, max_steps=3)
    assert result.model is not None
    live, scales = dict(state.scaling_states(setup.forward)), kv_scales(Path(result.model))
    assert len(load_scales(Path(result.model) / "scales.safetensors", result.model).tensors) == 14 * 3 + 2 * 2
    for layer, (k, v) in scales.items():
        assert k == live[f"model.layers.{layer}.self_attn.k"].scale
        assert v == live[f"model.layers.{layer}.self_attn.v"].scale
    assert len(scales) == 2
    engine = Engine(result.model, kv_cache_dtype="fp8")
    [completion] = engine.generate(["the red fox"], max_new_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(completion.token_ids) == 4


@pytest.mark.parametrize("length", [1, 2])
def test_histories_of_length_one_and_two_are_exported(configure: Configure, length: int) -> None:
    result, setup = trained(configure, amax_history_len=length, max_steps=2)
    assert result.model is not None
    rows = setup.items[:2]
    with torch.no_grad():
        assert torch.equal(setup.forward.log_probs(collate(rows, "cpu")), served(result.model, rows))


def test_every_kept_checkpoint_is_servable(configure: Configure, tmp_path: Path) -> None:
    trained(configure, max_steps=4, save_every=2, keep_last=2)
    for path in checkpoint.list_checkpoints(tmp_path / "out" / "checkpoints"):
        assert load_servable(export(path, tmp_path / path.name))
    record = json.loads((tmp_path / "step-2" / "training.json").read_text())
    assert record["step"] == 2
    assert record["config"]["recipe"] == "delayed"


def test_a_damaged_checkpoint_or_a_nonempty_directory_is_refused(configure: Configure, tmp_path: Path) -> None:
    result, _ = trained(configure, max_steps=1)
    assert result.checkpoint is not None
    assert result.model is not None
    with pytest.raises(ModelError, match="not empty"):
        export(result.checkpoint, result.model)
    (Path(result.checkpoint) / "scaling.safetensors").write_bytes(b"")
    with pytest.raises(JobError, match="not a usable training checkpoint"):
        export(result.checkpoint, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_training_from_an_exported_model_keeps_its_scales_and_histories(configure: Configure, tmp_path: Path) -> None:
    """The base is an FP8 directory: masters are its dequantized weights, and the run starts with its scales, not with
    1."""
    first, _ = trained(configure, max_steps=6)
    assert first.model is not None
    events: list[dict[str, Any]] = []
    config = configure(model=first.model, out=str(tmp_path / "second"), max_steps=2, lr=1e-6)
    setup = prepare(config, Path(first.model), events.append)
    exported = load_scales(Path(first.model) / "scales.safetensors").tensors
    for name, live in state.scaling_states(setup.forward):
        assert torch.equal(live.scale, exported[name].scale)
    assert [e["seeded"] for e in events if e.get("code") == "seeded"] == [42]
    second = Trainer(config).run()
    assert second.metrics["train_loss"] == pytest.approx(first.metrics["train_loss"], rel=0.05)


def test_a_format_that_cannot_hold_the_recipe_is_refused_before_training(configure: Configure, tmp_path: Path) -> None:
    config = configure(recipe="rowwise", format="fp8")
    with pytest.raises(ModelError):
        Trainer(config).run()
    assert checkpoint.list_checkpoints(tmp_path / "out" / "checkpoints") == []


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A sharded Qwen2 (biases on q, k and v, head not tied) as transformers writes it, FP32."""
    config = Qwen2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    out = tmp_path_factory.mktemp("foreign") / "qwen2"
    model.save_pretrained(out, max_shard_size="100KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, out)
    return out


@torch.no_grad()
def test_a_sharded_fp32_model_of_transformers_is_trained_and_exported(configure: Configure, foreign: Path) -> None:
    assert (foreign / "model.safetensors.index.json").exists()
    with torch.enable_grad():
        result, setup = trained(configure, model=str(foreign), max_steps=12, lr=3e-3)
    rows = setup.items[:6]
    assert torch.equal(setup.forward.log_probs(collate(rows, "cpu")), served(result.model, rows))
    assert result.metrics["train_loss"] < 5.0  # ln(320) = 5.77 at the start


@torch.no_grad()
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("delayed", {"margin": 2, "interval": 3, "amax_compute_algo": "most_recent"}),
        ("delayed", {"override_linear_precision": [False, True, True]}),
        ("delayed", {"fp8_format": "E4M3"}),
        ("block", {"override_linear_precision": [False, False, True]}),
    ],
)
def test_recipe_options_reach_training_and_serving(configure: Configure, recipe: str, options: dict[str, Any]) -> None:
    with torch.enable_grad():
        result, setup = trained(configure, recipe=recipe, recipe_options=options, max_steps=3)
    rows = setup.items[:4]
    assert torch.equal(setup.forward.log_probs(collate(rows, "cpu")), served(result.model, rows))


def test_the_command_line_gives_a_recipe_its_parameters(model_dir: Path, data: Path, tmp_path: Path) -> None:
    recipe_options = "--recipe-option fp8_mha=true --recipe-option fp8_format=E4M3 --history-len 8"
    rest = "--seq-len 64 --max-steps 2 --master-weights optimizer --packing tokens --format modelopt"
    args = ("finetune", model_dir, "--data", data, "--out", tmp_path / "run", *f"{recipe_options} {rest}".split())
    assert main([str(arg) for arg in args]) == 0
    served = tmp_path / "run" / "model"
    recipe = load_scales(served / "scales.safetensors", served).recipe
    assert recipe == DelayedScaling(fp8_mha=True, fp8_format=Format.E4M3, amax_history_len=8)
    assert (served / "hf_quant_config.json").exists()


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_layers_that_calibration_left_in_bf16_stay_so(
    configure: Configure, model_dir: Path, data: Path, tmp_path: Path, recipe: str
) -> None:
    base, skipped = tmp_path / "partly", {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"}
    arguments = [f"--skip={name}" for name in sorted(skipped)]
    main(
        [
            "calibrate",
            str(model_dir),
            f"--out={base}",
            f"--recipe={recipe}",
            f"--data={data}",
            "--samples=4",
            *arguments,
        ]
    )
    events: list[dict[str, Any]] = []
    config = configure(model=str(base), recipe=recipe, max_steps=4)
    result = Trainer(configure(model=str(base), recipe=recipe, max_steps=2)).run(events.append)
    assert result.model is not None
    assert [e["message"] for e in events if e.get("code") == "kept"] == [
        "2 linear layers that the model stores in high precision are trained in BF16"
    ]
    shutil.rmtree(result.model)
    shutil.rmtree(base)  # a resumed run needs nothing of it
    longer = Trainer(config).run()
    assert longer.model is not None
    in_bf16 = {
        name
        for name, m in load_servable(longer.model).named_modules()
        if isinstance(m, torch.nn.Linear) and name != "lm_head"
    }
    assert in_bf16 == skipped
    setup = prepare(config, Path(str(longer.checkpoint)), lambda event: None)
    state.restore(setup.forward, setup.optimizer, checkpoint.read_checkpoint(Path(str(longer.checkpoint))))
    rows = setup.items[:4]
    with torch.no_grad():
        assert torch.equal(setup.forward.log_probs(collate(rows, "cpu")), served(longer.model, rows))
