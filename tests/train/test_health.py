"""A run reports single steps that go wrong, and says nothing about the others."""

from typing import Any

import pytest

from fp8serve.train.health import FEW_LOSSES, MAX_SPIKES, WINDOW, SpikeDetector
from fp8serve.train.trainer import Trainer

from .conftest import Configure
from .test_resume import DIVERGES

KINDS = ("loss_spike", "loss_risen", "overflow", "underflow", "nonfinite", "scale_jump")


def told(losses: list[float], first: float | None = None) -> list[tuple[int, str]]:
    spikes = SpikeDetector(first)
    found = ((step, spikes.check(step, loss)) for step, loss in enumerate(losses, 1))
    return [(step, event["code"]) for step, event in found if event is not None]


def test_a_spike_is_far_above_the_steps_before() -> None:
    calm = [2.0 + 0.1 * (i % 3) for i in range(WINDOW)]
    assert told([*calm, 2.9, 2.1, 3.2, 2.0]) == [(WINDOW + 3, "loss_spike")]
    assert told([*calm, float("nan"), float("inf"), 2.0]) == []
    assert told(calm, first=9.0) == []  # a loss that falls is none


def test_losses_that_differ_much_need_more() -> None:
    wild = [1.0 + (i * 5 % 7) * 0.5 for i in range(WINDOW)]
    assert told([*wild, 6.5]) == []
    assert told([*wild, 60.0]) == [(WINDOW + 1, "loss_spike")]


def test_few_losses_are_little_to_go_by() -> None:
    assert told([2.0, 4.9, 2.0]) == []
    assert told([2.0, 5.1, 2.0]) == [(2, "loss_spike")]
    assert told([15.0, 15.0], first=2.0) == [(1, "loss_spike"), (2, "loss_spike")]
    assert told([2.0] * FEW_LOSSES + [3.1]) == [(FEW_LOSSES + 1, "loss_spike")]


def test_a_level_that_stays_is_the_usual_one() -> None:
    found = told([2.0] * WINDOW + [12.0] * 40)
    assert [code for _, code in found] == ["loss_spike"] * (MAX_SPIKES - 1) + ["loss_risen"]
    assert found[-1][0] == WINDOW + MAX_SPIKES


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "bf16"])
def test_a_run_without_trouble_says_nothing(configure: Configure, recipe: str) -> None:
    events: list[dict[str, Any]] = []
    Trainer(configure(recipe=recipe, max_steps=20, lr=1e-4)).run(events.append)
    assert [e["message"] for e in events if e.get("code") in KINDS] == []


def test_a_run_that_diverges_says_what_happens(configure: Configure) -> None:
    events: list[dict[str, Any]] = []
    Trainer(configure(**{**DIVERGES, "max_steps": 16}, on_divergence="keep")).run(events.append)
    found = {e["code"]: e for e in reversed(events) if e.get("code") in KINDS}
    assert {"loss_spike", "loss_risen", "overflow", "scale_jump"} <= found.keys()
    assert found["loss_spike"]["step"] == 2
    assert {"step", "tensors", "tensor", "amax", "scale"} <= found["overflow"].keys()
    assert found["overflow"]["tensor"].startswith("model.layers.")
    assert all(e["level"] == "warn" for e in found.values())


@pytest.mark.filterwarnings("ignore:.*evaluated under delayed scaling with scale 1:UserWarning")
def test_gradients_at_scale_1_underflow(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why a run observes its first microbatch before it begins."""
    monkeypatch.setattr("fp8serve.train.trainer.initialize_scales", lambda run: None)
    events: list[dict[str, Any]] = []
    Trainer(configure(max_steps=1, on_divergence="keep")).run(events.append)
    (told_of,) = [e for e in events if e.get("code") == "underflow"]
    assert (told_of["step"], told_of["tensor"].endswith(".grad_output")) == (1, True)
    assert told_of["tensors"] > 1
