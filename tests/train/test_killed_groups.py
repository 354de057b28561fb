"""A fine-tuning job on a group of processes: it is stopped by a signal, or one of its processes is killed."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fp8serve.train.job_process import EXIT_FAILED, EXIT_STOPPED
from tests.patience import PATIENCE, until

from .conftest import Configure
from .test_job_process import events, finish, make_job, run_whole, start
from .test_processes import SHARED
from .test_resume import TIMES, every_file

pytestmark = pytest.mark.distributed


def in_group(job: Path, count: int = 2) -> "subprocess.Popen[str]":
    return start(job, "-m", "fp8serve.train.job_process", "--procs", str(count), str(job))


def metrics_in(job: Path) -> list[dict[str, Any]]:
    path = job / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [e for e in (json.loads(line) for line in lines if line.endswith("\n")) if e["type"] == "metrics"]


def assert_stops_by_a_signal(job: Path) -> None:
    """Asserts that SIGTERM stops the job, run by a group of processes, at a checkpoint and without output."""
    process = in_group(job)
    until(lambda: metrics_in(job) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (EXIT_STOPPED, "", "")
    assert events(job)[-1]["code"] == "stopped"


@pytest.mark.smoke
def test_a_signal_stops_the_group_at_a_checkpoint(tmp_path: Path, configure: Configure) -> None:
    job = make_job(tmp_path / "job", configure, **{**SHARED, "max_steps": 100_000}, save_every=None)
    assert_stops_by_a_signal(job)
    assert not (job / "result.json").exists()


def test_an_input_error_is_reported_once_and_the_group_does_not_restart(tmp_path: Path, configure: Configure) -> None:
    job = make_job(tmp_path / "job", configure, **SHARED, eval_data=["/no/such/file"])
    process = in_group(job)
    assert process.communicate(timeout=PATIENCE) == ("", "")
    assert process.returncode == EXIT_FAILED
    assert [e["level"] for e in events(job)].count("error") == 1
    assert "/no/such/file does not exist" in events(job)[-1]["message"]


def test_the_ranks_die_with_the_process_that_started_them(tmp_path: Path, configure: Configure) -> None:
    job = make_job(tmp_path / "job", configure, **{**SHARED, "max_steps": 100_000}, save_every=1)
    process = in_group(job)
    until(lambda: len(metrics_in(job)) > 2)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    process.kill()
    process.communicate(timeout=PATIENCE)
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and is_rank(pid) for pid in ranks))
    again = in_group(job)  # both locks are free
    steps = len(metrics_in(job))
    until(lambda: len(metrics_in(job)) > steps or again.poll() is not None)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=PATIENCE)
    assert again.returncode == EXIT_STOPPED


def is_rank(pid: int) -> bool:
    """Returns whether the process still runs; the command line of a process that has ended is empty."""
    try:
        return b"fp8serve.train.group" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def run_shared(tmp_path: Path, configure: Configure, **options: Any) -> tuple[Path, Path]:
    return run_whole(tmp_path, configure, **SHARED | options)


def assert_same(whole: Path, killed: Path) -> None:
    one, two = every_file(whole), every_file(killed)
    assert {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)} <= TIMES | {"worker.lock"}


@pytest.mark.slow
def test_processes_killed_at_random_write_the_directory_of_one(tmp_path: Path, configure: Configure) -> None:
    """Kills a rank, after which the group restarts it, and the parent process of the ranks."""
    whole, job = run_shared(tmp_path, configure, max_steps=12, save_every=2, keep_last=2)
    assert finish(job, "group", "4") == 2
    assert_same(whole, job)
    losses = [[(e["step"], e["train_loss"]) for e in metrics_in(directory)] for directory in (whole, job)]
    assert losses[0] == losses[1]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_two_processes_resume_from_the_files_at_every_third_point(tmp_path: Path, configure: Configure) -> None:
    """A point is an fsync or a rename. test_job_process.py resumes one process, which reads the same files, at all."""
    whole, job = run_shared(tmp_path, configure, max_steps=2, save_every=1)
    assert finish(job, "group-points", str(whole), "3") >= 7


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_rank_0_killed_at_every_tenth_point_writes_the_same_directory(tmp_path: Path, configure: Configure) -> None:
    whole, job = run_shared(tmp_path, configure, max_steps=2, save_every=1)
    assert finish(job, "group-kills", str(whole), "10") >= 2
