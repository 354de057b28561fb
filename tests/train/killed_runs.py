"""Runs a job in forked children and kills them with SIGKILL. It is a program of its own, so that no thread exists at
the fork, and it imports every module of a job, so that no child has to.

    python -m tests.train.killed_runs random JOB_DIR SEED     kill and restart at random events until the job is done
    python -m tests.train.killed_runs points JOB_DIR WHOLE    resume from the files at every point
    python -m tests.train.killed_runs group JOB_DIR SEED      like "random", on two ranks: kill a rank or their parent
    python -m tests.train.killed_runs group-points JOB_DIR WHOLE STEP   two ranks resume from every STEP-th point
    python -m tests.train.killed_runs group-kills JOB_DIR WHOLE STEP    of two ranks, kill rank 0 at every STEP-th point

A point is a call of fsync or rename before which the files have changed since the previous such call; a kill in any
other call would leave the same files as a kill at the point before it. A killed process loses only its memory, so
"points" runs the job once, copies the files at each point, and resumes the job from each copy. Each time the files in
JOB_DIR must become equal to those in WHOLE, the directory of a run that was not killed.

Prints the number of kills. JOB_DIR holds job.json. With SPOILED in the environment, the run diverges (`spoiled.py`).
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import fp8serve.train.trainer  # noqa: F401
from fp8serve import ranks
from fp8serve.train import job_process
from fp8serve.train.group import run_group
from tests.train.spoiled import spoil

LIMIT = 500
MOST_KILLS = 2  # of a group, because starting one takes long


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


def before_each_call(act: Callable[[int], object]) -> None:
    """From now on, fsync and rename first call `act` with the number of the call, counted from 1 over both."""
    calls = 0

    def guard(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            act(calls)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename"):
        setattr(os, name, guard(getattr(os, name)))


def at_each_point(job: Path, act: Callable[[int], object]) -> None:
    """From now on, `act` is called at every point, with the number of the call."""
    before: dict[Path, bytes | None] | None = None

    def look(call: int) -> None:
        nonlocal before
        if (now := content(job)) != before:
            before = now
            act(call)

    before_each_call(look)


def content(directory: Path) -> dict[Path, bytes | None]:
    """Returns the bytes of every file below `directory`, and None for every folder, by relative path."""
    return {p.relative_to(directory): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


def die_in_call(number: int, note: Callable[[], object]) -> None:
    """This process will call `note` and kill itself with SIGKILL in the `number`-th call of fsync or rename."""

    def die(call: int) -> None:
        if call == number:
            note()
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_call(die)


def copy_at_each_point(job: Path, copies: Path) -> None:
    at_each_point(job, lambda call: shutil.copytree(job, copies / str(call)))


def points(job: Path, whole: Path) -> int:
    def copy_points(copies: Path) -> int:
        return wait(child(job, lambda: copy_at_each_point(job, copies)))

    return resume_from_each_point(job, whole, copy_points, lambda: wait(child(job)))


def resume_from_each_point(
    job: Path, whole: Path, copy_points: Callable[[Path], int | None], run: Callable[[], int | None], step: int = 1
) -> int:
    """`copy_points` runs the job and copies its files at each point to a subdirectory of its argument, named by the
    number of the call. The job is resumed from every `step`-th copy by `run`. Returns the number of resumptions."""
    copies = job.with_name("copies")
    copies.mkdir()
    if copy_points(copies) != job_process.EXIT_DONE:
        raise SystemExit("the job did not end")
    points = sorted(copies.iterdir(), key=lambda path: int(path.name))[::step]
    for point in points:
        shutil.rmtree(job)
        point.rename(job)  # the files contain their own path
        expect_whole(run(), job, whole, point.name)
    return len(points)


def expect_whole(status: int | None, job: Path, whole: Path, call: str) -> None:
    if status != job_process.EXIT_DONE:
        raise SystemExit(f"after a kill in call {call} the job did not end")
    if differing := unequal(whole, job):
        raise SystemExit(f"after a kill in call {call} these differ: {differing}")


def kill_group(job: Path, seed: int) -> int:
    chance, kills = random.Random(seed), 0
    while kills < LIMIT:
        group = child_of_two(job)
        while group.poll() is None:
            lines = logged(job) + chance.randint(1, 12)
            while logged(job) < lines and group.poll() is None:
                time.sleep(0.002)
            victims = children_of(group.pid) if group.poll() is None else []
            if victims and kills < MOST_KILLS:
                os.kill(chance.choice([*victims, group.pid]), signal.SIGKILL)
                kills += 1
        if group.wait() == job_process.EXIT_DONE:
            return kills
    raise SystemExit("the job never ended")


def children_of(pid: int) -> list[int]:
    """Returns the process ids of the children, none once the process has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def child_of_two(job: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "fp8serve.train.job_process", "--procs", "2", str(job)])


def two_ranks(job: Path, prepare_first: Callable[[], None] = lambda: None) -> int:
    """Forks two ranks that run the job, without a launcher. Returns the exit status of rank 0."""

    def run(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
        store = dist.FileStore(f"{folder}/store", 2)
        ranks.rendezvous = lambda url, timeout: iter([(store, rank, 2)])
        if rank == 0:
            prepare_first()
        os._exit(job_process.run_rank([str(job)]))

    with TemporaryDirectory() as folder:
        pids = []
        for rank in (0, 1):
            if (pid := os.fork()) == 0:
                run(rank)
            pids.append(pid)
        first, _ = map(wait, pids)
        return first


def group_points(job: Path, whole: Path, step: int) -> int:
    def copy_points(copies: Path) -> int:
        return two_ranks(job, lambda: copy_at_each_point(job, copies))

    return resume_from_each_point(job, whole, copy_points, lambda: two_ranks(job), step)


def group_kills(job: Path, whole: Path, step: int) -> int:
    """Kills rank 0 once per run. The group restarts by itself. Returns the number of runs."""
    copies, death_mark, job_json = job.with_name("copies"), job.with_name("died"), (job / "job.json").read_text()
    copies.mkdir()
    two_ranks(job, lambda: copy_at_each_point(job, copies))
    calls = sorted(int(path.name) for path in copies.iterdir())[::step]
    for call in map(str, calls):
        shutil.rmtree(job)
        job.mkdir()
        (job / "job.json").write_text(job_json)
        expect_whole(
            run_group(2, "tests.train.killed_runs:dying_rank", [str(job), call, str(death_mark)]), job, whole, call
        )
        death_mark.unlink()
    return len(calls)


def dying_rank(arguments: list[str]) -> int:
    """Runs the job. `arguments` are JOB_DIR, CALL and DIED: in its first run, rank 0 kills itself in the CALL-th call
    and creates the file DIED before that."""
    job, call, died = arguments
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die_in_call(int(call), Path(died).touch)
    return job_process.run_rank([job])


def unequal(first: Path, second: Path) -> list[str]:
    """Returns the names of the files that differ, except those that record times and processes."""
    files = [{p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()} for root in (first, second)]
    times = {"events.jsonl", "result.json", "worker.lock"}
    differing = {n for n in files[0].keys() | files[1].keys() if files[0].get(n) != files[1].get(n)}
    return sorted(str(name) for name in differing if str(name) not in times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "SPOILED" in os.environ:
        spoil()
    mode, job_dir, *more = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    if mode in ("random", "group"):
        print({"random": kill_at_random, "group": kill_group}[mode](job_dir, int(more[0])))
    elif mode == "points":
        print(points(job_dir, Path(more[0])))
    else:
        print({"group-points": group_points, "group-kills": group_kills}[mode](job_dir, Path(more[0]), int(more[1])))
