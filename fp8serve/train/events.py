"""What a run reports: flat JSON objects, one shape for the terminal, the job's log and the HTTP routes.

Every event has `type`, `level` ("info", "warn" or "error") and `message` (one sentence for a person). By type:

    message      `code` says which: data, rows_dropped, overlap, kept, widened, seeded, adapter, rank_too_large,
                 scales_observed, reference, resumed, sweep, checkpoint_broken, machine_changed, length_changed,
                 step_skipped, loss_spike, loss_risen, overflow, underflow, nonfinite, scale_jump (`train.health`),
                 returned (`train.recovery`), diverged, stopped, exported, readers, tokenized, tokenized_lost,
                 report_lost, error
    metrics      step, total_steps, epoch, train_loss, the measures of the method (train_mean_token_accuracy;
                 rewards/chosen, rewards/rejected, rewards/accuracies, rewards/margins, logps/chosen, logps/rejected;
                 reward, reward_std, completions/mean_length, clip_ratio/region_mean, kl, ...),
                 learning_rate, grad_norm, tokens_per_second, trained_tokens; returns (how often the run has gone back)
                 if it has; after a validation pass also valid_loss and the same measures
                 (valid_mean_token_accuracy; valid_rewards/chosen, ...). A value that is not finite is null
    checkpoint   step, path, and the latest metrics of that step (train_loss, ...)

`level`, `message` and `type` are those of an OpenAI fine-tuning job event; the rest is its `data`.

A run's log holds its events, one JSON object a line, with `id`, rising by one across restarts, and `created_at`. An
event is on the disk before the next step starts, so a crash never takes back an event that a reader has seen. A line
cut by a crash is removed at the next start, and steps that are taken again are not logged again.

Its series is one row for each step that was reported, as a table in CSV and as curves. A run's log, a job's events and
the answer of `GET /finetune/{id}/metrics` all hold these rows. If a run diverged and went back to a checkpoint, its log
has some steps twice; its series has each step once. No torch here.
"""

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fp8serve.errors import JobError, one_line
from fp8serve.model.storage.files import fsync
from fp8serve.model.storage.opening import open_member

Event = dict[str, Any]
OnEvent = Callable[[Event], None]
EVENTS = "events.jsonl"
Metrics = Mapping[str, Any]
Points = list[tuple[float, float]]
FIRST_COLUMNS = ("step", "total_steps", "epoch", "train_loss", "valid_loss", "learning_rate", "grad_norm",
                 "trained_tokens", "tokens_per_second")  # fmt: skip
"""The first columns of a table, which are there even if nothing was reported yet."""
NOT_MEASURED = frozenset({"id", "created_at", "type", "level", "message"})
LOSSES = {"training": "train_loss", "validation": "valid_loss"}


def message(code: str, text: str, *, level: str = "info", **data: Any) -> Event:
    return {"type": "message", "level": level, "code": code, "message": text, **data}


def metrics(values: dict[str, Any], words: Mapping[str, str]) -> Event:
    """words: the entries of `values` that the message shows beside the losses, with the names that it gives them."""
    named = {"train_loss": "training loss", **words, "valid_loss": "validation loss"}
    figures = ", ".join(f"{word}={_number(values[name])}" for name, word in named.items() if name in values)
    text = f"Step {values['step']}/{values['total_steps']}: {figures}"
    return {"type": "metrics", "level": "info", "message": text, **values}


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def checkpoint(path: str, values: dict[str, Any]) -> Event:
    text = f"Checkpoint written at step {values['step']}"
    return {"type": "checkpoint", "level": "info", "message": text, **values, "path": path}


class EventLog:
    """Appends to a file, which is opened at the first event: by then the caller holds the run's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __call__(self, event: Event) -> None:
        file = self._file or self._opened()
        if (place := _place(event)) is not None and place <= self._logged:
            return
        line = {"id": self._next, "created_at": int(time.time()), **event}
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
        self._next += 1

    def _opened(self) -> IO[str]:
        past = _whole_lines(self._path)
        self._next = past[-1]["id"] + 1 if past else 1
        self._logged = max((place for e in past if (place := _place(e)) is not None), default=(0, 0))
        self._file = self._path.open("a", encoding="utf-8")
        fsync(self._path.parent)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _place(event: Event) -> tuple[int, int] | None:
    """(returns, step) of an event that a run repeats when it takes the same steps again; None for any other event."""
    repeats = event["type"] == "metrics" or event.get("code") == "returned"
    return (event.get("returns", 0), event["step"]) if repeats else None


@contextmanager
def logged(path: Path) -> Iterator[EventLog]:
    """An EventLog that is closed when the block ends."""
    log = EventLog(path)
    try:
        yield log
    finally:
        log.close()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The events in the file; what follows the last newline was cut by a crash and is removed."""
    if not path.exists():
        return []
    with open_member(path, error=JobError) as file:
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def series_of_run(directory: Path) -> list[Metrics]:
    """What the run in a directory has reported. JobError: it holds no run's log, or a damaged one."""
    path = directory / EVENTS
    try:
        with open_member(path, error=JobError) as file:
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is being written
        events = [json.loads(line) for line in lines]
        results = [event for event in events if event["type"] == "metrics"]
        rows = [{name: value for name, value in event.items() if name not in NOT_MEASURED} for event in results]
        return as_it_stands(rows)
    except (JobError, OSError, ValueError, KeyError, TypeError) as problem:
        raise JobError(f"{path} cannot be read as the log of a run: {one_line(problem)}.") from None


def as_it_stands(rows: Iterable[Metrics]) -> list[Metrics]:
    """`rows`, oldest first, without those of steps that the run took again later: each step once, its latest row, in
    order."""
    retained: list[Metrics] = []
    for row in rows:
        while retained and retained[-1]["step"] >= row["step"]:
            retained.pop()
        retained.append(row)
    return retained


def as_csv(series: Sequence[Metrics]) -> str:
    """A header and one line a step; a value that is not there, or was not finite, is an empty cell."""
    columns = dict.fromkeys([*FIRST_COLUMNS, *(name for row in series for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(series)
    return text.getvalue()


def curves_of(series: Sequence[Metrics], names: Sequence[str] = ()) -> dict[str, Points]:
    """(step, value) of the metrics called `names`, or of the losses; those that were never reported are left out.

    JobError: none of them was.
    """
    expected = {name: name for name in names} or LOSSES
    results = {label: _points(series, name) for label, name in expected.items()}
    if drawn := {label: points for label, points in results.items() if points}:
        return drawn
    known = sorted({name for row in series for name in row if name != "step" and _points(series, name)})
    if not known:
        raise JobError("No step has been reported yet; there is nothing to draw.")
    raise JobError(f"No step has reported {' or '.join(expected.values())}; there are {', '.join(known)}.")


def _points(series: Sequence[Metrics], name: str) -> Points:
    pairs = ((row.get("step"), row.get(name)) for row in series)
    return [(step, value) for step, value in pairs if isinstance(step, int | float) and isinstance(value, int | float)]
