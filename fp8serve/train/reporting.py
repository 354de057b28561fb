"""Reports the metrics of a run to TensorBoard and Weights & Biases.

    tensorboard   writes event files into out/tensorboard/; a restarted run replaces the metrics of repeated steps
    wandb         continues one wandb run across restarts, with the id in out/wandb-id; the environment sets project,
                  host and mode (WANDB_PROJECT, WANDB_BASE_URL, WANDB_MODE); the default project is "fp8serve"

If a tool fails, for example because its disk is full or its server is down, it gets no more metrics, and an event says
so. A tool never ends a run and never changes its results. Missing packages are detected before a run starts. This
module imports no torch.
"""

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fp8serve.errors import MachineError, one_line
from fp8serve.train.events import Event, OnEvent, message

if TYPE_CHECKING:
    from fp8serve.train.config import TrainConfig

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


class Writer(Protocol):
    """Writes the metrics of a step to a tool."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


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
