import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.calibration.data import calibration_batches
from fp8serve.calibration.measure import TokenTally, add_logits
from fp8serve.calibration.passes import forward
from fp8serve.calibration.pipeline import calibrate
from fp8serve.calibration.result import CalibrationReport, Quality
from fp8serve.errors import DataError, Fp8ServeError, MachineError, ModelError, RecipeError, ScalesError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling, from_name, to_json
from fp8serve.model.checkpoint import kv_scales, load_scales, load_servable
from fp8serve.model.compatibility import MODELOPT_NOTE, SCALE_NAMES_NOTE
from fp8serve.model.text.tokenizer import Tokenizer

from .conftest import VOCAB, write_model

SMALL = {"samples": 12, "seq_len": 48, "batch_size": 4}
RECIPE = DelayedScaling(amax_history_len=8)


def run(model: Path, out: Path, **options: object) -> CalibrationReport:
    return calibrate(model, out=out, **(SMALL | {"recipe": RECIPE} | options))  # type: ignore[arg-type]


@torch.no_grad()
def served_quality(folder: Path, report: CalibrationReport) -> Quality:
    """Returns the perplexity of the written directory on the held-out samples of the report."""
    tokenizer, model = Tokenizer.from_dir(folder), load_servable(folder)
    data = report.data
    batches = calibration_batches(
        None, tokenizer, VOCAB, samples=data.samples, seq_len=data.seq_len, batch_size=4, seed=data.seed
    )
    tally = TokenTally()
    for batch in batches.held_out:
        add_logits(tally, batch.targets, (model, forward(model, batch)))
    return tally.quality(compared=False)


@pytest.fixture(scope="module")
def calibrated(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CalibrationReport]:
    out = tmp_path_factory.mktemp("out") / "fp8"
    return out, run(model_dir, out, kv_cache=True, gradients=True)


def test_the_directory_is_whole(calibrated: tuple[Path, CalibrationReport]) -> None:
    out, report = calibrated
    expected = {"config.json", "model.safetensors", "tokenizer.json", "scales.safetensors", "calibration.json"}
    assert expected | {"report.html"} <= {p.name for p in out.iterdir()}
    assert [p.name for p in out.parent.iterdir()] == [out.name]  # no temporary directory is left beside it
    assert CalibrationReport.from_json((out / "calibration.json").read_text()) == report
    assert report.model in (out / "report.html").read_text()
    assert report.data.samples == 12
    assert report.data.batches == 3
    assert report.seconds["total"] >= report.seconds["observe"] > 0
    assert len(report.layers) == 14
    assert len(report.tensors) == 14 * 3 + 4
    assert all(t.observations == 3 and t.scale and t.amax > 0 for t in report.tensors)


def test_the_served_model_has_the_measured_quality(model_dir: Path, tmp_path: Path) -> None:
    report = run(model_dir, tmp_path / "out")
    served = served_quality(tmp_path / "out", report)
    assert served.perplexity == report.quality.perplexity
    assert served.tokens == report.quality.tokens
    assert report.quality.reference_perplexity != report.quality.perplexity


JOINED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]


def weight_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Scales and histories of weights by name."""
    tensors = load_file(folder / "scales.safetensors")
    return {name: tensor for name, tensor in tensors.items() if ".weight." in name}


@pytest.mark.parametrize("options", [{}, {"rounding": "gptq"}, {"heal": 2}], ids=str)
def test_linears_that_read_the_same_input_share_a_weight_scale(
    model_dir: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """It is the scale of the largest amax. The product of joined linears then has one scale for each operand."""
    run(model_dir, tmp_path / "own", **options)
    run(model_dir, tmp_path / "shared", share_scales=True, **options)
    own, shared = weight_tensors(tmp_path / "own"), weight_tensors(tmp_path / "shared")
    assert own.keys() == shared.keys()
    for name in own:
        leaf = name.partition(".weight.")[0].rpartition(".")[2]
        members = next((group for group in JOINED if leaf in group), (leaf,))
        tensors = [own[name.replace(f"{leaf}.weight.", f"{member}.weight.")] for member in members]
        expected = torch.stack(tensors).amin(0) if name.endswith(".scale") else torch.stack(tensors).amax(0)
        assert "heal" in options or torch.equal(shared[name], expected), name
        assert all(torch.equal(shared[name], shared[name.replace(f"{leaf}.", f"{m}.")]) for m in members), name
    assert any(not torch.equal(own[name], shared[name]) for name in own)
    file = load_file(tmp_path / "shared/model.safetensors")  # readers such as vLLM take the largest of the parts
    scales = [{float(file[f"model.layers.0.self_attn.{leaf}.weight_scale"]) for leaf in JOINED[0]}]
    assert len(scales[0]) == 1
    joined = {folder: joined_scales(tmp_path / folder) for folder in ("own", "shared")}
    assert all(scale.dim() == 0 for scale in joined["shared"])
    assert all(scale.dim() == 2 for scale in joined["own"])


def joined_scales(folder: Path) -> list[torch.Tensor]:
    model: Any = load_servable(folder)
    model.join()
    layers = model.model.layers
    return [group._joined.scale for layer in layers for group in (layer.self_attn.qkv, layer.mlp.gate_up)]


@pytest.mark.parametrize("recipe", [DelayedScaling(weight_granularity="row"), from_name("rowwise"), from_name("w8a16")])
def test_only_stored_scales_of_weights_can_be_shared(model_dir: Path, tmp_path: Path, recipe: Any) -> None:
    with pytest.raises(RecipeError, match="share_scales needs one stored scale for each weight"):
        run(model_dir, tmp_path / "out", recipe=recipe, share_scales=True)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=8, weight_granularity="row"),
        DelayedScaling(amax_history_len=8, power_2_scale=True),
        DelayedScaling(amax_history_len=8, power_2_scale=True, weight_granularity="row"),
    ],
    ids=["rows", "powers of two", "both"],
)
@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_kinds_of_delayed_scaling_are_served_as_measured(
    model_dir: Path, tmp_path: Path, recipe: DelayedScaling, rounding: str
) -> None:
    report = run(model_dir, tmp_path / "out", recipe=recipe, rounding=rounding)
    assert served_quality(tmp_path / "out", report).perplexity == report.quality.perplexity
    scales = load_scales(tmp_path / "out" / "scales.safetensors", tmp_path / "out")
    assert scales.recipe == recipe
    assert any(name.endswith(".weight") for name in scales.tensors) is (recipe.weight_granularity == "tensor")
    logs = torch.stack([entry.scale for entry in scales.tensors.values()]).log2()
    assert torch.equal(logs, logs.round()) is recipe.power_2_scale


@pytest.mark.parametrize("name", ["current", "rowwise", "block", "w8a16"])
def test_recipes_without_history_are_served_as_measured(model_dir: Path, tmp_path: Path, name: str) -> None:
    recipe = from_name(name)
    report = run(model_dir, tmp_path / "out", recipe=recipe)
    assert json.dumps(report.recipe) == to_json(recipe)
    assert all(t.scale is None for t in report.tensors)
    assert report.quality.perplexity == pytest.approx(report.quality.reference_perplexity, rel=0.1)
    assert served_quality(tmp_path / "out", report).perplexity == report.quality.perplexity


@pytest.mark.parametrize("format_", ["fp8", "modelopt"])
def test_other_formats_hold_the_same_model(
    model_dir: Path, tmp_path: Path, calibrated: tuple[Path, CalibrationReport], format_: str
) -> None:
    report = run(model_dir, tmp_path / "out", format=format_)
    mine, theirs = (
        load_scales(tmp_path / "out" / "scales.safetensors"),
        load_scales(calibrated[0] / "scales.safetensors"),
    )
    for name, entry in mine.tensors.items():
        assert torch.equal(entry.scale, theirs.tensors[name].scale)
    assert calibrated[1].notes == ()
    assert report.notes == ((SCALE_NAMES_NOTE,) if format_ == "fp8" else (MODELOPT_NOTE,))
    assert served_quality(tmp_path / "out", report).perplexity == report.quality.perplexity


def test_scales_belong_to_both_directories(model_dir: Path, calibrated: tuple[Path, CalibrationReport]) -> None:
    out, report = calibrated
    for folder in (out, model_dir):
        checkpoint = load_scales(out / "scales.safetensors", folder)
    assert checkpoint.recipe == RECIPE
    assert checkpoint.observations["tokens"] == report.data.tokens
    assert checkpoint.observations["tensors"]["model.layers.0.mlp.up_proj.input"] == 3
    assert {n: float(e.scale) for n, e in checkpoint.tensors.items()} == {t.name: t.scale for t in report.tensors}
    history = checkpoint.tensors["model.layers.0.mlp.up_proj.input"].amax_history
    assert history is not None
    assert history.count_nonzero() == 3
    assert len(kv_scales(out)) == 2


def test_serving_uses_the_calibrated_scales(calibrated: tuple[Path, CalibrationReport]) -> None:
    out, report = calibrated
    model = load_servable(out)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, FrozenLinear)}
    assert len(layers) == 14
    for name, module in layers.items():
        tensor = report.tensor(f"{name}.input")
        assert tensor is not None
        assert module.input_scale is not None
        assert float(module.input_scale) == pytest.approx(tensor.scale, rel=1e-6)  # stored as its reciprocal


def test_a_scales_only_directory_serves_the_weights_of_the_source(model_dir: Path, tmp_path: Path) -> None:
    report = run(model_dir, tmp_path / "out", scales_only=True)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["scales.safetensors"]
    model = load_servable(model_dir, scales=tmp_path / "out" / "scales.safetensors")
    assert sum(isinstance(m, FrozenLinear) for m in model.modules()) == 14
    assert report.bytes_after == report.bytes_before


def test_scales_of_a_cache_alone_serve_no_linear_layers(model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "out", recipe=from_name("nvfp4"), kv_cache=True, scales_only=True)
    scales = tmp_path / "out" / "scales.safetensors"
    assert {name.rpartition(".")[2] for name in load_scales(scales, model_dir).tensors} == {"k", "v"}
    with pytest.raises(ScalesError, match="is for the recipe 'nvfp4', which computes the scales of inputs"):
        load_servable(model_dir, scales=scales)


def test_bytes_are_those_on_disk(model_dir: Path, calibrated: tuple[Path, CalibrationReport]) -> None:
    out, report = calibrated
    assert report.bytes_before == (model_dir / "model.safetensors").stat().st_size
    assert report.bytes_after == (out / "model.safetensors").stat().st_size < report.bytes_before


def test_a_second_run_gives_the_same_bits(
    model_dir: Path, tmp_path: Path, calibrated: tuple[Path, CalibrationReport]
) -> None:
    again = run(model_dir, tmp_path / "out", kv_cache=True, gradients=True)
    assert again.tensors == calibrated[1].tensors
    assert again.quality == calibrated[1].quality
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (calibrated[0] / "model.safetensors").read_bytes()


def test_batches_in_any_grouping_give_the_same_input_scales(model_dir: Path, tmp_path: Path) -> None:
    """Attention is within a sequence, so that the batch size can only change rounding."""
    reports = [run(model_dir, tmp_path / str(size), batch_size=size) for size in (1, 12)]
    for one, other in zip(reports[0].tensors, reports[1].tensors, strict=True):
        assert one.amax == pytest.approx(other.amax, rel=0.02), one.name


def test_a_float32_sharded_model_with_tied_embeddings_is_calibrated(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", tie_word_embeddings=True)
    tensors = {k: v.float() for k, v in load_file(source / "model.safetensors").items()}
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({k: tensors[k] for k in keys}, source / file, {"format": "pt"})
    (source / "model.safetensors").unlink()
    weight_map = {k: file for file, keys in halves.items() for k in keys}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if "dtype" not in k} | {"dtype": "float32"})
    )
    report = run(source, tmp_path / "out")
    assert report.bytes_after < report.bytes_before / 2
    load_servable(tmp_path / "out")


@pytest.mark.parametrize("several", [False, True])
def test_data_of_the_user_are_read_from_one_or_several_files(model_dir: Path, tmp_path: Path, several: bool) -> None:
    prompts, text = tmp_path / "prompts.jsonl", tmp_path / "text.txt"
    rows = [{"prompt": f"{i} and {i} are ", "completion": str(2 * i)} for i in range(9)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text.write_text("One paragraph of text.\n\nAnd another one.\n")
    report = run(model_dir, tmp_path / "out", data=[prompts, str(text)] if several else str(prompts), gradients=True)
    assert report.data.source == ((str(prompts), str(text)) if several else (str(prompts),))
    assert report.data.samples == (10 if several else 9)  # all of them
    assert report.data.held_out_source == ("the passages shipped with fp8serve",)


def test_held_out_samples_are_reported_and_not_calibrated_on(model_dir: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{i} and {i} are ", "completion": str(2 * i)}) + "\n" for i in range(9)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    (tmp_path / "test.jsonl").write_text(rows[3] + rows[4] + json.dumps({"text": "Something else."}) + "\n")
    files = {"data": tmp_path / "data.jsonl", "holdout": tmp_path / "test.jsonl"}
    data = run(model_dir, tmp_path / "out", **files, samples=24).data
    assert (data.samples, data.excluded, data.held_out_samples) == (7, 2, 3)
    assert data.held_out_source == (str(tmp_path / "test.jsonl"),)


def test_the_order_and_repetition_of_data_change_no_scale(model_dir: Path, tmp_path: Path) -> None:
    texts = [json.dumps({"text": f"Text number {i} is about {i * i} things."}) + "\n" for i in range(12)]
    orders = {
        "a": [texts[:6], texts[6:]],
        "b": [texts[:5:-1], texts[5::-1]],
        "c": [texts[6:] * 3, texts[:6] + texts[2:9]],
    }
    results = {}
    for name, files in orders.items():
        paths = [tmp_path / f"{name}{i}.jsonl" for i in range(2)]
        for path, lines in zip(paths, files, strict=True):
            path.write_text("".join(lines))
        report = run(model_dir, tmp_path / name, data=paths, samples=8)
        results[name] = (load_file(tmp_path / name / "scales.safetensors"), report.quality)
    for name in "bc":
        assert results[name][1] == results["a"][1]
        for key, value in results["a"][0].items():
            assert torch.equal(results[name][0][key], value)


def test_progress_reports_every_stage_and_layer(model_dir: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    run(model_dir, tmp_path / "out", progress=lambda *step: steps.append(step))
    assert [stage for stage, completed, _ in steps if completed == 0] == [
        "load",
        "observe",
        "compare",
        "rank",
        "write",
        "generate",
    ]
    assert [step for step in steps if step[0] == "observe"] == [("observe", i, 2) for i in range(3)]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recipe": replace(RECIPE, amax_compute_algo=lambda history: history.max())}, RecipeError, "function"),
        (
            {"recipe": replace(RECIPE, override_linear_precision=(True, False, False))},
            RecipeError,
            "nothing to calibrate",
        ),
        ({"recipe": from_name("rowwise"), "gradients": True}, RecipeError, "leave out gradients"),
        ({"recipe": from_name("rowwise"), "scales_only": True}, RecipeError, "nothing to write"),
        ({"recipe": from_name("bf16")}, RecipeError, "bf16"),
        ({"format": "gguf"}, DataError, "gguf"),
        ({"samples": 0}, DataError, "samples"),
        ({"device": "tpu9"}, MachineError, "tpu9"),
        ({"device": "cuda:99"}, MachineError, "cuda:99"),
        ({"data": "missing.jsonl"}, DataError, "missing.jsonl"),
    ],
)
def test_invalid_options_are_refused_and_nothing_is_written(
    model_dir: Path, tmp_path: Path, options: dict[str, object], error: type[Fp8ServeError], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(model_dir, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_not_overwritten(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ModelError, match="not empty"):
        run(model_dir, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["note"]


def test_a_model_with_a_dead_layer_is_refused_whole(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ScalesError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
