"""Reports problems in single steps as events: loss spikes, and tensors that do not fit their FP8 scale.

    loss_spike   the loss of a step is far above the median of the sixteen losses before it
    loss_risen   the losses of eight steps in a row were spikes; they then count as usual losses
    overflow     the amax of a tensor exceeded the FP8 range by more than a factor of four, so values saturated
    underflow    more than half of the nonzero values of a tensor became zero
    nonfinite    a tensor contained an infinity or NaN, which its amax history ignores
    scale_jump   a scale changed by a factor of eight or more since the step before

No event changes the run. Under delayed scaling, scales lag behind a little, which is not reported. A tensor is
named once for each kind, and again after each restart of the run. A `Monitor` reads the scales in one transfer a
step, and counts values in every sixteenth step. A loss counts as a spike only if it is also far above the usual
spread of the losses, because every step has other rows.
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Literal

from fp8serve.fp8.monitor import Monitor, Reading
from fp8serve.fp8.stateful import Stateful
from fp8serve.train.events import Event, OnEvent, message
from fp8serve.train.forward import Forward
from fp8serve.train.run import MAX_LOSS_RISE

WINDOW = 16  # losses from which the limit for spikes follows
FEW_LOSSES = 8  # with fewer losses, a spike must rise by three times as much
MAX_SPIKES = 8  # spikes in a row that are reported as loss_risen
SPIKE_SPREADS = 6.0  # median absolute deviations by which a spike exceeds the median
OVERFLOW_BITS = 2.0
SCALE_JUMP = 8.0

Kind = Literal["overflow", "underflow", "nonfinite", "scale_jump"]
_DESCRIPTIONS: dict[Kind, str] = {
    "overflow": "overflow, values more than four times beyond the FP8 range",
    "underflow": "underflow, most nonzero values became zero",
    "nonfinite": "infinities or NaN",
    "scale_jump": f"a scale that changed by a factor of {SCALE_JUMP:g} or more",
}


class Health:
    """Watches a run. The caller must call `step` after each step, and `close` at the end of the run."""

    def __init__(self, forward: Forward, on_event: OnEvent, first_loss: float | None) -> None:
        self._monitor = Monitor(forward.network, log=False)
        self._on_event = on_event
        self._spikes = SpikeDetector(first_loss)
        self._scales: dict[tuple[str, str], float] = {}
        self._nonfinite_counts = {
            (name, tensor): int(state.nonfinite)
            for name, module in forward.network.named_modules()
            if isinstance(module, Stateful)
            for tensor, state in module.scaling.items()
        }
        self._reported: set[tuple[Kind, str, str]] = set()

    def step(self, step: int, loss: float) -> None:
        """Reports problems of step `step`, which has just been taken, with its loss."""
        if (event := self._spikes.check(step, loss)) is not None:
            self._on_event(event)
        readings = self._monitor.step()
        problems: dict[Kind, list[Reading]] = {
            "overflow": [r for r in readings if r.headroom < -OVERFLOW_BITS],
            "underflow": [r for r in readings if "underflow" in r.troubles],
            "nonfinite": [r for r in readings if r.nonfinite > self._nonfinite_counts.get((r.layer, r.tensor), 0)],
            "scale_jump": [r for r in readings if self._has_jumped(r)],
        }
        self._scales |= {(r.layer, r.tensor): r.scale for r in readings}
        self._nonfinite_counts |= {(r.layer, r.tensor): r.nonfinite for r in readings}
        for kind, affected in problems.items():
            self._report(step, kind, affected)

    def close(self) -> None:
        self._monitor.close()

    def _has_jumped(self, reading: Reading) -> bool:
        previous = self._scales.get((reading.layer, reading.tensor), reading.scale)
        return (
            previous > 0 and not 1 / SCALE_JUMP < reading.scale / previous < SCALE_JUMP and math.isfinite(reading.scale)
        )

    def _report(self, step: int, kind: Kind, readings: Iterable[Reading]) -> None:
        new = [r for r in readings if (kind, r.layer, r.tensor) not in self._reported]
        if not new:
            return
        self._reported |= {(kind, r.layer, r.tensor) for r in new}
        worst = min(new, key=lambda r: r.headroom)
        name = f"{worst.layer.removeprefix('decoder.')}.{worst.tensor}"
        tensors = name if len(new) == 1 else f"{len(new)} tensors, the worst is {name}"
        text = f"Step {step}: {_DESCRIPTIONS[kind]}: {tensors} (amax {worst.amax:.3g}, scale {worst.scale:.3g})"
        numbers = {"amax": _finite(worst.amax), "scale": _finite(worst.scale)}
        self._on_event(message(kind, text, level="warn", step=step, tensors=len(new), tensor=name, **numbers))


class SpikeDetector:
    """Compares the loss of each step with the losses before it. `first_loss` is that of the first rows before the first
    step, or None."""

    def __init__(self, first_loss: float | None) -> None:
        self._usual_losses: deque[float] = deque([] if first_loss is None else [first_loss], maxlen=WINDOW)
        self._spikes: list[float] = []

    def check(self, step: int, loss: float) -> Event | None:
        """Returns an event if the loss of this step is a spike. Ignores losses that are not finite, which the trainer
        reports as skipped steps."""
        if not math.isfinite(loss):
            return None
        if not self._usual_losses or loss <= (limit := self._limit()):
            self._usual_losses.append(loss)
            self._spikes.clear()
            return None
        usual = median(self._usual_losses)
        self._spikes.append(loss)
        numbers = {"step": step, "loss": loss, "usual": usual}
        if len(self._spikes) < MAX_SPIKES:
            text = f"Step {step}: the training loss is {loss:.4f}; the median of the steps before is {usual:.4f}"
            return message("loss_spike", text, level="warn", **numbers)
        self._usual_losses = deque(self._spikes, maxlen=WINDOW)
        self._spikes = []
        text = f"The training loss was above {limit:.4f} for {MAX_SPIKES} steps up to step {step}: the run may diverge"
        return message("loss_risen", text, level="warn", **numbers)

    def _limit(self) -> float:
        usual = median(self._usual_losses)
        spread = median(abs(loss - usual) for loss in self._usual_losses)
        min_rise = MAX_LOSS_RISE if len(self._usual_losses) >= FEW_LOSSES else 3 * MAX_LOSS_RISE
        return usual + max(min_rise, SPIKE_SPREADS * spread)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
