"""Smoothing: it changes no bit of the model in high precision, and removes the loss by a planted outlier, which reports
name."""

import random
import re
from collections.abc import Callable
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from fp8serve.calibration.data import Batch, Sample, load_samples, make_batches
from fp8serve.calibration.passes import forward
from fp8serve.calibration.pipeline import calibrate, load_for_calibration
from fp8serve.calibration.reports.findings import findings
from fp8serve.calibration.reports.tables import summary_table
from fp8serve.calibration.result import CalibrationReport
from fp8serve.calibration.techniques.smoothing import (
    FACTORS,
    fold,
    layer_parameters,
    set_parameters,
    smooth,
    smoothing_factors,
    smoothing_pairs,
)
from fp8serve.errors import Fp8ServeError
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.checkpoint import load_scales, load_servable, open_checkpoint
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model.oracle import make_model

from .conftest import VOCAB, write_model, write_tokenizer
from .planted import CHANNEL, NORM, plant
from .test_rounding import SMALL, divergence

LARGE = 18  # 2^18 exceeds the range of E4M3 relative to ordinary values; 2^7 does not
# The pairs of a layer. Gemma's norms by 1 + weight cannot represent a factor exactly, OLMo has no norm before a linear,
# the outputs of fused linears cannot be scaled separately, and all linears may read one norm.
PAIRS = {"llama-bias": 4, "llama-wide-head": 4, "qwen2": 4, "qwen3": 4, "gemma2": 2, "gemma3": 2, "granite": 4,
         "smollm3": 4, "phi3": 2, "olmo2": 2, "glm4": 3, "ministral3": 4, "cohere-qk-norm": 3, "cohere2": 3,
         "stablelm": 4, "stablelm-parallel": 3}  # fmt: skip


@pytest.fixture(scope="module")
def planted(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(model_dir, tmp_path_factory.mktemp("planted") / "tiny", LARGE)


def run(model: Path, out: Path, recipe: str = "delayed", **options: object) -> CalibrationReport:
    arguments = SMALL | {"generated_samples": 0} | options
    return calibrate(model, out=out, recipe=from_name(recipe), **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], CalibrationReport]:
    """Returns a function that gives the report of a calibration without smoothing, by model and recipe."""

    @cache
    def report(model: Path, recipe: str) -> CalibrationReport:
        return run(model, tmp_path_factory.mktemp("usual") / "out", recipe)

    return report


def kl(report: CalibrationReport) -> float:
    assert report.quality.kl_divergence is not None
    return report.quality.kl_divergence


def batch(vocab: int = 320) -> Batch:
    ids = torch.randint(2, vocab, (24,), generator=torch.Generator().manual_seed(1))
    return Batch(ids, torch.arange(24), ids.roll(-1), [24])


# -- factors -----------------------------------------------------------------------------------------------------------


def fold_at_random(decoder: Decoder) -> int:
    """Folds factors from 2^-6 to 2^6 into every pair of every layer. Returns the number of pairs."""
    generator, names, count = torch.Generator().manual_seed(0), [n for n, _ in decoder.named_modules()], 0
    for index in range(decoder.config.num_layers):
        for pair in smoothing_pairs(decoder.config, index, names):
            weights = layer_parameters(decoder, index)
            channels = weights[f"{pair.producer}.weight"].shape[0]
            by = torch.ldexp(torch.ones(channels), torch.randint(-6, 7, (channels,), generator=generator))
            changed = fold(pair, weights, by)
            assert changed is not None
            set_parameters(decoder, changed)
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.smoke) if k == "qwen2" else k for k in PAIRS])
@torch.no_grad()
def test_folding_changes_no_bit_of_any_family(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path)
    decoder = load_servable(tmp_path, "bf16")
    exact = forward(decoder, batch())
    assert fold_at_random(decoder) == PAIRS[kind] * decoder.config.num_layers
    assert torch.equal(forward(decoder, batch()), exact)


@pytest.mark.smoke
def test_a_factor_that_weights_cannot_hold_is_not_folded(model_dir: Path) -> None:
    decoder = load_servable(model_dir, "bf16")
    pair = smoothing_pairs(decoder.config, 0, ["model.layers.0.mlp.down_proj"])[0]
    weights = layer_parameters(decoder, 0)
    assert fold(pair, weights, torch.full((160,), 2.0**10)) is not None
    assert fold(pair, weights, torch.full((160,), 2.0**127)) is None


@pytest.mark.smoke
def test_smoothing_factors_follow_alpha() -> None:
    inputs, weights = torch.tensor([1.0, 1.0, 64.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1 / 64, 1.0, 1.0])
    for alpha in (0.0, 0.5, 1.0):
        assert smoothing_factors(inputs, weights, alpha).tolist() == [1, 1, 64, 1, 1]
    assert smoothing_factors(inputs, torch.ones(5), 1.0).tolist() == [1, 1, 64, 1, 1]
    assert smoothing_factors(inputs, torch.ones(5), 0.5).tolist() == [1, 1, 8, 1, 1]
    assert smoothing_factors(inputs, torch.ones(5), 0.0).tolist() == [1, 1, 1, 1, 1]
    assert smoothing_factors(torch.zeros(3), torch.ones(3), 0.5).tolist() == [1, 1, 1]


# -- planted outliers --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_planted_model_is_the_same_in_high_precision(model_dir: Path, planted: Path) -> None:
    one, other = (forward(load_servable(folder, "bf16"), batch(VOCAB)) for folder in (model_dir, planted))
    assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_smoothing_removes_the_loss_by_an_outlier_and_is_served_as_measured(
    recipe: str, model_dir: Path, planted: Path, tmp_path: Path, reports: Callable[[Path, str], CalibrationReport]
) -> None:
    usual, harmed = reports(model_dir, recipe), reports(planted, recipe)
    report = run(planted, tmp_path / "smooth", recipe, smoothing=0.5)
    assert kl(harmed) > 2 * kl(usual)
    assert kl(report) < 1.2 * kl(usual)
    assert divergence(tmp_path / "smooth", model_dir) == pytest.approx(kl(report), rel=1e-6)
    assert report.smoothing is not None
    assert NORM in report.smoothing.pairs
    assert report.smoothing.tried == 8
    assert CalibrationReport.from_json((tmp_path / "smooth" / "calibration.json").read_text()) == report
    assert "Smoothing was applied to the channels of" in report.notes[0]


@pytest.mark.slow
def test_block_scaling_tolerates_an_outlier(model_dir: Path, tmp_path: Path) -> None:
    """Only the 128 channels that share a scale with the outlier are affected."""
    wide = write_model(tmp_path / "wide", hidden_size=256)
    norm = "model.layers.0.post_attention_layernorm"
    harmful = plant(wide, tmp_path / "harmful", LARGE, norm)
    static = [kl(run(model, tmp_path / f"{model.name}-static")) for model in (wide, harmful)]
    block = [kl(run(model, tmp_path / f"{model.name}-block", "block")) for model in (wide, harmful)]
    assert block[1] / block[0] < static[1] / static[0]


@pytest.mark.slow
@pytest.mark.parametrize("power", [7, pytest.param(LARGE, marks=pytest.mark.smoke)])
def test_an_outlier_is_found_and_named(
    power: int, model_dir: Path, planted: Path, tmp_path: Path, reports: Callable[[Path, str], CalibrationReport]
) -> None:
    report = reports(planted if power == LARGE else plant(model_dir, tmp_path / "planted", power), "delayed")
    (finding,) = [f for f in findings(report) if "--smoothing" in f.text]
    assert finding.is_problem
    assert f"layer 1 gate/up input (channel {CHANNEL}: " in finding.text
    worst = {layer.name: layer.outlier for layer in report.layers}["model.layers.1.mlp.gate_proj"]
    assert worst is not None
    assert (worst.channel, round(worst.excess, -3) > 0) == (CHANNEL, True)
    out = StringIO()
    Console(file=out, width=300).print(summary_table(report))
    assert re.search(rf"largest outlier channel .* model.layers.1.mlp.\w+_proj, channel {CHANNEL}: ", out.getvalue())


def test_an_ordinary_model_has_no_outlier(model_dir: Path, reports: Callable[[Path, str], CalibrationReport]) -> None:
    report = reports(model_dir, "delayed")
    assert not any("--smoothing" in f.text for f in findings(report))
    assert report.smoothing is None


# -- with everything else ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"rounding": "gptq"}, {"heal": 4}, {"kv_cache": True, "gradients": True}],
    ids=str,
)
def test_smoothing_works_with_other_methods(
    options: dict[str, object], model_dir: Path, planted: Path, tmp_path: Path
) -> None:
    usual = run(model_dir, tmp_path / "usual", **options)
    report = run(planted, tmp_path / "smooth", smoothing=0.5, **options)
    assert kl(report) < 1.2 * kl(usual)
    assert divergence(tmp_path / "smooth", model_dir) < 1.2 * divergence(tmp_path / "usual", model_dir)


@pytest.mark.slow
@torch.no_grad()
def test_layers_in_bf16_are_smoothed_too(planted: Path, tmp_path: Path) -> None:
    """The norm before the MLP feeds gate_proj, which is in FP8, and up_proj, which is in BF16."""
    run(planted, tmp_path / "out", smoothing=0.5, skip=("*.up_proj",))
    before, after = open_checkpoint(planted), open_checkpoint(tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(before[name], after[name])
    one, other = (forward(load_servable(folder, "bf16"), batch(VOCAB)) for folder in (planted, tmp_path / "out"))
    assert torch.nn.functional.cosine_similarity(one, other, dim=-1).min() > 0.9


@pytest.mark.slow
def test_an_fp8_model_is_dequantized_and_smoothed(planted: Path, tmp_path: Path) -> None:
    """Its weights are dequantized and smoothed."""
    run(planted, tmp_path / "first", "block")
    harmed = run(tmp_path / "first", tmp_path / "harmed")
    report = run(tmp_path / "first", tmp_path / "smooth", smoothing=0.5)
    assert kl(report) < 0.7 * kl(harmed)
    assert divergence(tmp_path / "smooth", tmp_path / "first") == pytest.approx(kl(report), rel=1e-6)


@pytest.mark.slow
def test_pairs_without_fp8_layers_are_not_smoothed(model_dir: Path, tmp_path: Path) -> None:
    report = run(model_dir, tmp_path / "out", smoothing=0.5, only=("*.o_proj",))
    assert report.smoothing is not None
    assert report.smoothing.tried == 2


@pytest.mark.slow
def test_norms_by_one_plus_weight_are_not_smoothed(tmp_path: Path) -> None:
    make_model("gemma2", tmp_path / "model", overrides={"vocab_size": VOCAB})
    write_tokenizer(tmp_path / "model")
    report = run(tmp_path / "model", tmp_path / "out", smoothing=0.5)
    assert report.smoothing is not None
    assert report.smoothing.tried == 2 * 4
    assert "The norms were not smoothed" in report.notes[0]


@pytest.mark.slow
def test_scales_belong_to_the_smoothed_weights_only(planted: Path, tmp_path: Path) -> None:
    run(planted, tmp_path / "out", smoothing=0.5)
    scales = tmp_path / "out" / "scales.safetensors"
    load_scales(scales, tmp_path / "out")
    with pytest.raises(Fp8ServeError, match="belongs to another model"):
        load_scales(scales, planted)


# -- the order of samples ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(planted: Path) -> list[Sample]:
    return load_samples(None, Tokenizer.from_dir(planted), VOCAB, count=12, seq_len=48, seed=0)


def smoothed(model: Path, samples: list[Sample], batch_size: int) -> dict[str, Tensor]:
    decoder, linears = load_for_calibration(model, "cpu")
    return smooth(decoder, linears, make_batches(samples, batch_size), DelayedScaling(), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 5])
def test_shuffled_split_and_repeated_batches_give_the_same_bits(
    batch_size: int, planted: Path, samples: list[Sample]
) -> None:
    expected = smoothed(planted, samples, 3)
    assert f"{NORM}{FACTORS}" in expected
    shuffled = random.Random(batch_size).sample(samples, len(samples))
    actual = smoothed(planted, shuffled + shuffled[:4], batch_size)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


# -- what cannot be asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_alpha_is_a_fraction(alpha: float, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Fp8ServeError, match="smoothing"):
        run(model_dir, tmp_path / "out", smoothing=alpha)


@pytest.mark.smoke
def test_smoothing_is_refused_with_scales_only(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Fp8ServeError, match="scales_only writes no weights, but smoothing changes weights"):
        run(model_dir, tmp_path / "out", smoothing=0.5, scales_only=True)
    assert list(tmp_path.iterdir()) == []
