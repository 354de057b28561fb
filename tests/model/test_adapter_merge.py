"""Merging an adapter into its base model: the formula, the loss by rounding, and which scales are kept or
recomputed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.calibration.pipeline import calibrate
from fp8serve.cli import main
from fp8serve.errors import ModelError
from fp8serve.fp8 import recipe
from fp8serve.fp8.casting import cast_weight
from fp8serve.fp8.ops import dequantize
from fp8serve.fp8.recipe import Float4WeightOnly
from fp8serve.model.adapter_merge import apply_adapter, merge, total_loss
from fp8serve.model.adapters import LinearAdapter, read_adapter
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.train.scratch import write_random_model

NAME = "model.layers.0.self_attn.q_proj"
OWNER = f"base_model.model.{NAME}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [f"the {color} fox jumps over the lazy dog" for color in ("red", "green", "blue")]
    sizes = {"vocab_size": 300, "hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
    return write_random_model(tmp_path_factory.mktemp("merge") / "plain", texts, **sizes)  # type: ignore[arg-type]


def adapter(folder: Path, size: float, *, dora: bool = False) -> Path:
    """Writes an adapter of one projection. `size` is the approximate magnitude of an element of its weight change."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {f"{OWNER}.lora_A.weight": torch.randn(4, 128), f"{OWNER}.lora_B.weight": torch.randn(128, 4) * size / 4}
    if dora:
        tensors[f"{OWNER}.lora_magnitude_vector"] = torch.rand(128) + 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_merged_weights_follow_the_lora_formula() -> None:
    weight, a, b, m = torch.randn(6, 8), torch.randn(2, 8), torch.randn(6, 2), torch.rand(6)
    moved = weight + 1.5 * b @ a
    torch.testing.assert_close(apply_adapter(weight, LinearAdapter(a, b, 1.5)), moved)
    rows = apply_adapter(weight, LinearAdapter(a, b, 1.5, m))
    torch.testing.assert_close(rows.norm(dim=1), m)
    torch.testing.assert_close(rows, moved * (m / moved.norm(dim=1))[:, None])


@pytest.mark.parametrize("dora", [False, True])
def test_a_bf16_base_stays_bf16(plain: Path, tmp_path: Path, dora: bool) -> None:
    losses = total_loss(merge(plain, adapter(tmp_path / "a", 0.02, dora=dora), tmp_path / "out"))
    before, after = open_checkpoint(plain), open_checkpoint(tmp_path / "out")
    assert not after.quantized_linears
    assert losses.error < 0.01
    assert [name for name in before if not torch.equal(before[name], after[name])] == [f"{NAME}.weight"]
    load_servable(tmp_path / "out", "bf16")


@pytest.mark.parametrize("kind", ["delayed", "rowwise", "block"])
def test_an_fp8_base_keeps_its_scales(plain: Path, tmp_path: Path, kind: str) -> None:
    scaling = recipe.from_name(kind)
    calibrate(plain, out=tmp_path / "base", samples=2, seq_len=16, recipe=scaling)  # type: ignore[arg-type]
    losses = total_loss(
        merge(tmp_path / "base", adapter(tmp_path / "a", 0.001), tmp_path / "out", max_lost_fraction=1.0)
    )
    assert losses.rescaled < (
        10 if kind == "rowwise" else 1
    )  # all 128 rows start with an amax of 448, E4M3's largest value; a few exceed it after the merge
    assert 0.01 < losses.lost_share < 0.9
    assert 0.05 < losses.error < 1.0
    before, after = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "out")
    for name in before.quantized_linears:
        old, new = before.quantized_matrix(name), after.quantized_matrix(name)
        assert old is not None
        assert new is not None
        same = torch.equal(old.weight_q.view(torch.uint8), new.weight_q.view(torch.uint8))
        assert same is (name != NAME)
        grown = int((old.weight_scale_inv != new.weight_scale_inv).sum())
        assert grown == (losses.rescaled if name == NAME else 0)
    load_servable(tmp_path / "out")


FOUR_BIT = [Float4WeightOnly("nvfp4"), Float4WeightOnly("nvfp4", four_over_six=True), Float4WeightOnly("mxfp4")]


@pytest.mark.parametrize("scaling", FOUR_BIT, ids=str)
def test_a_base_of_4_bits_is_cast_again_and_keeps_other_layers(
    plain: Path, tmp_path: Path, scaling: Float4WeightOnly
) -> None:
    calibrate(plain, out=tmp_path / "base", samples=2, seq_len=16, recipe=scaling)
    losses = total_loss(merge(tmp_path / "base", adapter(tmp_path / "a", 0.1), tmp_path / "out", max_lost_fraction=1.0))
    assert 0 < losses.error < 1.0
    before, after = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "out")
    for name in before.quantized_linears:
        old, new = before.quantized_matrix(name), after.quantized_matrix(name)
        assert old is not None
        assert new is not None
        assert old.weight_spec == new.weight_spec == scaling.specs.linear["weight"]
        assert torch.equal(old.weight_q, new.weight_q) is (name != NAME)
        if name == NAME:
            low_rank = read_adapter(tmp_path / "a", before.config)[NAME]
            cast = cast_weight(apply_adapter(old.weight(), low_rank), new.specs[1])
            assert torch.equal(new.weight_q, cast.q)
    load_servable(tmp_path / "out")


@pytest.mark.parametrize("kind", ["delayed", "rowwise", "block"])
def test_only_scales_that_are_too_small_are_recomputed(plain: Path, tmp_path: Path, kind: str) -> None:
    scaling = recipe.from_name(kind)
    calibrate(plain, out=tmp_path / "base", samples=2, seq_len=16, recipe=scaling)  # type: ignore[arg-type]
    large = adapter(tmp_path / "a", 1.0)
    tensors = load_file(large / "adapter_model.safetensors")
    tensors[f"{OWNER}.lora_B.weight"][1:] = 0  # one row becomes much larger
    save_file(tensors, large / "adapter_model.safetensors")
    losses = merge(tmp_path / "base", large, tmp_path / "out")
    assert list(losses) == [NAME]
    assert losses[NAME].rescaled == 1
    assert losses[NAME].error < 0.05
    before, after = (open_checkpoint(tmp_path / name).quantized_matrix(NAME) for name in ("base", "out"))
    assert before is not None
    assert after is not None
    ratio = after.weight_scale_inv / before.weight_scale_inv
    assert set(ratio.unique().log2().tolist()) <= {float(n) for n in range(12)}
    rest = [dequantize(w.weight_q, w.weight_scale_inv)[1:] for w in (before, after)]
    torch.testing.assert_close(*rest, rtol=0, atol=float(after.weight_scale_inv.max()) * 1.001 * 2**-10)
    load_servable(tmp_path / "out")


def test_a_merge_that_loses_too_much_is_refused(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate(plain, out=tmp_path / "base", samples=2, seq_len=16)
    small, out = adapter(tmp_path / "a", 1e-5), tmp_path / "out"
    assert main(["merge", str(tmp_path / "base"), str(small), "--out", str(out)]) == 1
    assert "Merging would lose too much of the adapter: " in capsys.readouterr().err
    assert not out.exists()
    assert main(["merge", str(tmp_path / "base"), str(small), "--out", str(out), "--max-lost", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lost_share"] == report["layers"][NAME]["lost_share"] > 0.9
    with pytest.raises(ModelError, match="exists and is not empty"):
        merge(tmp_path / "base", small, out)
