"""Runs a job in forked children that are killed with SIGKILL; its own program, so that no thread lives at the fork.

    python -m tests.train.killed_runs random JOB_DIR SEED     kill again and again, some events later, until it is done
    python -m tests.train.killed_runs points JOB_DIR FIRST STEP
                                        for every STEP-th k from FIRST on: die in the k-th fsync or rename, then run on
    python -m tests.train.killed_runs group JOB_DIR SEED      on two processes; kills a rank, or what started both
    python -m tests.train.killed_runs group-points JOB_DIR FIRST STEP WHOLE
                                        "points" of rank 0 of two; each time JOB_DIR must become as WHOLE is

Prints the number of kills. JOB_DIR holds job.json; "points" works in copies of it, `JOB_DIR-k`, whose `out` is inside.
With SPOILED in the environment the weights break as in `spoiled.py`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp8serve.train import job_process
from fp8serve.train.group import run_group
from tests.train.spoiled import spoil

LIMIT = 500
MOST_KILLS = 8  # of groups, whose start takes long


def child(job: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Fork; the child runs the job and never returns."""
    pid = os.fork()
    if pid == 0:
        prepare()
        os._exit(job_process.main([str(job)]))
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_random(job: Path, seed: int) -> int:
    chance, kills = random.Random(seed), 0
    while kills < LIMIT:
        pid, lines = child(job), logged(job) + chance.randint(1, 16)
        while logged(job) < lines and not (job / "result.json").exists():
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        kills += wait(pid) == -signal.SIGKILL
        if (job / "result.json").exists():
            return kills
    raise SystemExit("the job never ended")


def logged(job: Path) -> int:
    path = job / "events.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def die_in_call(point: int, note: Callable[[], object] = lambda: None) -> None:
    """Replace fsync and rename by ones that kill this process in the `point`-th call."""
    calls = 0

    def guard(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
                note()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename"):
        setattr(os, name, guard(getattr(os, name)))


def kill_at_points(job: Path, first: int, step: int) -> int:
    for point in range(first, LIMIT, step):
        copy = job.with_name(f"{job.name}-{point}")
        shutil.copytree(job, copy)
        config = json.loads((copy / "job.json").read_text())
        (copy / "job.json").write_text(json.dumps({**config, "out": str(copy / "out")}))
        if wait(child(copy, lambda point=point: die_in_call(point))) == job_process.EXIT_DONE:  # type: ignore[misc]
            return (point - first) // step
        if wait(child(copy)) != job_process.EXIT_DONE:
            raise SystemExit(f"after a kill in call {point} the job did not end")
    raise SystemExit("too many calls")


def kill_group(job: Path, seed: int) -> int:
    chance, kills = random.Random(seed), 0
    while kills < LIMIT:
        group = child_of_two(job)
        while group.poll() is None:
            lines = logged(job) + chance.randint(1, 12)
            while logged(job) < lines and group.poll() is None:
                time.sleep(0.002)
            found = (
                Path(f"/proc/{group.pid}/task/{group.pid}/children").read_text().split() if group.poll() is None else []
            )
            victims = [int(pid) for pid in found]
            if victims and kills < MOST_KILLS:
                os.kill(chance.choice([*victims, group.pid]), signal.SIGKILL)
                kills += 1
        if group.wait() == job_process.EXIT_DONE:
            return kills
    raise SystemExit("the job never ended")


def children_of(pid: int) -> list[int]:
    """None once the process has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def child_of_two(job: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "fp8serve.train.job_process", "--procs", "2", str(job)])


def kill_group_at_points(job: Path, first: int, step: int, whole: Path) -> int:
    described = (job / "job.json").read_text()
    for point in range(first, LIMIT, step):
        shutil.rmtree(job)
        job.mkdir()
        (job / "job.json").write_text(described)
        died = job.parent / f"died-{point}"
        if run_group(2, "tests.train.killed_runs:dying_rank", [str(job), str(point), str(died)]) != 0:
            raise SystemExit(f"after a kill in call {point} the job did not end")
        if differing := unequal(whole, job):
            raise SystemExit(f"after a kill in call {point} these differ: {differing}")
        if not died.exists():
            return (point - first) // step
    raise SystemExit("too many calls")


def dying_rank(arguments: list[str]) -> int:
    """JOB_DIR POINT DIED: run the job; rank 0 dies once."""
    job, point, died = arguments
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die_in_call(int(point), Path(died).touch)
    return job_process.as_rank([job])


def unequal(one: Path, two: Path) -> list[str]:
    """The files in which two jobs differ, except those that record times and processes."""
    files = [{p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()} for root in (one, two)]
    times = {"events.jsonl", "result.json", "worker.lock"}
    differing = {n for n in files[0].keys() | files[1].keys() if files[0].get(n) != files[1].get(n)}
    return sorted(str(name) for name in differing if str(name) not in times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "SPOILED" in os.environ:
        spoil()
    mode, job_dir, *numbers = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    if mode == "group-points":
        print(kill_group_at_points(job_dir, int(numbers[0]), int(numbers[1]), Path(numbers[2])))
    else:
        kill = {"points": kill_at_points, "random": kill_at_random, "group": kill_group}[mode]
        print(kill(job_dir, *map(int, numbers)))
