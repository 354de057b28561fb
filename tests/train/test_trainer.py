"""The training loop: the loss falls, a resumed run has the same bits, and problems are reported as events."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.model.checkpoint import TensorScale, load_scales
from fp8serve.model.compatibility import SCALE_NAMES_NOTE
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train import checkpoint, checkpointing, train_step
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import load_items
from fp8serve.train.methods.supervised import SftReader
from fp8serve.train.optimizer import Optimizer
from fp8serve.train.trainer import Trainer

from .conftest import Configure

RECIPES = ("delayed", "current", "rowwise", "block", "nvfp4", "bf16")


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


@pytest.mark.parametrize(("format_", "notes"), [("compressed-tensors", []), ("fp8", [SCALE_NAMES_NOTE])])
def test_a_format_with_limited_reader_support_is_announced(
    configure: Configure, format_: str, notes: list[str]
) -> None:
    events: list[dict[str, Any]] = []
    Trainer(configure(format=format_, max_steps=1)).run(events.append)
    assert [e["message"] for e in events if e.get("code") == "readers"] == notes


def hashes(path: Path, suffix: str = "") -> dict[str, Any]:
    files = checkpoint.manifest_of(path)["files"]
    return {name: entry for name, entry in files.items() if name.endswith(suffix)}


def after(steps: int) -> Callable[[], bool]:
    """Returns a `stop` callback that stops a run after `steps` steps."""
    calls = itertools.count()
    return lambda: next(calls) >= steps


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("model", {}),
        ("optimizer", {}),
        ("model", {"recipe_options": {"fp8_mha": True}}),
        ("model", {"recipe": "nvfp4"}),
    ],
    ids=["model", "optimizer", "mha", "nvfp4"],
)
def test_a_run_stopped_after_every_step_has_the_same_bits(
    configure: Configure, tmp_path: Path, place: str, options: dict[str, Any]
) -> None:
    """Under nvfp4 the random numbers with which gradients are rounded continue, too."""
    common = {"master_weights": place, "accumulate": 2, "save_every": 2, "max_steps": 6, "keep_last": 1, **options}
    uninterrupted = Trainer(configure(**common, out=str(tmp_path / "a"))).run()
    config = configure(**common, out=str(tmp_path / "b"))
    for _ in range(6):  # one step at a time, each with a new Trainer
        Trainer(config).run(stop=after(1))
    result = Trainer(config).run()
    assert result.checkpoint is not None
    assert uninterrupted.checkpoint is not None
    assert hashes(Path(result.checkpoint), ".safetensors") == hashes(Path(uninterrupted.checkpoint), ".safetensors")
    assert result.model is not None
    assert uninterrupted.model is not None
    assert hashes(Path(result.model), "del.safetensors") == hashes(Path(uninterrupted.model), "del.safetensors")
    if options.get("recipe") != "nvfp4":  # it has no scaling states
        assert same_scales(Path(result.model), Path(uninterrupted.model))


def same_scales(one: Path, two: Path) -> bool:
    a, b = (load_scales(p / "scales.safetensors", p).tensors for p in (one, two))
    return a.keys() == b.keys() and all(
        torch.equal(a[n].scale, b[n].scale) and torch.equal(history(a[n]), history(b[n])) for n in a
    )


def history(entry: TensorScale) -> Tensor:
    assert entry.amax_history is not None
    return entry.amax_history


def test_resuming_with_another_learning_rate_is_refused(configure: Configure) -> None:
    Trainer(configure(max_steps=2)).run()
    with pytest.raises(JobError, match=r"written with lr=0\.001, and this job has 0\.002"):
        Trainer(configure(max_steps=2, lr=2e-3)).run()


def test_resuming_with_other_data_is_refused(configure: Configure, data: Path) -> None:
    Trainer(configure(max_steps=2)).run()
    data.write_text(data.read_text() + '{"prompt": "a", "completion": " b"}\n')
    with pytest.raises(JobError, match="training data differ"):
        Trainer(configure(max_steps=2)).run()


def test_accumulation_equals_a_larger_batch(configure: Configure, tmp_path: Path) -> None:
    """The loss is the mean over all targets of a step, however the step is divided into microbatches."""
    one = Trainer(configure(recipe="bf16", batch_size=8, out=str(tmp_path / "a"))).run()
    two = Trainer(configure(recipe="bf16", batch_size=2, accumulate=4, out=str(tmp_path / "b"))).run()
    assert two.metrics["train_loss"] == pytest.approx(one.metrics["train_loss"], rel=2e-3)
    assert two.trained_tokens == one.trained_tokens


def test_the_base_model_is_not_needed_after_the_first_checkpoint(configure: Configure, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(configure().model, base)
    config = configure(model=str(base), save_every=1, max_steps=3)
    Trainer(config).run(stop=after(2))
    shutil.rmtree(base)
    assert Trainer(config).run().step == 3


def test_events_have_data_statistics_metrics_and_checkpoints(configure: Configure, data: Path) -> None:
    events: list[dict[str, Any]] = []
    config = configure(max_steps=4, eval_data=[str(data)], eval_every=2, log_every=3, save_every=2)
    Trainer(config).run(events.append)
    assert events[0]["code"] == "data"
    assert 0 < events[0]["trainable_fraction"] < 1
    metrics = of_type(events, "metrics")
    assert [e["step"] for e in metrics] == [2, 3, 4]
    assert ["valid_loss" in e for e in metrics] == [True, False, True]
    expected = {"train_loss", "train_mean_token_accuracy", "learning_rate", "grad_norm", "tokens_per_second", "epoch"}
    assert all(expected <= e.keys() and e["tokens_per_second"] > 0 for e in metrics)
    assert metrics[-1]["trained_tokens"] == sum_of_tokens(config)
    assert [e["valid_loss"] for e in of_type(events, "checkpoint")] == [
        metrics[0]["valid_loss"],
        metrics[2]["valid_loss"],
    ]
    json.dumps(events, allow_nan=False)


def sum_of_tokens(config: TrainConfig) -> int:
    rows, report = load_items(SftReader(), config.data, Tokenizer.from_dir(config.model), config.seq_len)
    assert (len(rows), config.batch_size, config.max_steps) == (16, 4, 4)  # one epoch
    return report.tokens


def test_a_step_with_nonfinite_gradients_is_skipped_and_reported(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, Any]] = []
    spoil_gradients(monkeypatch, {2})
    result = Trainer(configure(max_steps=4, batch_size=8)).run(events.append)
    assert [e["step"] for e in of_type(events, "metrics")] == [1, 3, 4]
    assert [e["step"] for e in events if e.get("code") == "step_skipped"] == [2]
    assert result.skipped_steps == 1
    json.dumps(events, allow_nan=False)


def test_ten_skipped_steps_in_a_row_end_the_job(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_gradients(monkeypatch, set(range(2, 100)))
    with pytest.raises(JobError, match="Training diverged: the gradients of 10 steps in a row up to step 11"):
        Trainer(configure(max_steps=50)).run()


def spoil_gradients(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    real, count = train_step.accumulate_gradients, itertools.count(1)

    def spoiled(method: Any, forward: Any, optimizer: Optimizer, microbatches: Any, **more: Any) -> list[float]:
        means = real(method, forward, optimizer, microbatches, **more)
        gradient = next(iter(optimizer.masters.values())).grad
        if next(count) in steps and gradient is not None:
            gradient.fill_(torch.inf)
        return means

    monkeypatch.setattr(train_step, "accumulate_gradients", spoiled)


def test_a_damaged_checkpoint_is_skipped_and_the_run_resumes_from_the_previous_one(
    configure: Configure, tmp_path: Path
) -> None:
    common = {"save_every": 2, "max_steps": 6}
    uninterrupted = Trainer(configure(**common, out=str(tmp_path / "a"))).run()
    config = configure(**common, out=str(tmp_path / "b"))
    Trainer(config).run(stop=after(4))
    damaged = tmp_path / "b" / "checkpoints" / "step-4" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    events: list[dict[str, Any]] = []
    result = Trainer(config).run(events.append)
    assert [e["step"] for e in events if e.get("code") == "resumed"] == [2]
    assert any(e.get("code") == "checkpoint_broken" and e["level"] == "warn" for e in events)
    assert result.checkpoint is not None
    assert uninterrupted.checkpoint is not None
    assert hashes(Path(result.checkpoint), ".safetensors") == hashes(Path(uninterrupted.checkpoint), ".safetensors")


def test_resuming_on_another_machine_is_reported(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(max_steps=4, save_every=2)
    Trainer(config).run(stop=after(2))
    environment = checkpointing.environment
    monkeypatch.setattr(checkpointing, "environment", lambda config: {**environment(config), "threads": 1234})
    events: list[dict[str, Any]] = []
    Trainer(config).run(events.append)
    (event,) = [e for e in events if e.get("code") == "machine_changed"]
    assert event["message"].startswith("threads changed")


def test_scales_are_observed_or_loaded_before_the_first_step(configure: Configure) -> None:
    """If the base model has no amax histories, a run observes a microbatch first, gradients included."""
    events: list[dict[str, Any]] = []
    first = Trainer(configure(max_steps=1)).run(events.append)
    assert [e["code"] for e in events if e["type"] == "message"] == ["data", "scales_observed", "exported"]
    assert first.checkpoint is not None
    scaling = checkpoint.read_checkpoint(Path(first.checkpoint)).scaling
    assert all(int(t) == 2 for n, t in scaling.items() if n.endswith(".steps"))  # observed, then trained
    assert all((t[-2:] > 0).all() for n, t in scaling.items() if n.endswith(".amax_history"))
    events.clear()
    Trainer(configure(model=first.model, max_steps=1, out=str(Path(configure().out).with_name("second")))).run(
        events.append
    )
    assert [e["code"] for e in events if e["type"] == "message"] == ["data", "seeded", "exported"]


def test_validation_rows_that_are_training_rows_are_reported(configure: Configure, tmp_path: Path) -> None:
    training_rows = Path(configure().data[0]).read_text().splitlines()
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([*training_rows[:3], '{"text": "the lazy fox"}']))
    for files, expected in (([str(mixed)], ["3 of 4 validation rows are also training rows"]), ([], [])):
        events: list[Any] = []
        Trainer(configure(eval_data=files, max_steps=1, out=str(tmp_path / str(len(files))))).run(events.append)
        messages = [e["message"] for e in events if e.get("code") == "overlap"]
        assert [message.partition(":")[0] for message in messages] == expected
