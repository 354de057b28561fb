"""Options that do not fit the model or the machine are refused with a sentence; the others determine the cache
sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve.engine import memory
from fp8serve.engine.engine import Engine
from fp8serve.engine.loading import parse_recipe
from fp8serve.engine.memory import plan_cache
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError, ModelError, RecipeError, RequestError
from fp8serve.fp8.recipe import DelayedScaling, Float8CurrentScaling, to_json
from fp8serve.model.config.decoder import read_config
from fp8serve.model.storage import memory as storage_memory

from .tiny import write_model

BLOCK_BYTES = 2 * 2 * 16 * 1 * 32 * 2  # k and v, layers, tokens, heads, head_dim, bytes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"block_size": 1.5}, "block_size must be a whole number, not 1.5"),
        ({"max_batch_tokens": 8, "max_num_seqs": 16}, r"max_batch_tokens \(8\) must be at least max_num_seqs \(16\)"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be 'bf16' or 'fp8', not 'int8'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        EngineOptions(**options)


def test_options_survive_json() -> None:
    options = EngineOptions(recipe="current", num_blocks=7)
    assert EngineOptions.from_json(options.to_json()) == options
    with pytest.raises(RequestError, match="no field 'blocks'"):
        EngineOptions.from_json('{"blocks": 7}')


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"max_model_len": 4096}, RequestError, "4096 is beyond the 128 tokens"),
        ({"device": "cuda"}, MachineError, "finds no GPU"),
        ({"device": "toaster"}, MachineError, "no device 'toaster'"),
        ({"recipe": "int4"}, RecipeError, "int4"),
    ],
)
def test_options_that_the_model_or_the_machine_lacks_are_refused(
    model_dir: Path, options: dict[str, Any], kind: type[Fp8ServeError], sentence: str
) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(kind, match=sentence):
        Engine(model_dir, **{"recipe": "bf16", **options})


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        Engine(tmp_path)


@pytest.mark.parametrize(
    ("options", "blocks", "length"),
    [
        ({}, 50, 128),  # 16 sequences of 8 blocks would be 128, but memory has 50
        ({"max_num_seqs": 4}, 32, 128),
        ({"max_num_seqs": 4, "max_model_len": 40}, 12, 40),
        ({"num_blocks": 3}, 3, 48),
        ({"num_blocks": 3, "max_model_len": 100}, 3, 100),
    ],
)
def test_the_cache_is_as_large_as_needed_and_as_memory_allows(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], blocks: int, length: int
) -> None:
    monkeypatch.setattr(memory, "cpu_cache_budget", lambda: 50 * BLOCK_BYTES + 1)
    plan = plan_cache(read_config(model_dir), EngineOptions(**options), torch.bfloat16)
    assert (plan.num_blocks, plan.max_model_len, plan.block_bytes) == (blocks, length, BLOCK_BYTES)


def test_a_cache_for_less_than_one_sequence_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cpu_cache_budget", lambda: 3 * BLOCK_BYTES)
    with pytest.raises(MachineError, match=r"one sequence of 128 tokens needs 32,768 bytes, but only 12,288"):
        plan_cache(read_config(model_dir), EngineOptions(max_model_len=128), torch.bfloat16)
    assert plan_cache(read_config(model_dir), EngineOptions(), torch.bfloat16).max_model_len == 48


def test_a_window_does_not_limit_the_length(tmp_path: Path) -> None:
    config = read_config(write_model(tmp_path, "mistral", sliding_window=32))
    assert plan_cache(config, EngineOptions(num_blocks=9), torch.bfloat16).max_model_len == 128
    engine = Engine(tmp_path, recipe="bf16", max_model_len=16)
    with pytest.raises(RequestError, match="the context holds 16: shorten"):
        engine.add_request(Request("a", tuple(range(30)), SamplingParams(max_new_tokens=8)))


def test_free_memory_is_measured_on_this_machine() -> None:
    assert memory.cpu_cache_budget() > 2**20


def test_free_memory_is_that_of_the_smallest_control_group(tmp_path: Path) -> None:
    """Pages of files are free, because the system drops them."""
    sizes = {
        "a": {"memory.max": "900", "memory.current": "800", "memory.stat": "active_file 30\ninactive_file 20\nfile 99"},
        "a/b": {"memory.max": "max", "memory.high": "max", "memory.current": "10"},
        "slowed": {"memory.max": "900", "memory.high": "500", "memory.current": "10"},
        "memory": {"memory.limit_in_bytes": "700", "memory.usage_in_bytes": "600",
                   "memory.stat": "active_file 9\ntotal_active_file 40\ntotal_inactive_file 1"},
    }  # fmt: skip
    for group, files in sizes.items():
        (tmp_path / group).mkdir()
        for name, content in files.items():
            (tmp_path / group / name).write_text(f"{content}\n")
    assert list(storage_memory._free_in_groups(["3:cpu:/x", "0::/a/b"], tmp_path)) == [150]
    assert list(storage_memory._free_in_groups(["0::/slowed"], tmp_path)) == [490]
    assert list(storage_memory._free_in_groups(["4:cpu,memory:/container/7"], tmp_path)) == [141]
    assert list(storage_memory._free_in_groups(["0::/", "1:name=systemd:/"], tmp_path)) == []


def test_recipes_are_names_or_json() -> None:
    assert parse_recipe("stored") == "stored"
    assert parse_recipe("bf16") == "bf16"
    assert parse_recipe("rowwise") == Float8CurrentScaling(granularity="row")
    assert parse_recipe(to_json(DelayedScaling(margin=1))) == DelayedScaling(margin=1)


def test_the_cache_is_not_larger_than_kv_cache_bytes(model_dir: Path) -> None:
    config = read_config(model_dir)
    plan = plan_cache(config, EngineOptions(kv_cache_bytes=5 * BLOCK_BYTES + 1), torch.bfloat16)
    assert (plan.num_blocks, plan.max_model_len) == (5, 80)
    assert (
        plan_cache(config, EngineOptions(kv_cache_bytes=5 * BLOCK_BYTES, num_blocks=5), torch.bfloat16).num_blocks == 5
    )
    with pytest.raises(MachineError, match=f"6 blocks needs {6 * BLOCK_BYTES:,} bytes, more than the"):
        plan_cache(config, EngineOptions(kv_cache_bytes=5 * BLOCK_BYTES, num_blocks=6), torch.bfloat16)
    with pytest.raises(MachineError, match="lower max_model_len"):
        plan_cache(config, EngineOptions(kv_cache_bytes=5 * BLOCK_BYTES, max_model_len=128), torch.bfloat16)
