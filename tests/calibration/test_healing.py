"""`heal`: training the FP8 model towards the output of the original model; the final weights and scales are written."""

import math
from pathlib import Path

import pytest
import torch

from fp8serve.calibration.data import calibration_batches
from fp8serve.calibration.observe import final_states, make_observer, observe
from fp8serve.calibration.pipeline import calibrate, load_for_calibration
from fp8serve.calibration.result import CalibrationReport
from fp8serve.calibration.techniques.healing import heal
from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.recipe import DelayedScaling, Recipe, from_name
from fp8serve.model.checkpoint import kv_scales, load_scales, load_servable
from fp8serve.model.text.tokenizer import Tokenizer

from .conftest import VOCAB
from .test_rounding import SMALL, divergence

RATE = 3e-4  # the tiny model's weights are random and large
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "delayed, most recent": DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
    "delayed, weights by row": DelayedScaling(weight_granularity="row"),
    "rowwise": from_name("rowwise"),  # type: ignore[dict-item]
    "block": from_name("block"),  # type: ignore[dict-item]
}


def run(model: Path, out: Path, recipe: Recipe, **options: object) -> CalibrationReport:
    rate = {"heal_rate": RATE} if options.get("heal") else {}
    return calibrate(model, out=out, recipe=recipe, **(SMALL | rate | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_healing_reduces_the_divergence_and_is_served_as_measured(
    recipe: Recipe, model_dir: Path, tmp_path: Path
) -> None:
    report = run(model_dir, tmp_path / "out", recipe, heal=40)
    healing = report.healing
    assert healing is not None
    assert healing.kl_before is not None
    assert healing.kl_after is not None
    assert len(healing.losses) == 40
    assert healing.kl_after < 0.97 * healing.kl_before
    assert report.quality.kl_divergence == healing.kl_after
    assert divergence(tmp_path / "out", model_dir) == pytest.approx(healing.kl_after, rel=1e-6)
    assert "40 steps of healing changed the KL divergence" in report.notes[0]
    assert CalibrationReport.from_json((tmp_path / "out" / "calibration.json").read_text()) == report


@pytest.mark.parametrize(
    ("recipe", "bound"), [(DelayedScaling(), 1.0), (from_name("nvfp4"), 1.05)], ids=["delayed", "nvfp4"]
)
def test_healing_starts_from_gptq_rounding(recipe: Recipe, bound: float, model_dir: Path, tmp_path: Path) -> None:
    report = run(model_dir, tmp_path / "out", recipe, heal=40, rounding="gptq")
    plain = run(model_dir, tmp_path / "plain", recipe, rounding="gptq")
    assert report.healing is not None
    assert report.healing.kl_before == plain.quality.kl_divergence
    assert report.healing.kl_before is not None
    assert report.healing.kl_after is not None
    assert report.healing.kl_after < bound * report.healing.kl_before


def test_the_same_samples_give_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        run(model_dir, tmp_path / name, RECIPES["delayed"], heal=6, kv_cache=True)
    for file in ("model.safetensors", "scales.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_the_weights_after_the_last_step_are_served(model_dir: Path) -> None:
    """The training forward pass of the next step has the same bits as that of the frozen layers."""
    decoder, linears = load_for_calibration(model_dir, "cpu")
    batches = calibration_batches(None, Tokenizer.from_dir(model_dir), VOCAB, **SMALL, seed=0).calibration  # type: ignore[arg-type]
    recipe = DelayedScaling()
    observer = observe(decoder, make_observer(decoder, linears, recipe), batches)
    final_states(observer)
    weights: dict[str, torch.Tensor] = {}
    before = {name: linear.weight for name, linear in linears.items()}
    reference = load_servable(model_dir, "bf16")
    frozen, _ = heal(decoder, linears, reference, batches, recipe, observer, steps=5, max_rate=RATE)
    assert all(linears[name].weight is weight for name, weight in before.items())
    for name, layer in frozen.items():
        state = linears[name].scaling["input"]
        assert layer.input_scale is not None
        assert torch.equal(layer.input_scale, state.scale)
        weights[name] = layer.weight_q.float() * layer.weight_scale_inv
        linears[name].weight = torch.nn.Parameter(weights[name])  # exactly the FP8 values of the trained weight
    x = torch.randn(7, 64)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        with torch.no_grad(), autocast(recipe=recipe):
            expected = linears[name](x)
        assert torch.equal(frozen[name](x), expected)


def test_cache_scales_cover_the_amaxes_of_healing(model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "plain", RECIPES["delayed"], kv_cache=True)
    report = run(model_dir, tmp_path / "healed", RECIPES["delayed"], kv_cache=True, heal=40)
    tensor = report.tensor("model.layers.0.self_attn.k")
    assert tensor is not None
    assert tensor.observations == 40 + report.data.batches
    assert tensor.scale == pytest.approx(448 / tensor.amax, rel=1e-6)
    assert len(kv_scales(tmp_path / "healed")) == 2


def test_scales_belong_to_the_healed_weights_only(model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "out", RECIPES["delayed"], heal=4)
    scales = tmp_path / "out" / "scales.safetensors"
    load_scales(scales, tmp_path / "out")
    with pytest.raises(Fp8ServeError, match="belongs to another model"):
        load_scales(scales, model_dir)


def test_healing_that_does_not_help_is_discarded(model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "plain", RECIPES["delayed"])
    report = run(model_dir, tmp_path / "out", RECIPES["delayed"], heal=3, heal_rate=0.5)
    assert report.healing is not None
    assert not report.healing.is_improvement
    assert "no improvement, so the weights from before healing were written" in report.notes[0]
    assert report.quality.kl_divergence == report.healing.kl_before
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "plain")]
    assert weights[0] == weights[1]
    assert all(tensor.observations == report.data.batches for tensor in report.tensors)
    mine, theirs = (load_scales(tmp_path / name / "scales.safetensors").tensors for name in ("out", "plain"))
    assert all(torch.equal(entry.scale, theirs[name].scale) for name, entry in mine.items())


def test_a_divergence_is_an_error(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8serve.calibration.techniques.healing.learning_rate", lambda *_: math.nan)
    with pytest.raises(ModelError, match=r"Healing diverged: the loss of step \d+ is nan; lower heal_rate"):
        run(model_dir, tmp_path / "out", RECIPES["rowwise"], heal=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scales_only": True}, "leave out scales_only"),
        ({"recipe": from_name("w8a16")}, "The recipe 'w8a16' does not support training"),
        ({"heal": -1}, "heal"),
        ({"heal_rate": 0.0}, "heal_rate"),
        ({"heal_rate": 1.5}, "heal_rate"),
        ({"heal": 0, "heal_rate": 1e-4}, "healing, which is off; give heal, or leave out heal_rate"),
    ],
)
def test_invalid_options_are_refused(
    options: dict[str, object], sentence: str, model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(Fp8ServeError, match=sentence):
        run(model_dir, tmp_path / "out", **({"recipe": RECIPES["delayed"], "heal": 4} | options))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
