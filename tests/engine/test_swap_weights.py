"""Staged weights: they are loaded beside the served ones and swapped with them; swapping twice restores every bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.engine import loading, packing, weights
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import ModelError, RequestError
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.checkpoint import load_scales, save_scales

from .test_load_weights import answers, models, write_fp8_model
from .tiny import write_model, write_scales

__all__ = ["models"]  # a fixture


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("packs", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral"])
def test_swapped_weights_give_the_bits_of_a_new_engine_and_can_be_swapped_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, packs: bool
) -> None:
    monkeypatch.setattr(packing, "worth_packing", lambda: packs)
    one, other = write_fp8_model(tmp_path / "one", 0, kind), write_fp8_model(tmp_path / "other", 1, kind)
    engine, expected = Engine(one), answers(Engine(other))
    first = answers(engine)
    engine.stage_weights(other)
    engine.pack_weights()
    assert answers(engine) == first, "staged weights changed the answers before the swap"
    info = engine.swap_weights()
    assert (info["model"], info["weights_version"]) == (str(other), 1)
    assert answers(engine) == expected != first
    assert (engine.swap_weights()["model"], engine.weights_version) == (str(one), 0)
    assert answers(engine) == first
    engine.swap_weights()
    engine.discard_staged_weights()
    assert answers(engine) == expected
    with pytest.raises(RequestError, match="No weights are staged"):
        engine.swap_weights()


def test_a_swap_keeps_the_addresses_of_tensors(models: tuple[Path, Path]) -> None:
    """CUDA graphs have recorded their addresses."""
    engine = Engine(models[0])

    def addresses() -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in engine.loaded.runner.model.state_dict().items()}

    before = addresses()
    engine.stage_weights(models[1])
    engine.swap_weights()
    assert addresses() == before


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_weights_quantized_on_loading_can_be_staged(tmp_path: Path, recipe: str) -> None:
    one, other = (write_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    engine, expected = Engine(one, recipe=recipe), answers(Engine(other, recipe=recipe))
    engine.stage_weights(other)
    engine.swap_weights()
    assert answers(engine) == expected


def test_requests_run_while_weights_are_staged_and_end_before_the_swap(models: tuple[Path, Path]) -> None:
    engine, expected = Engine(models[0]), answers(Engine(models[1]))
    engine.add_request(Request("one", (1, 2, 3), SamplingParams(max_new_tokens=4, ignore_eos=True)))
    engine.step()
    engine.stage_weights(models[1])
    with pytest.raises(RequestError, match="1 requests are running"):
        engine.swap_weights()
    while engine.has_work():
        engine.step()
    engine.swap_weights()
    assert answers(engine) == expected


@pytest.mark.parametrize("written_before", [0, 3, 8])
def test_a_failed_swap_restores_the_old_weights(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, written_before: int
) -> None:
    engine = Engine(models[0])
    before = answers(engine)
    engine.stage_weights(models[1])
    write, calls = weights._write_tensor, list[str]()

    def fail_once(model: Any, name: str, tensor: Tensor) -> None:
        calls.append(name)
        if len(calls) == written_before + 1:
            raise RuntimeError("the device failed")
        write(model, name, tensor)

    monkeypatch.setattr(weights, "_write_tensor", fail_once)
    with pytest.raises(RuntimeError, match="the device failed"):
        engine.swap_weights()
    assert len(calls) == 2 * written_before + 2
    assert engine.weights_version == 0
    assert answers(engine) == before


def test_the_scales_of_an_fp8_cache_are_exchanged_too(tmp_path: Path) -> None:
    directories = []
    for seed in (0, 1):
        directory = write_fp8_model(tmp_path / str(seed), seed)
        scales = load_scales(directory / "scales.safetensors", directory)
        with_cache = load_scales(write_scales(tmp_path / str(seed) / "base", tmp_path / "kv", kv=True))
        entries = {name: entry for name, entry in with_cache.tensors.items() if name.endswith((".k", ".v"))}
        for entry in entries.values():
            entry.scale.mul_(1 + seed)
        scales.tensors.update(entries)
        save_scales(directory / "scales.safetensors", scales)
        directories.append(directory)
    one, other = directories
    engine = Engine(one, kv_cache_dtype="fp8")
    first, expected = answers(engine), answers(Engine(other, kv_cache_dtype="fp8"))
    engine.stage_weights(other)
    engine.swap_weights()
    assert answers(engine) == expected != first
    engine.swap_weights()
    assert answers(engine) == first


def test_weights_too_large_for_gpu_memory_are_staged_in_host_memory(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, expected = Engine(models[0]), answers(Engine(models[1]))
    read_weights, devices = loading.read_weights, list[str | None]()

    def full(model_dir: Path, loaded: loading.LoadedModel, device: str | None = None) -> dict[str, Tensor]:
        devices.append(device)
        if device is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return read_weights(model_dir, loaded, device)

    monkeypatch.setattr(loading, "read_weights", full)
    engine.stage_weights(models[1])
    engine.swap_weights()
    assert devices == [None, "cpu"]
    assert answers(engine) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roll_history": True}, "roll_history"),
        ({"cache_dir": "{tmp}"}, "cache_dir"),
        ({"scales": "{scales}"}, "scales"),
    ],
)
def test_staging_is_refused_with_options_whose_state_belongs_to_the_weights(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    base = write_model(tmp_path / "model")
    write_scales(base, base / "scales.safetensors")
    paths = {"tmp": tmp_path, "scales": base / "scales.safetensors"}
    settings = {name: value.format(**paths) if isinstance(value, str) else value for name, value in options.items()}
    engine = Engine(base, recipe=DelayedScaling(), **settings)
    with pytest.raises(RequestError, match=message):
        engine.stage_weights(base)


def test_incompatible_models_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    engine = Engine(models[0])
    before = answers(engine)
    with pytest.raises(ModelError, match="has another configuration than"):
        engine.stage_weights(write_fp8_model(tmp_path / "longer", 0, num_hidden_layers=3))
    with pytest.raises(ModelError, match="ends its answers with other tokens"):
        engine.stage_weights(write_fp8_model(tmp_path / "eos", 0, eos_token_id=7))
    assert answers(engine) == before
