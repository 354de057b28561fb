"""A run logs a warning for a step that goes wrong (a loss spike, overflow, underflow), and none for other steps."""

from typing import Any

import pytest

from fp8serve.train.health import FEW_LOSSES, MAX_SPIKES, WINDOW, SpikeDetector
from fp8serve.train.trainer import Trainer

from .conftest import Configure
from .test_resume import DIVERGES

KINDS = ("loss_spike", "loss_risen", "overflow", "underflow", "nonfinite", "scale_jump")


def reported_spikes(losses: list[float], first: float | None = None) -> list[tuple[int, str]]:
    spikes = SpikeDetector(first)
    events = ((step, spikes.check(step, loss)) for step, loss in enumerate(losses, 1))
    return [(step, event["code"]) for step, event in events if event is not None]


def test_a_loss_far_above_the_previous_steps_is_a_spike() -> None:
    calm = [2.0 + 0.1 * (i % 3) for i in range(WINDOW)]
    assert reported_spikes([*calm, 2.9, 2.1, 3.2, 2.0]) == [(WINDOW + 3, "loss_spike")]
    assert reported_spikes([*calm, float("nan"), float("inf"), 2.0]) == []
    assert reported_spikes(calm, first=9.0) == []  # a falling loss is no spike


def test_noisy_losses_need_a_larger_jump_to_be_a_spike() -> None:
    wild = [1.0 + (i * 5 % 7) * 0.5 for i in range(WINDOW)]
    assert reported_spikes([*wild, 6.5]) == []
    assert reported_spikes([*wild, 60.0]) == [(WINDOW + 1, "loss_spike")]


def test_threshold_is_higher_after_few_losses() -> None:
    assert reported_spikes([2.0, 4.9, 2.0]) == []
    assert reported_spikes([2.0, 5.1, 2.0]) == [(2, "loss_spike")]
    assert reported_spikes([15.0, 15.0], first=2.0) == [(1, "loss_spike"), (2, "loss_spike")]
    assert reported_spikes([2.0] * FEW_LOSSES + [3.1]) == [(FEW_LOSSES + 1, "loss_spike")]


def test_a_loss_that_stays_high_is_reported_as_risen_and_becomes_the_new_level() -> None:
    reports = reported_spikes([2.0] * WINDOW + [12.0] * 40)
    assert [code for _, code in reports] == ["loss_spike"] * (MAX_SPIKES - 1) + ["loss_risen"]
    assert reports[-1][0] == WINDOW + MAX_SPIKES


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "bf16"])
def test_a_healthy_run_logs_no_warning(configure: Configure, recipe: str) -> None:
    events: list[dict[str, Any]] = []
    Trainer(configure(recipe=recipe, max_steps=20, lr=1e-4)).run(events.append)
    assert [e["message"] for e in events if e.get("code") in KINDS] == []


def test_a_diverging_run_logs_spikes_overflow_and_scale_jumps(configure: Configure) -> None:
    events: list[dict[str, Any]] = []
    Trainer(configure(**{**DIVERGES, "max_steps": 16}, on_divergence="keep")).run(events.append)
    warnings = {e["code"]: e for e in reversed(events) if e.get("code") in KINDS}
    assert {"loss_spike", "loss_risen", "overflow", "scale_jump"} <= warnings.keys()
    assert warnings["loss_spike"]["step"] == 2
    assert {"step", "tensors", "tensor", "amax", "scale"} <= warnings["overflow"].keys()
    assert warnings["overflow"]["tensor"].startswith("model.layers.")
    assert all(e["level"] == "warn" for e in warnings.values())


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_gradients_underflow_at_scale_1(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is why a run observes the amaxes of its first microbatch before its first step."""
    monkeypatch.setattr("fp8serve.train.trainer.initialize_scales", lambda run: None)
    events: list[dict[str, Any]] = []
    Trainer(configure(max_steps=1, on_divergence="keep")).run(events.append)
    (underflow,) = [e for e in events if e.get("code") == "underflow"]
    assert (underflow["step"], underflow["tensor"].endswith(".grad_output")) == (1, True)
    assert underflow["tensors"] > 1
