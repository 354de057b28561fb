"""Calibrating mixtures of experts: tokens are counted, starved experts named, scales written and read back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fp8serve.calibration.pipeline import calibrate
from fp8serve.calibration.result import CalibrationReport, read_report
from fp8serve.calibration.techniques.precision import input_groups, serving_groups
from fp8serve.errors import ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling, Recipe, from_name
from fp8serve.model.checkpoint import load_scales, load_servable, open_checkpoint

from .conftest import VOCAB, write_tokenizer

SMALL = {"samples": 12, "seq_len": 48, "batch_size": 4}
RECIPE = DelayedScaling(amax_history_len=8)
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0,
         "eos_token_id": 1, "initializer_range": 0.2, "num_experts_per_tok": 2}  # fmt: skip
STARVED = 3


def write_qwen(folder: Path, starve: bool = False) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=48, head_dim=16, norm_topk_prob=True)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    if (
        starve
    ):  # two of the logits a, -a, b, -b are never below 0, the logit of the starved expert, so it is never chosen
        weights = load_file(folder / "model.safetensors")
        router = weights["model.layers.1.mlp.gate.weight"]
        router[1], router[4], router[STARVED] = -router[0], -router[2], 0
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_mixtral(folder: Path) -> Path:
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def run(model: Path, out: Path, **options: object) -> CalibrationReport:
    return calibrate(model, out=out, **(SMALL | {"recipe": RECIPE} | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixtral(tmp_path_factory.mktemp("models") / "mixtral")


def test_tokens_are_counted(qwen: Path, tmp_path: Path) -> None:
    report = run(qwen, tmp_path / "out")
    assert [mixture.name for mixture in report.experts] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for mixture in report.experts:
        assert len(mixture.tokens) == 6
        assert sum(mixture.tokens) == 2 * report.data.tokens
    assert read_report(tmp_path / "out").experts == report.experts


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("format_", ["compressed-tensors", "fp8", "modelopt"])
@pytest.mark.parametrize("kind", ["qwen", "mixtral"])
def test_written_scales_are_read_back(kind: str, format_: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue(kind)
    report = run(model, tmp_path / "out", format=format_)
    checkpoint = open_checkpoint(tmp_path / "out")
    names = load_servable(model, "bf16").linear_names()
    assert checkpoint.quantized_linears == [n for n in checkpoint.quantized_linears if n in names]
    assert len(checkpoint.quantized_linears) == len(names)
    scales = load_scales(tmp_path / "out" / "scales.safetensors", tmp_path / "out")
    served = load_servable(tmp_path / "out")
    layers = {name: m for name, m in served.named_modules() if isinstance(m, FrozenLinear)}
    assert set(layers) == set(names)
    for name, layer in layers.items():
        assert torch.equal(layer.input_scale, scales.input_scale(name))  # type: ignore[arg-type]
    experts = {n for n in load_file(tmp_path / "out" / "model.safetensors") if ".experts.0." in n}
    leaves = ("w1", "w2", "w3") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    assert {n.split(".experts.0.")[1] for n in experts} == {
        f"{leaf}.{what}" for leaf in leaves for what in ("weight", "weight_scale", "input_scale")
    }
    assert report.quality.kl_divergence is not None
    assert report.quality.kl_divergence < 1


@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "w8a16", "nvfp4-w4a16"])
def test_recipes_that_scale_by_content_are_served(recipe: str, qwen: Path, tmp_path: Path) -> None:
    run(qwen, tmp_path / "out", recipe=from_name(recipe))
    served = load_servable(tmp_path / "out")
    assert sum(isinstance(m, FrozenLinear) for m in served.modules()) == len(served.linear_names())


@pytest.mark.parametrize("recipe", [RECIPE, from_name("nvfp4")], ids=["delayed", "nvfp4"])
def test_the_error_names_an_expert_without_tokens(recipe: Recipe, tmp_path: Path) -> None:
    model = write_qwen(tmp_path / "model", starve=True)
    with pytest.raises(
        ScalesError, match=r"No token of 3 batches reached model\.layers\.1\.mlp\.experts\.3, so no scale"
    ):
        run(model, tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()


def test_all_experts_measures_a_scale_for_a_starved_expert(tmp_path: Path) -> None:
    model = write_qwen(tmp_path / "model", starve=True)
    report = run(model, tmp_path / "out", all_experts=True)
    assert report.experts[1].tokens[STARVED] == 0
    assert sum(report.experts[1].tokens) == 2 * report.data.tokens
    assert any("sent no calibration token to model.layers.1.mlp.experts.3; their scales" in n for n in report.notes)
    scales = load_scales(tmp_path / "out" / "scales.safetensors")
    starved, first = (scales.tensors[f"model.layers.1.mlp.experts.{i}.gate_proj.input"] for i in (STARVED, 0))
    assert torch.equal(starved.scale, first.scale)  # both experts got every token
    down = scales.tensors[f"model.layers.1.mlp.experts.{STARVED}.down_proj.input"]
    assert down.scale not in (1, starved.scale)


def test_a_starved_expert_is_noted_by_recipes_without_stored_scales(tmp_path: Path) -> None:
    model = write_qwen(tmp_path / "model", starve=True)
    report = run(model, tmp_path / "out", recipe=from_name("rowwise"))
    assert any("experts.3; their inputs were not observed" in note for note in report.notes)


def test_a_resumed_calibration_writes_the_same_bytes(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is interrupted after observation; the token counts are resumed, too."""
    whole = run(qwen, tmp_path / "whole")

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("fp8serve.calibration.job.DivergenceJudge.measure", stop)
        with pytest.raises(KeyboardInterrupt):
            run(qwen, tmp_path / "out")
    again = run(qwen, tmp_path / "out", resume=True)
    assert again.experts == whole.experts
    for name in ("model.safetensors", "scales.safetensors"):
        one, other = (load_file(tmp_path / folder / name) for folder in ("whole", "out"))
        assert all(torch.equal(one[key].float(), other[key].float()) for key in one)


def test_gradients_smoothing_rounding_and_healing_work_with_experts(qwen: Path, tmp_path: Path) -> None:
    report = run(qwen, tmp_path / "a", gradients=True, smoothing=0.5, samples=8)
    assert not any(".experts." in pair for pair in (report.smoothing.pairs if report.smoothing else ()))
    scales = load_scales(tmp_path / "a" / "scales.safetensors")
    assert "model.layers.0.mlp.experts.0.gate_proj.grad_output" in scales.tensors
    run(qwen, tmp_path / "b", rounding="gptq", heal=2, samples=8)


def test_the_experts_of_a_layer_stay_in_bf16_together(qwen: Path, tmp_path: Path) -> None:
    names = load_servable(qwen, "bf16").linear_names()
    assert len(serving_groups(names)) == 2 * 3  # three groups per layer: qkv, o and the experts
    assert len(input_groups(names)) == 2 * (2 + 6 * 2)
    run(qwen, tmp_path / "out", skip=("model.layers.0.mlp.experts.*",))
    served = load_servable(tmp_path / "out")
    fp8 = {name for name, m in served.named_modules() if isinstance(m, FrozenLinear)}
    assert not any(".0.mlp.experts." in name for name in fp8)
    assert len(fp8) == len(names) - 18
