"""The loop: it learns, it leaks nothing between documents, and it resumes with the same bits."""

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


@pytest.mark.parametrize(("format_", "notes"), [("compressed-tensors", []), ("fp8", [SCALE_NAMES_NOTE])])
def test_a_result_that_not_everybody_reads_says_so(configure: Configure, format_: str, notes: list[str]) -> None:
    events: list[dict[str, Any]] = []
    Trainer(configure(format=format_, max_steps=1)).run(events.append)
    assert [e["message"] for e in events if e.get("code") == "readers"] == notes


def hashes(path: Path, suffix: str = "") -> dict[str, Any]:
    files = checkpoint.manifest_of(path)["files"]
    return {name: entry for name, entry in files.items() if name.endswith(suffix)}


def after(steps: int) -> Callable[[], bool]:
    """A stop that lets `steps` steps through."""
    asked = itertools.count()
    return lambda: next(asked) >= steps


@pytest.mark.parametrize(
    ("place", "options"),
    [("model", {}), ("optimizer", {}), ("model", {"fp8_mha": True})],
    ids=["model", "optimizer", "mha"],
)
def test_stopped_and_started_again_is_the_same_bits(
    configure: Configure, tmp_path: Path, place: str, options: dict[str, Any]
) -> None:
    common = {"master_weights": place, "accumulate": 2, "save_every": 2, "max_steps": 6, "keep_last": 1}
    common |= {"recipe_options": options}
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
    with pytest.raises(JobError, match=r"written with lr=0\.001, and this job has 0\.002"):
        Trainer(configure(max_steps=2, lr=2e-3)).run()


def test_other_data_are_not_the_same_job(configure: Configure, data: Path) -> None:
    Trainer(configure(max_steps=2)).run()
    data.write_text(data.read_text() + '{"prompt": "a", "completion": " b"}\n')
    with pytest.raises(JobError, match="training data differ"):
        Trainer(configure(max_steps=2)).run()


def test_accumulating_is_the_same_as_a_larger_batch(configure: Configure, tmp_path: Path) -> None:
    """In the mean over all targets it makes no difference how a step is divided."""
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


def test_events_tell_what_a_job_owner_needs(configure: Configure, data: Path) -> None:
    events: list[dict[str, Any]] = []
    config = configure(max_steps=4, eval_data=[str(data)], eval_every=2, log_every=3, save_every=2)
    Trainer(config).run(events.append)
    assert events[0]["code"] == "data"
    assert 0 < events[0]["trainable_fraction"] < 1
    metrics = of_type(events, "metrics")
    assert [e["step"] for e in metrics] == [2, 3, 4]
    assert ["valid_loss" in e for e in metrics] == [True, False, True]
    wanted = {"train_loss", "train_mean_token_accuracy", "learning_rate", "grad_norm", "tokens_per_second", "epoch"}
    assert all(wanted <= e.keys() and e["tokens_per_second"] > 0 for e in metrics)
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


def test_a_step_whose_gradients_are_not_finite_is_skipped_and_told(
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


def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(
    configure: Configure, tmp_path: Path
) -> None:
    common = {"save_every": 2, "max_steps": 6}
    through = Trainer(configure(**common, out=str(tmp_path / "a"))).run()
    config = configure(**common, out=str(tmp_path / "b"))
    Trainer(config).run(stop=after(4))
    damaged = tmp_path / "b" / "checkpoints" / "step-4" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    events: list[dict[str, Any]] = []
    result = Trainer(config).run(events.append)
    assert [e["step"] for e in events if e.get("code") == "resumed"] == [2]
    assert any(e.get("code") == "checkpoint_broken" and e["level"] == "warn" for e in events)
    assert result.checkpoint is not None
    assert through.checkpoint is not None
    assert hashes(Path(result.checkpoint), ".safetensors") == hashes(Path(through.checkpoint), ".safetensors")


def test_a_resume_on_another_machine_says_so(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(max_steps=4, save_every=2)
    Trainer(config).run(stop=after(2))
    environment = checkpointing.environment
    monkeypatch.setattr(checkpointing, "environment", lambda config: {**environment(config), "threads": 1234})
    events: list[dict[str, Any]] = []
    Trainer(config).run(events.append)
    (told,) = [e for e in events if e.get("code") == "machine_changed"]
    assert told["message"].startswith("threads changed")


def test_no_step_is_taken_at_scale_one(configure: Configure) -> None:
    """A base model without histories is observed first, with its gradients; one that has all histories is not."""
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


def test_validation_by_what_is_learnt_is_warned_of(configure: Configure, tmp_path: Path) -> None:
    learnt = Path(configure().data[0]).read_text().splitlines()
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([*learnt[:3], '{"text": "the lazy fox"}']))
    for files, said in (([str(mixed)], ["3 of 4 validation rows are also training rows"]), ([], [])):
        told: list[Any] = []
        Trainer(configure(eval_data=files, max_steps=1, out=str(tmp_path / str(len(files))))).run(told.append)
        found = [event["message"] for event in told if event.get("code") == "overlap"]
        assert [message.partition(":")[0] for message in found] == said
