"""`rounding="gptq"`: the written model diverges less from the original than with rounding to nearest, as the report
says."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8serve.calibration.data import calibration_batches
from fp8serve.calibration.measure import TokenTally, add_logits
from fp8serve.calibration.passes import forward, forward_hooks, layerwise_passes
from fp8serve.calibration.pipeline import calibrate, load_for_calibration
from fp8serve.calibration.result import CalibrationReport
from fp8serve.calibration.techniques.rounding import _products_of
from fp8serve.errors import Fp8ServeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.checkpoint import load_servable, load_trainable, open_checkpoint
from fp8serve.model.text.tokenizer import Tokenizer

from .conftest import VOCAB

SMALL = {"samples": 48, "seq_len": 48, "batch_size": 4}
ONE = {"samples": 1, "seq_len": 48, "batch_size": 1, "seed": 0}


def run(model: Path, out: Path, recipe: str, **options: object) -> CalibrationReport:
    return calibrate(model, out=out, recipe=from_name(recipe), **SMALL, **options)  # type: ignore[arg-type]


@torch.no_grad()
def divergence(folder: Path, model: Path) -> float:
    """Returns KL(model || folder) in nats per token on the held-out samples."""
    tokenizer, served, exact = Tokenizer.from_dir(folder), load_servable(folder), load_servable(model, "bf16")
    batches = calibration_batches(None, tokenizer, VOCAB, **SMALL, seed=0)  # type: ignore[arg-type]
    tally = TokenTally()
    for batch in batches.held_out:
        add_logits(tally, batch.targets, (served, forward(served, batch)), (exact, forward(exact, batch)))
    kl = tally.quality(compared=True).kl_divergence
    assert kl is not None
    return kl


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "w8a16", "nvfp4-w4a16", "mxfp4-w4a16"])
def test_gptq_reduces_the_divergence_and_is_served_as_measured(recipe: str, model_dir: Path, tmp_path: Path) -> None:
    nearest = run(model_dir, tmp_path / "nearest", recipe).quality.kl_divergence
    report = run(model_dir, tmp_path / "gptq", recipe, rounding="gptq")
    assert nearest is not None
    assert report.quality.kl_divergence is not None
    assert report.quality.kl_divergence < 0.95 * nearest
    assert divergence(tmp_path / "gptq", model_dir) == pytest.approx(report.quality.kl_divergence, rel=1e-6)
    assert report.seconds["round"] > 0
    assert CalibrationReport.from_json((tmp_path / "gptq" / "calibration.json").read_text()).rounding == "gptq"
    assert "gptq" in (tmp_path / "gptq" / "report.html").read_text()


def test_weights_are_fitted_to_quantized_inputs(model_dir: Path) -> None:
    """GPTQ gets inputs after their cast to FP8. The test uses a scale at which half of the inputs saturate."""
    decoder, linears = load_for_calibration(model_dir, "cpu")
    name = "model.layers.0.self_attn.q_proj"
    (stream,) = layerwise_passes(
        decoder, calibration_batches(None, Tokenizer.from_dir(model_dir), VOCAB, **ONE).calibration
    )  # type: ignore[arg-type]
    layer = FrozenLinear.from_linear(linears[name], DelayedScaling(), torch.tensor(448.0), torch.tensor(1.0))
    product = _products_of(stream, 0, linears, {name: layer})[name]
    inputs: list[Tensor] = []
    with forward_hooks({name: linears[name]}, lambda name, linear, args, out: inputs.append(args[0])):
        stream.run(0)
    x = inputs[0].float()
    assert x.abs().max() > 1
    assert torch.allclose(product, (cast := dequantize(*layer.cast(inputs[0])).float()).t() @ cast)
    assert product.trace() < 0.9 * x.square().sum()


def test_gptq_changes_only_the_codes_of_weights(model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "nearest", "delayed")
    run(model_dir, tmp_path / "gptq", "delayed", rounding="gptq")
    plain, compensated = open_checkpoint(tmp_path / "nearest"), open_checkpoint(tmp_path / "gptq")
    for name in plain.quantized_linears:
        one, other = plain.quantized_matrix(name), compensated.quantized_matrix(name)
        assert one is not None
        assert other is not None
        assert torch.equal(one.weight_scale_inv, other.weight_scale_inv)
        assert not torch.equal(one.weight_q.float(), other.weight_q.float())
        assert one.input_scale == other.input_scale
    for name in set(plain) - {f"{linear}.weight" for linear in plain.quantized_linears}:
        assert torch.equal(plain[name], compensated[name])


def test_the_same_samples_give_the_same_bits(model_dir: Path, tmp_path: Path) -> None:
    weights = []
    for out in (tmp_path / "a", tmp_path / "b"):
        run(model_dir, out, "rowwise", rounding="gptq")
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_training_starts_from_the_served_weights(model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "gptq", "delayed", rounding="gptq")
    checkpoint, trainable = open_checkpoint(tmp_path / "gptq"), load_trainable(tmp_path / "gptq")
    name = checkpoint.quantized_linears[0]
    layer = checkpoint.quantized_matrix(name)
    assert layer is not None
    assert torch.equal(trainable.get_parameter(f"{name}.weight"), layer.weight_q.float() * layer.weight_scale_inv)


def test_invalid_options_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Fp8ServeError, match="rounding must be"):
        run(model_dir, tmp_path / "out", "delayed", rounding="up")
    with pytest.raises(Fp8ServeError, match="scales_only writes no weights, so their rounding"):
        run(model_dir, tmp_path / "out", "delayed", rounding="gptq", scales_only=True)
    assert not (tmp_path / "out").exists()
