"""The model that the tests of a file are at: they run architecture by architecture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8serve.calibration.pipeline import calibrate
from fp8serve.fp8.recipe import DelayedScaling
from tests.compatibility.cases import make
from tests.compatibility.comparison import ModelDir
from tests.model.oracle import write_tokenizer


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """Returns (directory with a tokenizer, transformers' model) by name; tests must not change them."""
    cache: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in cache:
            cache.clear()
            out = tmp_path_factory.mktemp(name)
            cache[name] = out, make(name, out)
            write_tokenizer(out)
        return cache[name]

    return get


@pytest.fixture(scope="module")
def calibrated(model_of: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    cache: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in cache:
            cache[name] = tmp_path_factory.mktemp("out") / name
            recipe, sizes = (
                DelayedScaling(amax_history_len=4),
                {"samples": 4, "seq_len": 48, "batch_size": 4, "generated_samples": 0},
            )
            calibrate(model_of(name)[0], out=cache[name], recipe=recipe, kv_cache=True, all_experts=True, **sizes)
        return cache[name]

    return get
