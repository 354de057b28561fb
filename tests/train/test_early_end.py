"""Runs that validate: they end when the loss no longer improves, and give the best model that they had."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import JobError
from fp8serve.train import checkpoint
from fp8serve.train.trainer import Trainer

from .conftest import Configure
from .test_trainer import after, hashes

# The rate is so high that the losses on held-out rows are no straight line.
ROUGH = {"lr": 0.02, "max_steps": 12, "save_every": 1, "eval_every": 1, "warmup_steps": 1, "on_divergence": "keep"}


@pytest.fixture
def rough(configure: Configure, tmp_path: Path) -> Configure:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("\n".join(json.dumps({"text": f"What nobody learns {i} {i * i}."}) for i in range(6)))

    def make(**options: Any) -> Any:
        return configure(**{**ROUGH, "eval_data": [str(held_out)], **options})

    return make


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {e["step"]: e["valid_loss"] for e in events if e["type"] == "metrics" and "valid_loss" in e}


def training_record(model: str | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(model or "") / "training.json").read_text())
    return found


def test_the_best_checkpoint_is_kept_and_becomes_the_model(rough: Configure) -> None:
    events: list[dict[str, Any]] = []
    config = rough(result="best", keep_last=1, save_every=100)
    result = Trainer(config).run(events.append)
    found = losses(events)
    best = min(found, key=lambda step: found[step])
    assert 1 <= best < 12, found  # else the test shows nothing
    assert training_record(result.model)["step"] == best
    names = [path.name for path in checkpoint.list_checkpoints(Path(config.out) / "checkpoints")]
    assert names == [f"step-{best}", "step-12"]
    first = next(e["loss"] for e in events if e.get("code") == "validated")
    assert first > 0
    # the same bits as a run that was to end there
    again = Trainer(rough(out=str(Path(config.out).parent / "again"), result="last")).run(stop=after(best))
    assert again.step == best
    assert hashes(Path(again.checkpoint or ""), "model.safetensors") == hashes(
        Path(config.out) / "checkpoints" / f"step-{best}", "model.safetensors"
    )


def test_it_ends_early_also_after_a_kill_and_goes_on_with_more_patience(rough: Configure) -> None:
    events: list[dict[str, Any]] = []
    config = rough(patience=2)
    result = Trainer(config).run(events.append)
    found = losses(events)
    (told,) = [e for e in events if e.get("code") == "early_end"]
    assert result.step == told["step"] == told["best_step"] + 2 < 12
    assert all(found[told["best_step"]] <= found[told["best_step"] + i] for i in (1, 2))
    stopped = rough(patience=2, out=str(Path(config.out).parent / "stopped"))
    for _ in range(2):
        Trainer(stopped).run(stop=after(1))
    resumed = Trainer(stopped).run()
    assert resumed.step == result.step
    assert hashes(Path(resumed.model or "")) == hashes(Path(result.model or ""))
    assert Trainer(rough(patience=100)).run().step == 12


def test_a_best_checkpoint_that_is_gone_is_told(rough: Configure) -> None:
    config = rough(result="best")
    seen: list[dict[str, Any]] = []
    best = Trainer(config).run(seen.append)
    step = training_record(best.model)["step"]
    (Path(config.out) / "checkpoints" / f"step-{step}" / "model.safetensors").write_bytes(b"")
    events: list[dict[str, Any]] = []
    again = Trainer(config).run(events.append)
    (told,) = [e for e in events if e.get("code") == "best_lost"]
    assert f"step-{step}, cannot be used" in told["message"]
    assert training_record(again.model)["step"] == 12


def test_a_run_that_ends_worse_on_held_out_rows_fails(rough: Configure) -> None:
    with pytest.raises(JobError, match=r"made the model worse: its validation loss rose .*--on-divergence keep"):
        Trainer(rough(lr=0.2, on_divergence="fail")).run()


@pytest.mark.parametrize("options", [{"patience": 2}, {"result": "best"}])
def test_comparing_validations_needs_some(configure: Configure, options: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="compares validations; give eval_data and eval_every"):
        configure(**options)
