"""Linears that stay in BF16: named ones, or the fewest that meet a quality target; such models are written, served, and
read by transformers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from fp8serve.calibration.pipeline import calibrate
from fp8serve.calibration.reports.page import html_report
from fp8serve.calibration.reports.tables import summary_table
from fp8serve.calibration.result import CalibrationReport, LinearGroup
from fp8serve.calibration.techniques.precision import excluded_linears, input_groups, min_groups_in_bf16
from fp8serve.engine.engine import Engine
from fp8serve.errors import Fp8ServeError, RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import from_name
from fp8serve.model.checkpoint import load_scales, load_servable, open_checkpoint

from .test_rounding import SMALL, divergence

DOWN = "model.layers.1.mlp.down_proj"
QKV = tuple(f"model.layers.0.self_attn.{p}_proj" for p in "qkv")


def run(model: Path, out: Path, recipe: str = "delayed", **options: object) -> CalibrationReport:
    return calibrate(model, out=out, recipe=from_name(recipe), **(SMALL | options))  # type: ignore[arg-type]


def in_fp8(folder: Path) -> set[str]:
    return {name for name, module in load_servable(folder).named_modules() if isinstance(module, FrozenLinear)}


@pytest.mark.parametrize("format_", ["compressed-tensors", "fp8", "modelopt"])
def test_named_layers_stay_as_they_are(format_: str, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(model_dir, out, skip=["*.self_attn.?_proj", DOWN], format=format_)
    every = set(load_servable(model_dir, "bf16").linear_names())
    stays = {n for n in every if ".self_attn." in n} | {DOWN}
    assert {name for group in report.in_bf16 for name in group.names} == stays
    assert in_fp8(out) == every - stays
    weights, before = open_checkpoint(out), open_checkpoint(model_dir)
    assert all(torch.equal(weights[f"{name}.weight"], before[f"{name}.weight"]) for name in stays)
    assert not any(name.rpartition(".")[0] in stays for name in load_scales(out / "scales.safetensors", out).tensors)
    assert {layer.name for layer in report.layers} == every - stays
    assert divergence(out, model_dir) == pytest.approx(report.quality.kl_divergence, rel=1e-6)
    assert CalibrationReport.from_json((out / "calibration.json").read_text()) == report
    assert "Layers in BF16" in html_report(report)
    assert any("stays in BF16" in str(cell) for column in summary_table(report).columns for cell in column.cells)


def test_only_named_layers_are_quantized(model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "out", "rowwise", only=["model.layers.0.*"])
    assert in_fp8(tmp_path / "out") == {n for n in load_servable(model_dir, "bf16").linear_names() if ".0." in n}


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block"])
def test_the_engine_serves_fp8_and_bf16_linears_together(recipe: str, model_dir: Path, tmp_path: Path) -> None:
    """Layers that the engine joins, such as q, k and v, may be partly FP8 and partly BF16."""
    run(model_dir, tmp_path / "out", recipe, skip=[QKV[0], "model.layers.1.mlp.*"])
    engine = Engine(tmp_path / "out")
    completions = engine.generate([[5, 6, 7, 8, 9]], max_new_tokens=8, ignore_eos=True)
    assert len(completions[0].token_ids) == 8
    assert {n for n, m in engine.loaded.runner.model.named_modules() if isinstance(m, FrozenLinear)} == in_fp8(
        tmp_path / "out"
    )


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_transformers_reads_fp8_and_bf16_linears(recipe: str, model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "out", recipe, skip=[*QKV, DOWN])
    auto = transformers.AutoModelForCausalLM
    model, problems = auto.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]))
    assert not any(problems.values())
    ours = open_checkpoint(tmp_path / "out")
    for name in ours:
        assert torch.equal(model.get_parameter(name), ours[name].float())


def test_a_target_is_met_with_few_linears_in_bf16(model_dir: Path, tmp_path: Path) -> None:
    plain = run(model_dir, tmp_path / "plain").quality.kl_divergence
    assert plain is not None
    report = run(model_dir, tmp_path / "out", target_kl=0.6 * plain)
    assert report.quality.kl_divergence is not None
    assert report.quality.kl_divergence <= 0.6 * plain
    names = [name for group in report.in_bf16 for name in group.names]
    assert 0 < len(names) < 12
    assert all(group.kl for group in report.in_bf16)
    assert in_fp8(tmp_path / "out").isdisjoint(names)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *names]


def test_a_target_that_is_met_already_changes_nothing(model_dir: Path, tmp_path: Path) -> None:
    report = run(model_dir, tmp_path / "out", target_kl=10.0)
    run(model_dir, tmp_path / "plain")
    assert report.in_bf16 == ()
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "plain")]
    assert files[0] == files[1]


def test_skipped_linears_work_with_gptq_and_healing(model_dir: Path, tmp_path: Path) -> None:
    options = {"rounding": "gptq", "heal": 20, "heal_rate": 3e-4, "kv_cache": True}
    report = run(model_dir, tmp_path / "out", skip=[*QKV], target_kl=0.03, **options)
    assert report.healing is not None
    assert {n for group in report.in_bf16 for n in group.names}.issuperset(QKV)
    assert divergence(tmp_path / "out", model_dir) < 0.05


def test_the_smallest_number_of_groups_is_found_by_bisection() -> None:
    candidates = [LinearGroup((str(i),), 1, 1.0) for i in range(20)]
    calls: list[int] = []

    def groups_for(needed: int) -> int:
        def is_met(groups: Sequence[LinearGroup]) -> bool:
            calls.append(len(groups))
            return len(groups) >= needed

        return min_groups_in_bf16(candidates, is_met)

    assert groups_for(14) == 14
    assert len(calls) <= 6
    assert groups_for(0) == 0
    assert groups_for(20) == 20


def test_linears_that_read_one_input_form_one_group() -> None:
    names = [f"model.layers.0.{n}" for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")]
    assert input_groups(names) == [tuple(names[:2]), (names[2],), (names[3],)]
    assert excluded_linears(names, ["down_proj"], ()) == [names[3]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"skip": ["model.layers.9.*"]},
            "'model.layers.9.*' matches no linear layer; linear layers have names such as model.lay",
        ),
        ({"skip": ["*"]}, "`skip` and `only` exclude every linear layer"),
        ({"only": ["lm_head"]}, "'lm_head' matches no linear layer"),
        ({"target_kl": 1e-9}, "The target needs every linear layer in high precision"),
        ({"target_kl": 0.0}, "target_kl"),
        ({"skip": ["q_proj"], "scales_only": True}, "so it cannot choose which stay in high precision"),
    ],
)
def test_invalid_options_are_refused(
    options: dict[str, object], sentence: str, model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(Fp8ServeError, match=sentence) as refused:
        run(model_dir, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert type(refused.value) is RecipeError or sentence.startswith("target_kl")
    assert list(tmp_path.iterdir()) == []
