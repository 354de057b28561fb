"""A resumed run writes the same bytes; its directory cannot be used with another model, process or template date, and
the number of steps can only be increased."""

import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.errors import JobError
from fp8serve.model.storage.files import acquire_lock
from fp8serve.model.storage.shards import save_tensors
from fp8serve.train import checkpoint, checkpointing, job_process
from fp8serve.train.trainer import Trainer
from tests.patience import PATIENCE

from .conftest import Configure
from .test_job_process import finish, make_job
from .test_trainer import after

TIMES = {"events.jsonl", "result.json"}  # written by the worker, beside `out`; they hold times


def every_file(root: Path) -> dict[str, str]:
    files = (p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_same_metadata_is_the_same_bytes(tmp_path: Path) -> None:
    metadata = {f"key {i}": f'"{i}"\n\x01\x7f/é\u2028' for i in range(12)}
    tensors = {"a": torch.arange(3.0), "é\x7f": torch.ones(2, dtype=torch.bfloat16)}
    for i in range(8):
        save_tensors(tmp_path / f"{i}.safetensors", tensors, metadata)
    assert len(set(every_file(tmp_path).values())) == 1
    assert {k: v.tolist() for k, v in load_file(tmp_path / "0.safetensors").items()} == {
        k: v.tolist() for k, v in tensors.items()
    }


def assert_same_when_killed(folder: Path, configure: Configure, names: Iterable[str], **options: Any) -> None:
    """Asserts that a job killed at random writes the same bytes as one that was not; `names` must be among its
    files."""
    job = make_job(folder / "job", configure, template_date="2026-01-31", save_every=2, accumulate=2, **options)
    job_json = (job / "job.json").read_bytes()
    assert job_process.main([str(job)]) == job_process.EXIT_DONE
    job.rename(folder / "whole")
    job.mkdir()
    (job / "job.json").write_bytes(job_json)
    assert finish(job, "random", "3") >= 1
    whole, killed = every_file(folder / "whole"), every_file(job)
    assert {f"out/{name}" for name in names} <= whole.keys()
    differing = {name for name in whole.keys() | killed.keys() if whole.get(name) != killed.get(name)}
    assert differing <= TIMES | {"worker.lock"}  # worker.lock holds a process id


@pytest.mark.slow
def test_a_killed_and_resumed_run_writes_the_same_files(tmp_path: Path, configure: Configure) -> None:
    names = ("model/scales.safetensors", "checkpoints/step-8/manifest.json")
    assert_same_when_killed(tmp_path, configure, names, max_steps=8, keep_last=2)


def other_model(model: Path, out: Path) -> str:
    """Copies `model` to `out` with one weight changed; shapes and tokenizer stay. Returns `out`."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    name = next(n for n in tensors if n.endswith("norm.weight"))
    tensors[name] = tensors[name] * 2
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return str(out)


def test_another_model_in_the_same_directory_is_refused(configure: Configure, tmp_path: Path, model_dir: Path) -> None:
    Trainer(configure(max_steps=4, save_every=1)).run(stop=after(2))
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    Trainer(configure(max_steps=4, save_every=1, model=str(copy))).run(
        stop=after(1)
    )  # a copy of the same model may be used
    other = other_model(model_dir, tmp_path / "other")
    with pytest.raises(JobError, match="trained from another model than this job's"):
        Trainer(configure(max_steps=4, save_every=1, model=other)).run()


def test_the_model_digest_covers_tokenizer_and_chat_template(model_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    assert checkpointing.model_digest(copy) == checkpointing.model_digest(model_dir)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages[0].content }}"}))
    assert checkpointing.model_digest(copy) != checkpointing.model_digest(model_dir)
    assert checkpointing.model_digest(tmp_path / "gone") is None


def _hold(path: Path, ready: Any, release: Any) -> None:
    with acquire_lock(path, "taken"):
        ready.set()
        release.wait()


def test_two_runs_do_not_share_a_directory(configure: Configure) -> None:
    config = configure(max_steps=2)
    out = Path(config.out)
    out.mkdir()
    process_context = multiprocessing.get_context("spawn")
    ready, release = process_context.Event(), process_context.Event()
    other = process_context.Process(target=_hold, args=(out / "run.lock", ready, release))
    other.start()
    try:
        assert ready.wait(PATIENCE)
        with pytest.raises(JobError, match="Another run uses"):
            Trainer(config).run()
        assert sorted(p.name for p in out.iterdir()) == ["run.lock"]
    finally:
        other.kill()  # the lock dies with its process
        other.join()
    assert Trainer(config).run().status == "succeeded"


def test_a_second_run_in_the_same_process_is_refused(configure: Configure) -> None:
    config = configure(max_steps=3)
    errors: list[str] = []

    def again() -> bool:
        with pytest.raises(JobError, match="Another run") as caught:
            Trainer(config).run()
        errors.append(str(caught.value))
        return False

    assert Trainer(config).run(stop=again).status == "succeeded"
    assert len(errors) == 3


@pytest.mark.parametrize(("minutes", "steps"), [(1e-9, [1, 2, 3, 4]), (1e9, [4])])
def test_without_save_every_checkpoints_are_written_every_save_minutes(
    configure: Configure, minutes: float, steps: list[int]
) -> None:
    events: list[dict[str, Any]] = []
    config = configure(max_steps=4, save_minutes=minutes)
    assert configure().save_minutes == 10
    Trainer(config).run(events.append)
    assert [e["step"] for e in events if e["type"] == "checkpoint"] == steps


def test_a_finished_run_continues_with_more_steps(configure: Configure) -> None:
    first = Trainer(configure(max_steps=3)).run()
    assert first.model is not None
    before = every_file(Path(first.model))
    events: list[dict[str, Any]] = []
    second = Trainer(configure(max_steps=5)).run(events.append)
    assert (second.step, second.total_steps) == (5, 5)
    assert [e["step"] for e in events if e["type"] == "metrics"] == [4, 5]
    (event,) = [e for e in events if e.get("code") == "length_changed"]
    assert (event["level"], event["total_steps"]) == ("warn", 5)
    model = Path(second.model or "")
    assert json.loads((model / "training.json").read_text())["step"] == 5
    assert every_file(model.with_name("model-step-3")) == before
    events.clear()
    assert Trainer(configure(max_steps=5)).run(events.append).model == str(model)  # nothing is left to do
    assert [e.get("code") for e in events] == ["tokenized", "data", "resumed"]
    with pytest.raises(JobError, match="is already at step 5, and this job ends at step 4"):
        Trainer(configure(max_steps=4)).run()


def test_a_resumed_run_keeps_its_template_date(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    day = [date(2026, 1, 31)]

    class Today(date):
        @classmethod
        def today(cls) -> date:  # type: ignore[override]
            return day[0]

    monkeypatch.setattr(checkpointing, "date", Today)
    Trainer(configure(max_steps=4, save_every=1)).run(stop=after(2))
    day[0] = date(2026, 2, 1)
    result = Trainer(configure(max_steps=4, save_every=1)).run()
    assert result.checkpoint is not None
    meta = checkpoint.read_checkpoint(Path(result.checkpoint)).meta
    assert meta["identity"]["config"]["template_date"] == meta["config"]["template_date"] == "2026-01-31"
    with pytest.raises(JobError, match="written with template_date='2026-01-31', and this job has '2026-02-01'"):
        Trainer(configure(max_steps=4, save_every=1, template_date="2026-02-01")).run()


def test_a_template_with_a_date_gives_the_same_text_when_resumed_on_another_day(
    configure: Configure, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3.2's template writes the date into every prompt. Without a fixed date, a resumed run would see other
    data."""
    base = Path(shutil.copytree(model_dir, tmp_path / "dated"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ '<|system|>' + strftime_now('%d %b %Y') + '<|end|>' }}" + config["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    job = configure(model=str(base), max_steps=4, save_every=1)
    monkeypatch.setattr(checkpointing, "date", _Day)
    Trainer(job).run(stop=after(2))
    monkeypatch.undo()  # the real today is another day
    assert Trainer(job).run().status == "succeeded"


class _Day(date):
    @classmethod
    def today(cls) -> date:  # type: ignore[override]
        return date(2001, 2, 3)


DIVERGES = {"lr": 5.0, "clip": None, "max_steps": 12, "warmup_steps": 0, "weight_decay": 0.0, "min_lr_ratio": 1.0}


def test_a_diverged_run_fails_without_a_model_unless_on_divergence_is_keep(configure: Configure) -> None:
    with pytest.raises(JobError, match=r"Training diverged: the loss of its first rows rose from \d") as caught:
        Trainer(configure(**DIVERGES)).run()
    assert "--on-divergence keep" in str(caught.value)
    assert not (Path(configure().out) / "model").exists()
    with pytest.raises(JobError, match="Training diverged"):  # resuming the diverged run fails again
        Trainer(configure(**DIVERGES)).run()
    events: list[dict[str, Any]] = []
    result = Trainer(configure(**DIVERGES, on_divergence="keep")).run(events.append)
    assert result.status == "succeeded"
    assert Path(result.model or "").is_dir()
    assert [e["level"] for e in events if e.get("code") == "diverged"] == ["warn"]


def test_the_worker_of_a_diverged_run_fails(configure: Configure, tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", configure, **DIVERGES)
    assert job_process.main([str(job)]) == job_process.EXIT_FAILED
    last = json.loads((job / "events.jsonl").read_text().splitlines()[-1])
    assert (last["code"], last["level"]) == ("error", "error")
    assert last["message"].startswith("Training diverged")
    assert not (job / "result.json").exists()


def test_a_base_model_with_nan_weights_is_refused(configure: Configure, tmp_path: Path, model_dir: Path) -> None:
    broken = Path(shutil.copytree(model_dir, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(JobError, match="loss of the first rows is nan before any step"):
        Trainer(configure(model=str(broken), recipe="current")).run()
