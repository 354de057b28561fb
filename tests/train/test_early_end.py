"""Runs with validation: with `patience` they end once the validation loss no longer improves; with `result="best"` they
export the checkpoint with the lowest validation loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import JobError
from fp8serve.train import checkpoint, train_step
from fp8serve.train.trainer import Trainer

from .conftest import Configure
from .test_trainer import after, hashes

# The learning rate is so high that the validation loss does not fall steadily.
ROUGH = {"lr": 0.02, "max_steps": 12, "save_every": 1, "eval_every": 1, "warmup_steps": 1, "on_divergence": "keep"}


@pytest.fixture
def noisy_run(configure: Configure, tmp_path: Path) -> Configure:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("\n".join(json.dumps({"text": f"What nobody learns {i} {i * i}."}) for i in range(6)))

    def make(**options: Any) -> Any:
        return configure(**{**ROUGH, "eval_data": [str(held_out)], **options})

    return make


def validation_losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {e["step"]: e["valid_loss"] for e in events if e["type"] == "metrics" and "valid_loss" in e}


def training_record(model: str | None) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((Path(model or "") / "training.json").read_text())
    return record


def test_the_checkpoint_with_the_lowest_validation_loss_is_kept_and_exported(noisy_run: Configure) -> None:
    events: list[dict[str, Any]] = []
    config = noisy_run(result="best", keep_last=1, save_every=100)
    result = Trainer(config).run(events.append)
    losses = validation_losses(events)
    best = min(losses, key=lambda step: losses[step])
    assert 1 <= best < 12, losses  # if the last step were the best, the test would prove nothing
    assert training_record(result.model)["step"] == best
    names = [path.name for path in checkpoint.list_checkpoints(Path(config.out) / "checkpoints")]
    assert names == [f"step-{best}", "step-12"]
    first = next(e["loss"] for e in events if e.get("code") == "validated")
    assert first > 0
    # the same bits as a run that is stopped at this step
    again = Trainer(noisy_run(out=str(Path(config.out).parent / "again"), result="last")).run(stop=after(best))
    assert again.step == best
    assert hashes(Path(again.checkpoint or ""), "model.safetensors") == hashes(
        Path(config.out) / "checkpoints" / f"step-{best}", "model.safetensors"
    )


def test_patience_ends_a_run_early_also_after_restarts_and_more_patience_continues_it(noisy_run: Configure) -> None:
    events: list[dict[str, Any]] = []
    config = noisy_run(patience=2)
    result = Trainer(config).run(events.append)
    losses = validation_losses(events)
    (early_end,) = [e for e in events if e.get("code") == "early_end"]
    assert result.step == early_end["step"] == early_end["best_step"] + 2 < 12
    assert all(losses[early_end["best_step"]] <= losses[early_end["best_step"] + i] for i in (1, 2))
    stopped = noisy_run(patience=2, out=str(Path(config.out).parent / "stopped"))
    for _ in range(2):
        Trainer(stopped).run(stop=after(1))
    resumed = Trainer(stopped).run()
    assert resumed.step == result.step
    assert hashes(Path(resumed.model or "")) == hashes(Path(result.model or ""))
    assert Trainer(noisy_run(patience=100)).run().step == 12


def test_a_damaged_best_checkpoint_is_reported_and_the_last_one_is_exported(noisy_run: Configure) -> None:
    config = noisy_run(result="best")
    first_events: list[dict[str, Any]] = []
    best = Trainer(config).run(first_events.append)
    step = training_record(best.model)["step"]
    (Path(config.out) / "checkpoints" / f"step-{step}" / "model.safetensors").write_bytes(b"")
    events: list[dict[str, Any]] = []
    again = Trainer(config).run(events.append)
    (best_lost,) = [e for e in events if e.get("code") == "best_lost"]
    assert f"step-{step}, cannot be used" in best_lost["message"]
    assert training_record(again.model)["step"] == 12


def test_a_run_whose_validation_loss_rises_fails(noisy_run: Configure) -> None:
    with pytest.raises(JobError, match=r"made the model worse: its validation loss rose .*--on-divergence keep"):
        Trainer(noisy_run(lr=0.2, on_divergence="fail")).run()


@pytest.mark.parametrize("options", [{"patience": 2}, {"result": "best"}])
def test_patience_and_best_result_need_validation_data(configure: Configure, options: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="compares validations; give eval_data and eval_every"):
        configure(**options)


def test_patience_ends_a_run_without_a_finite_validation_loss(
    noisy_run: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_step, "evaluate_run", lambda run: {"valid_loss": math.nan})
    events: list[dict[str, Any]] = []
    assert Trainer(noisy_run(patience=2)).run(events.append).step == 2
    (early_end,) = [e for e in events if e.get("code") == "early_end"]
    assert early_end["message"] == "Stopped early: 2 validations in a row had no finite loss"
