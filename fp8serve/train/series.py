"""The metrics of a run as a series: one row for each step that was reported, as a table in CSV and as curves.

A run's own log (`train.event_log`), a job's events and the answer of `GET /finetune/{id}/metrics` all hold these rows.
If a run diverged and went back to a checkpoint, its log has some steps twice; its series has each step once. No torch
here.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8serve.errors import JobError, one_line
from fp8serve.model.storage.opening import open_member
from fp8serve.train.event_log import EVENTS

Metrics = Mapping[str, Any]
Points = list[tuple[float, float]]
FIRST = ("step", "total_steps", "epoch", "train_loss", "valid_loss", "learning_rate", "grad_norm", "trained_tokens",
         "tokens_per_second")  # fmt: skip
"""The first columns of a table, which are there even if nothing was reported yet."""
NOT_MEASURED = frozenset({"id", "created_at", "type", "level", "message"})
LOSSES = {"training": "train_loss", "validation": "valid_loss"}


def of_run(directory: Path) -> list[Metrics]:
    """What the run in a directory has reported. JobError: it holds no run's log, or a damaged one."""
    path = directory / EVENTS
    try:
        with open_member(path, error=JobError) as file:
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is being written
        events = [json.loads(line) for line in lines]
        found = [event for event in events if event["type"] == "metrics"]
        rows = [{name: value for name, value in event.items() if name not in NOT_MEASURED} for event in found]
        return as_it_stands(rows)
    except (JobError, OSError, ValueError, KeyError, TypeError) as problem:
        raise JobError(f"{path} cannot be read as the log of a run: {one_line(problem)}.") from None


def as_it_stands(rows: Iterable[Metrics]) -> list[Metrics]:
    """`rows`, oldest first, without those of steps that the run took again later: each step once, its latest row, in
    order."""
    kept: list[Metrics] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def as_csv(series: Sequence[Metrics]) -> str:
    """A header and one line a step; a value that is not there, or was not finite, is an empty cell."""
    columns = dict.fromkeys([*FIRST, *(name for row in series for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(series)
    return text.getvalue()


def curves(series: Sequence[Metrics], names: Sequence[str] = ()) -> dict[str, Points]:
    """(step, value) of the metrics called `names`, or of the losses; those that were never reported are left out.

    JobError: none of them was.
    """
    wanted = {name: name for name in names} or LOSSES
    found = {label: _points(series, name) for label, name in wanted.items()}
    if drawn := {label: points for label, points in found.items() if points}:
        return drawn
    known = sorted({name for row in series for name in row if name != "step" and _points(series, name)})
    if not known:
        raise JobError("No step has been reported yet; there is nothing to draw.")
    raise JobError(f"No step has reported {' or '.join(wanted.values())}; there are {', '.join(known)}.")


def _points(series: Sequence[Metrics], name: str) -> Points:
    pairs = ((row.get("step"), row.get(name)) for row in series)
    return [(step, value) for step, value in pairs if isinstance(step, int | float) and isinstance(value, int | float)]
