"""The loop: it learns, it leaks nothing between documents, and it resumes with the same bits."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.model.checkpoint import TensorScale, load_scales
from fp8serve.train import checkpoint
from fp8serve.train.trainer import Trainer

from .conftest import Configure

RECIPES = ("delayed", "current", "rowwise", "block", "bf16")


def of_type(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["type"] == kind]


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_lowers_the_loss(configure: Configure, recipe: str) -> None:
    events: list[dict[str, Any]] = []
    config = configure(recipe=recipe, max_steps=20, lr=3e-3)
    result = Trainer(config).run(events.append)
    losses = [e["train_loss"] for e in of_type(events, "metrics")]
    assert len(losses) == result.step == 20
    assert sum(losses[-4:]) / 4 < 0.8 * losses[0]
    assert result.status == "succeeded"
    assert result.model is not None
    assert (Path(result.model) / "model.safetensors").exists()


def hashes(path: Path, suffix: str = "") -> dict[str, Any]:
    files = checkpoint.manifest_of(path)["files"]
    return {name: entry for name, entry in files.items() if name.endswith(suffix)}


def after(steps: int) -> Callable[[], bool]:
    """A stop that lets `steps` steps through."""
    asked = itertools.count()
    return lambda: next(asked) >= steps


@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_stopped_and_started_again_is_the_same_bits(configure: Configure, tmp_path: Path, place: str) -> None:
    common = {"master_weights": place, "accumulate": 2, "save_every": 2, "max_steps": 6, "keep_last": 1}
    through = Trainer(configure(**common, out=str(tmp_path / "a"))).run()
    config = configure(**common, out=str(tmp_path / "b"))
    for _ in range(6):  # one step at a time, each in a fresh trainer
        Trainer(config).run(stop=after(1))
    result = Trainer(config).run()
    assert result.checkpoint is not None
    assert through.checkpoint is not None
    assert hashes(Path(result.checkpoint), ".safetensors") == hashes(Path(through.checkpoint), ".safetensors")
    assert result.model is not None
    assert through.model is not None
    assert hashes(Path(result.model), "del.safetensors") == hashes(Path(through.model), "del.safetensors")
    assert same_scales(Path(result.model), Path(through.model))


def same_scales(one: Path, two: Path) -> bool:
    a, b = (load_scales(p / "scales.safetensors", p).tensors for p in (one, two))
    return a.keys() == b.keys() and all(
        torch.equal(a[n].scale, b[n].scale) and torch.equal(history(a[n]), history(b[n])) for n in a
    )


def history(entry: TensorScale) -> Tensor:
    assert entry.amax_history is not None
    return entry.amax_history


def test_another_rate_is_not_the_same_job(configure: Configure) -> None:
    Trainer(configure(max_steps=2)).run()
    with pytest.raises(JobError, match=r"written with lr=0\.001, this job says 0\.002"):
        Trainer(configure(max_steps=2, lr=2e-3)).run()
