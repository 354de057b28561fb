"""`input_scales="search"`: scales with the least error, at which some observed values saturate; and refused options."""

from pathlib import Path

import pytest
import torch

from fp8serve.calibration.data import Batch, calibration_batches
from fp8serve.calibration.observe import RANGE_FRACTIONS, search_amaxes
from fp8serve.calibration.passes import forward, forward_hooks
from fp8serve.calibration.pipeline import calibrate, load_for_calibration
from fp8serve.errors import RecipeError
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.ops import quantize
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.checkpoint import load_scales, load_servable
from fp8serve.model.network.decoder import Decoder
from fp8serve.model.text.tokenizer import Tokenizer

from .conftest import VOCAB

SMALL = {"samples": 12, "seq_len": 48, "batch_size": 4}
DOWN, Q, V = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> tuple[Decoder, dict[str, Linear], list[Batch]]:
    batches = calibration_batches(None, Tokenizer.from_dir(model_dir), VOCAB, **SMALL, seed=0)  # type: ignore[arg-type]
    return *load_for_calibration(model_dir, "cpu"), batches.calibration


@torch.no_grad()
def inputs(decoder: Decoder, linears: dict[str, Linear], batches: list[Batch], name: str) -> torch.Tensor:
    """Returns all inputs of a linear, [tokens, K]."""
    tensors: list[torch.Tensor] = []
    with forward_hooks({name: linears[name]}, lambda name, module, args, out: tensors.append(args[0])):
        for batch in batches:
            forward(decoder, batch)
    return torch.cat(tensors)


def test_the_search_finds_the_range_with_the_least_error(
    loaded: tuple[Decoder, dict[str, Linear], list[Batch]],
) -> None:
    decoder, linears, batches = loaded
    x, w = inputs(*loaded, DOWN), linears[DOWN].weight
    amaxes = {f"{name}.input": 4.0 for name in linears} | {f"{DOWN}.input": 64.0 * float(x.abs().max())}

    def error(part: float) -> float:
        q, scale_inv = quantize(x.float(), scale=torch.tensor(448 / (part * amaxes[f"{DOWN}.input"])))
        return float(((q.float() * scale_inv - x.float()).double() @ w.double().t()).square().sum())

    result = search_amaxes(decoder, linears, batches, amaxes)[f"{DOWN}.input"]
    assert result / amaxes[f"{DOWN}.input"] == min(RANGE_FRACTIONS, key=error)


def test_the_scales_of_the_search_are_served(model_dir: Path, tmp_path: Path) -> None:
    recipe = DelayedScaling(amax_history_len=8, margin=1)
    report = calibrate(model_dir, out=tmp_path / "out", recipe=recipe, input_scales="search", **SMALL)  # type: ignore[arg-type]
    decoder, linears = load_for_calibration(model_dir, "cpu")
    amaxes = {t.name: t.amax for t in report.tensors}
    batches = calibration_batches(None, Tokenizer.from_dir(model_dir), VOCAB, **SMALL, seed=0).calibration  # type: ignore[arg-type]
    expected = search_amaxes(decoder, linears, batches, amaxes)
    scales = load_scales(tmp_path / "out" / "scales.safetensors", tmp_path / "out").tensors
    for name in linears:
        entry = scales[f"{name}.input"]
        assert entry.amax_history is not None
        assert float(entry.scale) == pytest.approx(224 / expected[f"{name}.input"], rel=1e-6)
        assert float(entry.amax_history.max()) <= expected[f"{name}.input"]
        assert torch.equal(load_servable(tmp_path / "out").get_submodule(name).input_scale, entry.scale)  # type: ignore[arg-type]
        assert float(scales[f"{name}.weight"].scale) == pytest.approx(224 / amaxes[f"{name}.weight"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recipe": from_name("rowwise"), "input_scales": "search"}, "'rowwise' stores no scales for inputs"),
        ({"input_scales": "median"}, "median"),
    ],
)
def test_invalid_options_are_refused(
    options: dict[str, object], sentence: str, model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=sentence) as refused:
        calibrate(model_dir, out=tmp_path / "out", **SMALL, **options)  # type: ignore[arg-type]
    assert type(refused.value).__module__ == RecipeError.__module__
    assert list(tmp_path.iterdir()) == []
