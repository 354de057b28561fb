"""Fused ops give the logits of the plain decoder, bit for bit, and keep its names and counters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8serve.engine.engine import Engine
from fp8serve.engine.fused import _join, fuse
from fp8serve.engine.invariant import own_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.checkpoint import load_servable

from .tiny import ARCHITECTURES, write_model, write_scales

pytestmark = pytest.mark.skipif(not own_products("cpu"), reason="the CPU kernels are not built")
SIZES = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 512, "head_dim": 128}
MODES: dict[str, dict[str, Any]] = {
    "delayed": {"recipe": DelayedScaling()},
    "fp8 cache": {"recipe": DelayedScaling(), "kv_cache_dtype": "fp8"},
    "rowwise": {"recipe": "rowwise"},
    "current": {"recipe": "current"},
    "block": {"recipe": "block"},
}


def make(path: Path, mode: str, model_type: str = "llama", **sizes: Any) -> Engine:
    if not path.exists():
        write_model(path, model_type, **SIZES | sizes)
        write_scales(path, path / "made-up", kv=True)
    options = dict(MODES[mode])
    if isinstance(options["recipe"], DelayedScaling):
        options["scales"] = path / "made-up"
    return Engine(path, **options, max_num_seqs=4)


def logits_of_every_step(engine: Engine, prompts: list[list[int]], tokens: int) -> list[Tensor]:
    """What the sampler saw; and the tokens it chose, last."""
    run, seen = engine.loaded.runner.run, []

    def watched(work: Any) -> Tensor:
        logits = run(work)
        seen.append(logits.clone())
        return logits

    engine.loaded.runner.run = watched  # type: ignore[method-assign]
    done = engine.generate(prompts, temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    return [*seen, *(torch.tensor(completion.token_ids) for completion in done)]


def assert_fused_equals_plain(path: Path, mode: str, tokens: int, **model: Any) -> None:
    prompts = [[256, *b"Once upon a time"], list(range(1, 90))]
    fused, plain = make(path, mode, **model), make(path, mode, **model)
    assert fused.loaded.runner.fused is not None
    plain.loaded.runner.fused = None
    found, expected = (logits_of_every_step(engine, prompts, tokens) for engine in (fused, plain))
    assert len(found) == len(expected) > tokens
    assert all(map(torch.equal, found, expected))
    watched = [{**record, "saturated": None, "saturation": None} for record in fused.scales()]
    assert watched == [{**record, "saturated": None, "saturation": None} for record in plain.scales()]


@pytest.mark.parametrize("mode", list(MODES))
def test_logits_and_256_tokens_are_equal(tmp_path: Path, mode: str) -> None:
    assert_fused_equals_plain(tmp_path / "model", mode, 256)


@pytest.mark.parametrize("model_type", [name for name in ARCHITECTURES if name != "llama"])
def test_every_architecture(tmp_path: Path, model_type: str) -> None:
    assert_fused_equals_plain(tmp_path / "model", "delayed", 12, model_type=model_type)


def test_odd_sizes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 10, "num_attention_heads": 6}
    assert_fused_equals_plain(tmp_path / "model", "delayed", 12, **sizes, num_key_value_heads=3)


def test_blocks_that_do_not_fit_are_not_joined(tmp_path: Path) -> None:
    engine = make(tmp_path / "model", "block", hidden_size=72, intermediate_size=100)
    assert engine.loaded.runner.fused is None
    assert len(engine.generate([[1, 2]], temperature=0.0, max_new_tokens=3)[0].token_ids) == 3


def test_projections_with_scales_of_their_own_are_not_joined(tmp_path: Path) -> None:
    write_model(tmp_path / "model", **SIZES)
    scales = write_scales(tmp_path / "model", tmp_path / "made-up")
    tensors = load_file(scales)
    tensors["model.layers.1.self_attn.k_proj.input.scale"] *= 2
    from safetensors import safe_open

    with safe_open(scales, "pt") as file:
        save_file(tensors, scales, file.metadata())
    engine = Engine(tmp_path / "model", recipe=DelayedScaling(), scales=scales)
    assert engine.loaded.runner.fused is None


def test_a_bf16_model_is_not_fused(tmp_path: Path) -> None:
    assert fuse(load_servable(write_model(tmp_path / "model"), recipe="bf16")) is None


def frozen(weight: Tensor) -> FrozenLinear:
    return FrozenLinear(weight.to(torch.float8_e4m3fn), torch.tensor(0.5), None, torch.tensor(2.0))


def test_weights_that_lie_side_by_side_are_not_copied() -> None:
    whole = torch.randn(12, 8).to(torch.float8_e4m3fn)
    parts = [FrozenLinear(piece, torch.tensor(0.5), None, torch.tensor(2.0)) for piece in whole.split([4, 8])]
    joined = _join(parts)
    assert joined.weight_q.data_ptr() == whole.data_ptr()
    assert joined.weight_q.shape == whole.shape


def test_others_are_copied_once_and_stay_views() -> None:
    parts = [frozen(torch.randn(rows, 8)) for rows in (4, 8, 2)]
    before = [part.weight_q.float() for part in parts]
    joined = _join(parts)
    x = torch.randn(3, 8)
    assert torch.equal(joined(x), torch.cat([part(x) for part in parts], 1))
    for part, values in zip(parts, before, strict=True):
        assert torch.equal(part.weight_q.float(), values)
        assert part.weight_q.untyped_storage().data_ptr() == joined.weight_q.untyped_storage().data_ptr()
        assert part.amax is joined.amax
