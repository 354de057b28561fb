"""Runs a job in forked children that are killed with SIGKILL; its own program, so that no thread lives at the fork.

    python -m tests.train.killed_runs random JOB_DIR SEED     kill again and again, some events later, until it is done
    python -m tests.train.killed_runs points JOB_DIR FIRST STEP
                                        for every STEP-th k from FIRST on: die in the k-th fsync or rename, then run on

Prints the number of kills. JOB_DIR holds job.json; "points" works in copies of it, `JOB_DIR-k`, whose `out` is inside.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp8serve.train import job_process

LIMIT = 500


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


def die_in_call(point: int) -> None:
    """Replace fsync and rename by ones that kill this process in the `point`-th call."""
    calls = 0

    def guard(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, job_dir = sys.argv[1], Path(sys.argv[2])
    kill = {"points": kill_at_points, "random": kill_at_random}[mode]
    print(kill(job_dir, *map(int, sys.argv[3:])))
