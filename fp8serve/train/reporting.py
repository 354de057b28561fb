"""Metrics for other tools, besides a run's own events: TensorBoard and Weights & Biases, where they are installed.

    tensorboard   event files in out/tensorboard/; earlier metrics of the steps that this process takes are replaced
    wandb         one run of wandb across restarts, by the id in out/wandb-id; project, host and mode come from the
                  environment (WANDB_PROJECT, WANDB_BASE_URL, WANDB_MODE); the default project is "fp8serve"

A tool that fails, for example because its disk is full or its server is down, gets no more metrics, and the run reports
that. A tool never ends a run or changes a bit of it. A package that is not installed is refused before a run starts,
without torch.
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


def require_package(name: str, needed: str, option: str) -> None:
    """MachineError: the package is not installed. needed: the beginning of the sentence, which names it."""
    if find_spec(name) is None:
        raise MachineError(f"{needed}, which is not installed: pip install 'fp8serve[{name}]', or leave {option} out.")


def check_states(config: "TrainConfig") -> None:
    """MachineError: the optimizer's states need a package that is not installed."""
    if config.optimizer_states == "8bit":
        require_package("torchao", "8-bit optimizer states need torchao", "optimizer_states")


class Writer(Protocol):
    """Takes numbers by their names."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """See the module."""

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
    """See the module."""

    def __init__(self, config: "TrainConfig", first_step: int) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        out = Path(config.out)
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        about = {"dir": str(out), "project": project, "config": config.defines(), "id": _wandb_id(out)}
        self._run: Any = wandb.init(**about, resume="allow")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


WRITERS: dict[ReportTool, Callable[["TrainConfig", int], Writer]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases,
}  # fmt: skip


def check_installed(tools: Sequence[ReportTool]) -> None:
    """MachineError names the first tool that is not installed."""
    for tool in tools:
        require_package(tool, f"Reporting to {tool} needs its package", "report_to")


@contextmanager
def reported(config: "TrainConfig", on_event: OnEvent) -> Iterator[OnEvent]:
    """An `on_event` that also gives metrics to the tools in `config.report_to`."""
    if not config.report_to:
        yield on_event
        return
    reports = [_Report(tool, config, on_event) for tool in dict.fromkeys(config.report_to)]

    def handle(event: Event) -> None:
        on_event(event)
        if event["type"] == "metrics":
            for report in reports:
                report.take(event)

    try:
        yield handle
    finally:
        for report in reports:
            report.close()


@dataclass
class _Report:
    """One tool, from its first step on, until it fails."""

    tool: ReportTool
    config: "TrainConfig"
    on_event: OnEvent
    writer: Writer | None = None
    is_lost: bool = False

    def take(self, event: Event) -> None:
        if self.is_lost:
            return
        numbers = {name: value for name, value in event.items() if isinstance(value, int | float) and name != "step"}
        try:
            self.writer = self.writer or WRITERS[self.tool](self.config, event["step"])
            self.writer.write(event["step"], numbers)
        except Exception as problem:  # whatever the tool raises
            self._lost(problem)

    def close(self) -> None:
        try:
            if self.writer is not None:
                self.writer.close()
        except Exception as problem:
            self._lost(problem)

    def _lost(self, problem: Exception) -> None:
        self.is_lost = True
        text = f"{self.tool} failed and gets no more metrics of this run: {type(problem).__name__}: {one_line(problem)}"
        self.on_event(message("report_lost", text, level="warn"))


def _wandb_id(out: Path) -> str:
    """The id of the run at wandb, the same for all its starts."""
    path = out / "wandb-id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
