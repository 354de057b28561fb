"""Who reads what we write: each format by the code of those who read it, equal and not only without an error."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from fp8serve.fp8.recipe import from_name
from fp8serve.model.checkpoint import ScalingCheckpoint, load_trainable, write_calibrated, write_hf_directory
from fp8serve.model.shards import open_shards
from tests.model.oracle import state_for
from tests.model.readers import tensors_taken

ModelDir = Callable[[str], Path]
WRITTEN = [
    *(("compressed-tensors", recipe) for recipe in ("delayed", "current", "rowwise", "block")),
    *(("fp8", recipe) for recipe in ("delayed", "current", "block")),
    *(("modelopt", recipe) for recipe in ("delayed", "rowwise")),
]


def state(source: Path, recipe: str) -> ScalingCheckpoint:
    return state_for(source) if recipe == "delayed" else ScalingCheckpoint(from_name(recipe), {})


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 40_000])
@pytest.mark.parametrize(("format_", "recipe"), WRITTEN)
def test_a_reader_of_every_safetensors_takes_the_weights_only(
    format_: str, recipe: str, max_shard_bytes: int, model_dir: ModelDir, tmp_path: Path
) -> None:
    source, out = model_dir("llama"), tmp_path / "out"
    write_calibrated(out, source, state(source, recipe), format=format_, max_shard_bytes=max_shard_bytes)
    assert tensors_taken(out) == sorted(open_shards(out))


def test_the_high_precision_directory_has_an_index_too(model_dir: ModelDir, tmp_path: Path) -> None:
    source, out = model_dir("llama"), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    write_hf_directory(out, config, dict(load_trainable(source).named_parameters()))
    (out / "adapter.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    assert tensors_taken(out) == sorted(open_shards(out))
    with safe_open(out / "model.safetensors", framework="pt") as file:
        size = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == size
