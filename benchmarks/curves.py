"""Functions that the comparisons with TRL's trainers share: rows in our trainer's order, curves, and cached runs.

A curve is a list with the figures of every step by their names. Every run writes its curve when it is complete, so that
a benchmark that was interrupted continues with the runs that are missing.
"""

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fp8serve.train.config import TrainConfig
from fp8serve.train.data import permutation
from fp8serve.train.trainer import Trainer

Curve = list[dict[str, float]]
Row = dict[str, Any]
_Result = TypeVar("_Result")


def write(path: Path, rows: Sequence[Row]) -> str:
    """Writes rows as JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def in_order(rows: Sequence[Row], seed: int) -> list[Row]:
    """Returns the rows in the order in which our trainer takes them in its first epoch."""
    return [rows[i] for i in permutation(len(rows), seed, 0)]


def _ignore(event: Row) -> None:
    """Ignores an event, for callers that want only the curve."""


def trained(config: TrainConfig, names: Mapping[str, str], on_event: Callable[[Row], None] = _ignore) -> Curve:
    """Trains in this process; returns the curve and leaves the model in `config.out`. names: the metric's name, by the
    figure's name in the curve."""
    steps: Curve = []

    def follow(event: Row) -> None:
        on_event(event)
        if event["type"] == "metrics":
            steps.append({name: event[metric] for name, metric in names.items()})

    Trainer(config).run(follow)
    return steps


def peer(python: str, program: Path, folder: Path, job: Row) -> Any:
    """Runs a program of peer_programs/ on a file with the job; returns the last line that it prints, as JSON."""
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    process = subprocess.run([python, str(program), str(job_file)], capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{program.name} failed: {process.stderr[-2000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def cached(path: Path, run: Callable[[], _Result]) -> _Result:
    """Returns the result of a run from `path`; if that file is missing, runs and writes it."""
    if not path.exists():
        path.write_text(json.dumps(run()), encoding="utf-8")
    result: _Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def apart(run: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest difference between two curves over all steps, for each figure; for the loss, the mean one, too."""
    steps = list(zip(run, other, strict=True))
    largest = {f"largest {name}": max(abs(a[name] - b[name]) for a, b in steps) for name in run[0]}
    return {**largest, "mean loss": sum(abs(a["loss"] - b["loss"]) for a, b in steps) / len(steps)}
