"""A job's process: its files and its exit status; a kill changes no bit of the result."""

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fp8serve.train import checkpoint, job_process
from fp8serve.train.events import EventLog
from fp8serve.train.job_process import EXIT_DONE, EXIT_FAILED, EXIT_LOCKED, EXIT_STOPPED, EXIT_USAGE
from tests.patience import PATIENCE

from .conftest import Configure
from .test_trainer import hashes, same_scales


@pytest.fixture
def job(tmp_path: Path, configure: Configure) -> Path:
    return make_job(tmp_path / "job", configure)


def make_job(directory: Path, configure: Configure, **values: Any) -> Path:
    directory.mkdir()
    config = configure(**{"out": str(directory / "out"), "max_steps": 4, "save_every": 2, "keep_last": 1, **values})
    (directory / "job.json").write_text(config.to_json())
    return directory


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def start(directory: Path, *command: str) -> "subprocess.Popen[str]":
    arguments = command or ("-m", "fp8serve.train.job_process", str(directory))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """Restores the signal handlers of the test process, because a worker that runs in it installs its own."""
    previous = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_a_packed_file_of_too_many_rows_fails_the_job_in_one_sentence(tmp_path: Path, configure: Configure) -> None:
    bomb = tmp_path / "rows.jsonl.gz"
    bomb.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1_000_000))
    job = make_job(tmp_path / "job", configure, data=[str(bomb)], max_rows=100)
    assert job_process.main([str(job)]) == EXIT_FAILED
    why = f"{bomb} has more than 100 rows, the limit for one file; give fewer."
    assert events(job)[-1]["message"] == why


@pytest.mark.slow
def test_data_that_take_too_much_memory_fail_the_job_in_one_sentence(tmp_path: Path, configure: Configure) -> None:
    """A row of 12 MB of JSON becomes four million lists."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a", "x": [' + "[], " * 4_000_000 + "[]]}\n")
    job = make_job(tmp_path / "job", configure, data=[str(data)], max_data_memory=64 << 20)
    process = start(job)
    process.communicate()
    assert process.returncode == EXIT_FAILED
    assert events(job)[-1]["message"] == f"{data} takes more than 64 MiB of memory to read and tokenize; give less."


@pytest.mark.smoke
def test_a_job_leaves_events_and_a_result(job: Path) -> None:
    assert job_process.main([str(job)]) == EXIT_DONE
    log = events(job)
    assert [e["id"] for e in log] == list(range(1, len(log) + 1))
    assert all({"type", "level", "message", "created_at"} <= e.keys() for e in log)
    assert [e["step"] for e in log if e["type"] == "metrics"] == [1, 2, 3, 4]
    assert [e["step"] for e in log if e["type"] == "checkpoint"] == [2, 4]
    result = json.loads((job / "result.json").read_text())
    assert result["status"] == "succeeded"
    assert result["model"] == str(job / "out" / "model")
    assert job_process.main([str(job)]) == EXIT_DONE
    assert len(events(job)) == len(log)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "/no/such/model"}, "does not exist"),
        ({"data": ["/no/such/data.jsonl"]}, "does not exist"),
        ({"lr": -1}, "lr must be at least"),
        ({"colour": 1}, "Unknown training option 'colour'"),
        ({"recipe": "int4"}, "no recipe 'int4'"),
        ({"seq_len": 4096}, "longer than the 128 tokens"),
        ({"device": "warp"}, "device 'warp' cannot be used"),
    ],
)
def test_bad_input_is_one_event_and_status_1(job: Path, change: dict[str, Any], says: str) -> None:
    (job / "job.json").write_text(json.dumps({**json.loads((job / "job.json").read_text()), **change}))
    assert job_process.main([str(job)]) == EXIT_FAILED
    (error,) = [e for e in events(job) if e["level"] == "error"]
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert not (job / "result.json").exists()


def test_an_internal_error_is_reported_in_one_sentence(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8serve.train import trainer

    def fail(*args: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(trainer, "prepare", fail)
    assert job_process.main([str(job)]) == EXIT_FAILED
    assert events(job)[-1]["message"] == "The trainer failed: RuntimeError: first line"


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert job_process.main([]) == job_process.main([str(tmp_path / "none")]) == EXIT_USAGE
    assert "usage:" in capsys.readouterr().err


def test_two_workers_never_run_one_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (job / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert job_process.main([str(job)]) == EXIT_LOCKED
    assert "Another worker runs" in capsys.readouterr().err
    assert not (job / "events.jsonl").exists()


def test_the_log_goes_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log({"type": "metrics", "step": 3})
    log.close()
    with path.open("a") as file:
        file.write('{"id": 2, "type": "me')
    log = EventLog(path)
    for event in ({"type": "metrics", "step": 3}, {"type": "message", "step": 3}, {"type": "metrics", "step": 4}):
        log(event)
    log.close()
    assert [(e["id"], e["type"], e["step"]) for e in events(tmp_path)] == [
        (1, "metrics", 3),
        (2, "message", 3),
        (3, "metrics", 4),
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("by_file", [False, True])
def test_a_run_ended_by_sigterm_or_a_stop_file_writes_a_checkpoint(
    by_file: bool, tmp_path: Path, configure: Configure
) -> None:
    job = make_job(tmp_path / "job", configure, max_steps=100_000, save_every=None)
    (job / "stop").touch()  # it was meant for an earlier process
    process = start(job)
    while not (job / "events.jsonl").exists() or not any(e["type"] == "metrics" for e in events(job)[:-1]):
        time.sleep(0.02)
        assert process.poll() is None, process.communicate()
    assert not (job / "stop").exists()
    if by_file:
        (job / "stop").touch()
    else:
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (EXIT_STOPPED, "", "")
    assert events(job)[-1]["code"] == "stopped"
    (path,) = checkpoint.list_checkpoints(job / "out" / "checkpoints")
    assert checkpoint.find_damage(path) is None
    assert not (job / "result.json").exists()


def finish(directory: Path, mode: str, *more: str) -> int:
    process = start(directory, "-m", "tests.train.killed_runs", mode, str(directory), *more)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return int(out)


def same_result(one: Path, two: Path) -> bool:
    """Returns every tensor of the last checkpoint and of the served model, by SHA-256."""
    a, b = (checkpoint.list_checkpoints(d / "out" / "checkpoints")[-1] for d in (one, two))
    models = one / "out" / "model", two / "out" / "model"
    served = [hashes(m, "del.safetensors") for m in models]
    return hashes(a, ".safetensors") == hashes(b, ".safetensors") and served[0] == served[1] and same_scales(*models)


@pytest.mark.slow
def test_a_run_killed_at_random_writes_the_same_bits(tmp_path: Path, configure: Configure) -> None:
    long = {"max_steps": 12, "save_every": 2, "accumulate": 2, "keep_last": 2}
    whole = make_job(tmp_path / "whole", configure, **long)
    killed = make_job(tmp_path / "killed", configure, **long)
    assert job_process.main([str(whole)]) == EXIT_DONE
    assert finish(killed, "random", "1") >= 2
    assert same_result(whole, killed)
    log = events(killed)
    assert [e["id"] for e in log] == list(range(1, len(log) + 1))
    losses = [[(e["step"], e["train_loss"]) for e in events(d) if e["type"] == "metrics"] for d in (whole, killed)]
    assert losses[0] == losses[1]


def run_whole(tmp_path: Path, configure: Configure, **options: Any) -> tuple[Path, Path]:
    """Returns the directory that one undisturbed process has written, and one of the same job before its start."""
    job = make_job(tmp_path / "job", configure, **options)
    described = (job / "job.json").read_bytes()
    process = start(job)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == EXIT_DONE
    job.rename(tmp_path / "whole")
    job.mkdir()
    (job / "job.json").write_bytes(described)
    return tmp_path / "whole", job


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_run_killed_at_any_fsync_or_rename_writes_the_same_files(tmp_path: Path, configure: Configure) -> None:
    whole, job = run_whole(tmp_path, configure, max_steps=2, save_every=1, template_date="2026-01-31")
    assert finish(job, "points", str(whole)) >= 20
