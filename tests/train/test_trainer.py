"""The loop: it learns, it leaks nothing between documents, and it resumes with the same bits."""

from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import JobError
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


def hashes(path: Path) -> dict[str, Any]:
    return dict(checkpoint.manifest_of(path)["files"])


@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_stopped_and_started_again_is_the_same_bits(configure: Configure, tmp_path: Path, place: str) -> None:
    common = {"master_weights": place, "accumulate": 2, "save_every": 2, "max_steps": 6, "keep_last": 1}
    through = Trainer(configure(**common, out=str(tmp_path / "a"))).run()
    config = configure(**common, out=str(tmp_path / "b"))
    for _ in range(6):  # one step at a time, each in a fresh trainer
        calls = iter([False, True])
        result = Trainer(config).run(stop=lambda calls=calls: next(calls, True))
    result = Trainer(config).run()
    assert result.checkpoint is not None
    assert through.checkpoint is not None
    assert hashes(Path(result.checkpoint)) == hashes(Path(through.checkpoint))
    assert result.model is not None
    assert through.model is not None
    assert hashes(Path(result.model)) == hashes(Path(through.model))


def test_another_rate_is_not_the_same_job(configure: Configure) -> None:
    Trainer(configure(max_steps=2)).run()
    with pytest.raises(JobError, match=r"written with lr=0\.001, this job says 0\.002"):
        Trainer(configure(max_steps=2, lr=2e-3)).run()
