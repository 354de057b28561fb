"""Metrics for TensorBoard and Weights & Biases: the values that the tools get; a failing tool does not end a run."""

import math
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp8serve.errors import MachineError
from fp8serve.train.events import reporting_to_tools
from fp8serve.train.trainer import Trainer

from .conftest import Configure
from .test_resume import every_file
from .test_trainer import after

Calls = list[tuple[Any, ...]]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins for both packages, which are large. Returns the list of the calls that they get."""
    calls: Calls = []

    class SummaryWriter:
        def __init__(self, place: str, purge_step: int) -> None:
            calls.append(("board", Path(place).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            calls.append(("closed",))

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append(("log", values, step))

        def finish(self) -> None:
            calls.append(("finish",))

    def init(**about: Any) -> Run:
        calls.append(("init", about))
        return Run()

    for name, content in {"torch.utils.tensorboard": {"SummaryWriter": SummaryWriter}, "wandb": {"init": init}}.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("fp8serve.train.events.find_spec", lambda name: name)
    return calls


def test_tensorboard_gets_every_number_of_every_step(configure: Configure, tools: Calls) -> None:
    Trainer(configure(max_steps=2, report_to=["tensorboard", "tensorboard"])).run()
    assert [call for call in tools if call[0] == "board"] == [("board", "tensorboard", 1)]
    losses = [(step, value) for name, value, step in tools[1:-1] if name == "train_loss"]
    assert [step for step, _ in losses] == [1, 2]
    assert all(math.isfinite(value) for _, value in losses)
    assert {"learning_rate", "grad_norm"} <= {call[0] for call in tools}
    assert "message" not in {call[0] for call in tools}
    assert tools[-1] == ("closed",)


def test_a_resumed_run_continues_its_wandb_run(configure: Configure, tools: Calls) -> None:
    config = configure(max_steps=4, save_every=2, report_to=["wandb"])
    Trainer(config).run(stop=after(2))
    Trainer(config).run()
    runs = [call[1] for call in tools if call[0] == "init"]
    assert len(runs) == 2
    assert runs[0] == runs[1]
    assert (runs[0]["project"], runs[0]["resume"], runs[0]["config"]["lr"]) == ("fp8serve", "allow", 1e-3)
    assert [call[2] for call in tools if call[0] == "log"] == [1, 2, 3, 4]
    assert [call[0] for call in tools].count("finish") == 2


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_failing_tool_is_dropped_and_changes_no_byte_of_the_run(
    broken: str, configure: Configure, tools: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise ConnectionError("There is no\nserver.")

    if broken == "init":
        monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    else:
        monkeypatch.setattr(type(sys.modules["wandb"].init()), broken, fail)
    events: list[dict[str, Any]] = []
    options: dict[str, Any] = {"max_steps": 3, "template_date": "2026-01-31"}
    result = Trainer(configure(**options, out=str(tmp_path / "reported"), report_to=["wandb"])).run(events.append)
    plain = Trainer(configure(**options, out=str(tmp_path / "plain"))).run()
    lost_reports = [event for event in events if event.get("code") == "report_lost"]
    assert [event["message"] for event in lost_reports] == [
        "wandb failed and gets no more metrics of this run: ConnectionError: There is no server"
    ]
    assert [event["step"] for event in events if event["type"] == "metrics"] == [1, 2, 3]
    assert every_file(Path(result.model or "")) == every_file(Path(plain.model or ""))


@pytest.mark.parametrize("tool", ["tensorboard", "wandb"])
def test_a_missing_package_is_reported_before_the_run_starts(
    tool: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8serve.train.events.find_spec", lambda name: None)
    config = configure(report_to=[tool])
    with pytest.raises(MachineError, match=rf"pip install 'fp8serve\[{tool}\]'"):
        Trainer(config).run()
    assert not Path(config.out).exists()


def test_without_tools_events_go_straight_to_the_callback(configure: Configure) -> None:
    events: list[dict[str, Any]] = []
    with reporting_to_tools(configure(), events.append) as report:
        report({"type": "metrics", "step": 1})
    assert events == [{"type": "metrics", "step": 1}]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_the_written_metrics(configure: Configure) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = configure(max_steps=4, save_every=2, report_to=["tensorboard"])
    Trainer(config).run(stop=after(2))
    result = Trainer(config).run()
    board = EventAccumulator(str(Path(config.out) / "tensorboard"))
    board.Reload()
    losses = board.Scalars("train_loss")
    assert [point.step for point in losses] == [1, 2, 3, 4]
    assert losses[-1].value == pytest.approx(result.metrics["train_loss"])
