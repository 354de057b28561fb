"""The events that a run reports, the log that stores them, and the tools that get its metrics. Events are flat JSON
objects.

The terminal, the job's log and the HTTP routes use the same objects. Every event has `type`, `level` ("info", "warn" or
"error") and `message`, a sentence for people. The types and their other fields are:

    message      `code` is one of: data, rows_dropped, overlap, kept, widened, seeded, adapter, rank_too_large,
                 scales_observed, reference, resumed, sweep, checkpoint_broken, machine_changed, length_changed,
                 step_skipped, loss_spike, loss_risen, overflow, underflow, nonfinite, scale_jump (`train.health`),
                 returned (`train.checkpointing`), diverged, stopped, exported, readers, tokenized, tokenized_lost,
                 report_lost, error
    metrics      step, total_steps, epoch, train_loss, the metrics of the method (train_mean_token_accuracy;
                 rewards/chosen, rewards/rejected, rewards/accuracies, rewards/margins, logps/chosen, logps/rejected;
                 reward, reward_std, completions/mean_length, clip_ratio/region_mean, kl, ...),
                 learning_rate, grad_norm, tokens_per_second, trained_tokens; after a return to an earlier checkpoint
                 also returns (`train.checkpointing`); after a validation also valid_loss and the metrics of the method
                 as valid_mean_token_accuracy, valid_rewards/chosen, ... A value that is not finite is null
    checkpoint   step, path, and the metrics of that step (train_loss, ...)

`type`, `level` and `message` are those of an OpenAI fine-tuning job event; the other fields are its `data`.

A run's log holds one event a line as JSON, with `id`, which rises by one across restarts, and `created_at`. An event is
on the disk before the next step starts, so that readers never see an event that a crash loses. The next start after a
crash removes an incomplete line, and does not log repeated steps again.

The series of a run has one row for each reported step. It can be read as CSV or as curves. If a run returned to an
earlier checkpoint, its log has some steps twice, and its series has each step once.

    tensorboard   writes event files into out/tensorboard/; a restarted run replaces the metrics of repeated steps
    wandb         continues one wandb run across restarts, with the id in out/wandb-id; the environment sets project,
                  host and mode (WANDB_PROJECT, WANDB_BASE_URL, WANDB_MODE); the default project is "fp8serve"

If a tool fails, for example because its disk is full or its server is down, it gets no more metrics, and an event says
so. A tool never ends a run and never changes its results. Missing packages are detected before a run starts. This
module imports no torch.
"""

import csv
import io
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from fp8serve.errors import JobError, MachineError, one_line
from fp8serve.model.storage.files import fsync
from fp8serve.model.storage.opening import open_member

if TYPE_CHECKING:
    from fp8serve.train.config import TrainConfig


log = logging.getLogger("fp8serve.train")
Event = dict[str, Any]
OnEvent = Callable[[Event], None]
EVENTS = "events.jsonl"
Metrics = Mapping[str, Any]
Points = list[tuple[float, float]]
FIRST_COLUMNS = ("step", "total_steps", "epoch", "train_loss", "valid_loss", "learning_rate", "grad_norm",
                 "trained_tokens", "tokens_per_second")  # fmt: skip
"""The first columns of a CSV table. A table without rows has them, too."""
EVENT_FIELDS = frozenset({"id", "created_at", "type", "level", "message"})
LOSSES = {"training": "train_loss", "validation": "valid_loss"}


def message(code: str, text: str, *, level: str = "info", **data: Any) -> Event:
    return {"type": "message", "level": level, "code": code, "message": text, **data}


def metrics(values: dict[str, Any], labels: Mapping[str, str]) -> Event:
    """Returns the event of a step. Its message shows the losses and the metrics in `labels`, with these labels."""
    labels = {"train_loss": "training loss", **labels, "valid_loss": "validation loss"}
    figures = ", ".join(f"{label}={_number(values[name])}" for name, label in labels.items() if name in values)
    text = f"Step {values['step']}/{values['total_steps']}: {figures}"
    return {"type": "metrics", "level": "info", "message": text, **values}


def ignore(event: Event) -> None:
    """Does nothing, for callers that need no events."""


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def checkpoint(path: str, values: dict[str, Any]) -> Event:
    text = f"Checkpoint written at step {values['step']}"
    return {"type": "checkpoint", "level": "info", "message": text, **values, "path": path}


class EventLog:
    """Appends events to a file. It opens the file at the first event, when the caller holds the run's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __call__(self, event: Event) -> None:
        file = self._file or self._open()
        if (position := _position(event)) is not None and position <= self._last_position:
            return  # the step is repeated after a restart
        line = {"id": self._next_id, "created_at": int(time.time()), **event}
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
        self._next_id += 1

    def _open(self) -> IO[str]:
        events = _logged_events(self._path)
        self._next_id = events[-1]["id"] + 1 if events else 1
        self._last_position = max((p for event in events if (p := _position(event)) is not None), default=(0, 0))
        self._file = self._path.open("a", encoding="utf-8")
        fsync(self._path.parent)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _position(event: Event) -> tuple[int, int] | None:
    """Returns (returns, step) of an event that a restarted run reports again, or None for any other event."""
    is_repeated = event["type"] == "metrics" or event.get("code") == "returned"
    return (event.get("returns", 0), event["step"]) if is_repeated else None


def _logged_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events in the file, after removing an incomplete last line, which a crash leaves."""
    if not path.exists():
        return []
    with open_member(path, error=JobError) as file:
        content = file.read()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    return [json.loads(line) for line in complete.splitlines()]


def read_events(path: Path, offset: int) -> tuple[list[Event], int]:
    """Returns the events in the complete lines from `offset` on, and the offset after these lines.

    The file is flushed to the disk first, because the server's database must not refer to lines that a power failure
    loses.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            added = file.read()
            lines = added[: added.rfind(b"\n") + 1]
            if lines:
                os.fsync(file.fileno())
    except FileNotFoundError:
        return [], offset
    events = [event for line in lines.splitlines() if (event := _parse_event(path, line)) is not None]
    return events, offset + len(lines)


def _parse_event(path: Path, line: bytes) -> Event | None:
    """Returns the event of a line, or None if the line is damaged; the job continues without that event."""
    try:
        event = json.loads(line)
        if isinstance(event, dict) and event.keys() >= EVENT_FIELDS:
            return event
    except (ValueError, RecursionError):
        pass
    log.warning("job %s wrote an event that cannot be read; the event is skipped", path.parent.name)
    return None


def series_of_run(directory: Path) -> list[Metrics]:
    """Returns the series of the run in a directory. Raises JobError if its log is missing or damaged."""
    path = directory / EVENTS
    try:
        with open_member(path, error=JobError) as file:
            lines = file.read().split(b"\n")[:-1]  # the text after the last newline is incomplete
        events = [json.loads(line) for line in lines]
        metrics_events = [event for event in events if event["type"] == "metrics"]
        rows = [{name: value for name, value in event.items() if name not in EVENT_FIELDS} for event in metrics_events]
        return latest_rows(rows)
    except (JobError, OSError, ValueError, KeyError, TypeError) as problem:
        raise JobError(f"{path} cannot be read as the log of a run: {one_line(problem)}.") from None


def latest_rows(rows: Iterable[Metrics]) -> list[Metrics]:
    """Returns the latest row of each step, in order of the steps. `rows` must be in the order of the log."""
    latest: list[Metrics] = []
    for row in rows:
        while latest and latest[-1]["step"] >= row["step"]:
            latest.pop()
        latest.append(row)
    return latest


def as_csv(series: Sequence[Metrics]) -> str:
    """Returns CSV with a header and one line a step. A missing value, or one that was not finite, is an empty cell."""
    columns = dict.fromkeys([*FIRST_COLUMNS, *(name for row in series for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(series)
    return text.getvalue()


def curves_of(series: Sequence[Metrics], names: Sequence[str] = ()) -> dict[str, Points]:
    """Returns the points (step, value) of the metrics `names`, or of the losses, by name. Leaves out metrics that were
    never reported, and raises JobError if that is the case for all of them."""
    requested = {name: name for name in names} or LOSSES
    curves = {label: _points(series, name) for label, name in requested.items()}
    if reported := {label: points for label, points in curves.items() if points}:
        return reported
    quantities = sorted({name for row in series for name in row if name != "step" and _points(series, name)})
    if not quantities:
        raise JobError("No step has been reported yet; there is nothing to draw.")
    raise JobError(f"No step has reported {' or '.join(requested.values())}; there are {', '.join(quantities)}.")


def _points(series: Sequence[Metrics], name: str) -> Points:
    pairs = ((row.get("step"), row.get(name)) for row in series)
    return [(step, value) for step, value in pairs if isinstance(step, int | float) and isinstance(value, int | float)]


ReportTool = Literal["tensorboard", "wandb"]
PROJECT = "fp8serve"


def require_package(name: str, reason: str, option: str) -> None:
    """Raises MachineError if the package is not installed. Its message begins with the clause `reason`."""
    if find_spec(name) is None:
        raise MachineError(f"{reason}, which is not installed: pip install 'fp8serve[{name}]', or leave {option} out.")


def check_optimizer_package(config: "TrainConfig") -> None:
    """Raises MachineError if the optimizer states need torchao and it is not installed."""
    if config.optimizer_states == "8bit":
        require_package("torchao", "8-bit optimizer states need torchao", "optimizer_states")


class TensorBoard:
    """Writes metrics as TensorBoard event files."""

    def __init__(self, config: "TrainConfig", first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(Path(config.out) / "tensorboard"), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes metrics to Weights & Biases."""

    def __init__(self, config: "TrainConfig", first_step: int) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        out = Path(config.out)
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        options = {"dir": str(out), "project": project, "config": config.identity(), "id": _wandb_id(out)}
        self._run: Any = wandb.init(**options, resume="allow")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


Writer = TensorBoard | WeightsAndBiases
WRITERS: dict[ReportTool, Callable[["TrainConfig", int], Writer]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases,
}  # fmt: skip


def check_installed(tools: Sequence[ReportTool]) -> None:
    """Raises MachineError that names the first tool whose package is not installed."""
    for tool in tools:
        require_package(tool, f"Reporting to {tool} needs its package", "report_to")


@contextmanager
def reporting_to_tools(config: "TrainConfig", on_event: OnEvent) -> Iterator[OnEvent]:
    """Yields a function that calls `on_event` and also sends metrics to the tools in `config.report_to`."""
    if not config.report_to:
        yield on_event
        return
    reporters = [_Reporter(tool, config, on_event) for tool in dict.fromkeys(config.report_to)]

    def handle(event: Event) -> None:
        on_event(event)
        if event["type"] == "metrics":
            for reporter in reporters:
                reporter.report(event)

    try:
        yield handle
    finally:
        for reporter in reporters:
            reporter.close()


@dataclass
class _Reporter:
    """Sends metrics to one tool until the tool fails."""

    tool: ReportTool
    config: "TrainConfig"
    on_event: OnEvent
    writer: Writer | None = None
    has_failed: bool = False

    def report(self, event: Event) -> None:
        if self.has_failed:
            return
        numbers = {name: value for name, value in event.items() if isinstance(value, int | float) and name != "step"}
        try:
            self.writer = self.writer or WRITERS[self.tool](self.config, event["step"])
            self.writer.write(event["step"], numbers)
        except Exception as problem:
            self._handle_failure(problem)

    def close(self) -> None:
        try:
            if self.writer is not None:
                self.writer.close()
        except Exception as problem:
            self._handle_failure(problem)

    def _handle_failure(self, problem: Exception) -> None:
        self.has_failed = True
        text = f"{self.tool} failed and gets no more metrics of this run: {type(problem).__name__}: {one_line(problem)}"
        self.on_event(message("report_lost", text, level="warn"))


def _wandb_id(out: Path) -> str:
    """Returns the id of the wandb run, which all starts of this run share."""
    path = out / "wandb-id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
