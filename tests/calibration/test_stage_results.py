"""A calibration that was killed at any step can be resumed, and writes the same bytes as one that was not."""

import json
import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from fp8serve.calibration.pipeline import calibrate
from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.fp8.recipe import DelayedScaling, from_name
from fp8serve.model.storage.files import acquire_lock

SMALL = {"samples": 8, "seq_len": 32, "batch_size": 3}
CASES = {
    "delayed": (DelayedScaling(amax_history_len=3), {"rounding": "gptq", "kv_cache": True}),
    "most recent": (DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"), {"gradients": True}),
    "rowwise": (from_name("rowwise"), {"smoothing": 0.5, "rounding": "gptq", "max_shard_size": "64kB"}),
}


def run(model: Path, out: Path, case: str, **options: object) -> None:
    recipe, chosen = CASES[case]
    calibrate(model, out=out, recipe=recipe, **SMALL | chosen | options)  # type: ignore[arg-type]


def _calibrate_and_die(model: Path, out: Path, case: str, steps: int, resume: bool) -> None:
    remaining = steps

    def progress(stage: str, completed: int, total: int) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    run(model, out, case, progress=progress, resume=resume)


def finishes(model: Path, out: Path, case: str, steps: int, resume: bool) -> bool:
    """Calibrates in a child process that is killed after `steps` steps. Returns whether it finished before."""
    process = get_context("fork").Process(target=_calibrate_and_die, args=(model, out, case, steps, resume))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def content(out: Path) -> dict[str, object]:
    files: dict[str, object] = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".html"}
    report = json.loads((out / "calibration.json").read_text())
    return files | {"calibration.json": {k: v for k, v in report.items() if k not in ("out", "seconds", "origin")}}


@pytest.fixture
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", CASES)
def test_a_calibration_killed_at_every_step_writes_the_same_files(case: str, model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "whole", case)
    out, steps = tmp_path / "again" / "out", 3
    while not out.exists():  # each run is killed one step later; the last one after writing everything
        finishes(model_dir, out, case, steps, resume=True)
        steps += 1
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.usefixtures("one_thread")
def test_finished_stages_are_not_computed_again(model_dir: Path, tmp_path: Path) -> None:
    assert not finishes(model_dir, tmp_path / "out", "delayed", 7, resume=False)  # while rounding
    (unfinished,) = tmp_path.iterdir()
    assert {p.name for p in unfinished.iterdir()} >= {"run.json", "observed.safetensors"}
    stages: list[str] = []
    run(
        model_dir,
        tmp_path / "out",
        "delayed",
        resume=True,
        progress=lambda stage, completed, total: stages.append(stage),
    )
    assert "observe" not in stages
    assert "round" in stages


def test_resuming_needs_the_option_and_the_same_arguments(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not finishes(model_dir, out, "delayed", 7, resume=False)
    with pytest.raises(ModelError, match=r"was interrupted; continue it with --resume, or remove .*out.calibrating"):
        run(model_dir, out, "delayed")
    with pytest.raises(ModelError, match="began with kv_cache=true, not false"):
        run(model_dir, out, "delayed", resume=True, kv_cache=False)
    with pytest.raises(ModelError, match="began with samples=8, not 4"):
        run(model_dir, out, "delayed", resume=True, samples=4)
    with pytest.raises(ModelError, match="began with recipe="):
        run(model_dir, out, "rowwise", resume=True, kv_cache=True, max_shard_size="5GiB")
    with (
        acquire_lock(tmp_path / ".out.calibrating" / "lock", "held"),
        pytest.raises(ModelError, match="Another process is calibrating"),
    ):
        run(model_dir, out, "delayed", resume=True)
    description = tmp_path / ".out.calibrating" / "run.json"
    stored = json.loads(description.read_text())
    description.write_text(json.dumps(stored | {"input_scales": "search"}))  # an option that was removed
    with pytest.raises(ModelError, match="began with input_scales='search'"):
        run(model_dir, out, "delayed", resume=True)
    assert not out.exists()
    description.write_text(json.dumps(stored | {"input_scales": "history", "max_ppl_increase": None}))
    run(model_dir, out, "delayed", resume=True)


def test_resume_without_a_previous_run_starts_one(model_dir: Path, tmp_path: Path) -> None:
    run(model_dir, tmp_path / "out", "delayed", resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("size", ["much", "-1GB", ""])
def test_an_invalid_shard_size_is_refused(size: str, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Fp8ServeError, match="max_shard_size must be a number of bytes"):
        run(model_dir, tmp_path / "out", "delayed", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []
