"""Reports trouble in single steps as events: sudden high losses, and tensors that do not fit their FP8 scale.

    loss_spike   the loss of a step is far above the median of the sixteen before it
    loss_risen   the losses of eight steps in a row were: from then on such losses count as usual
    overflow     a tensor was more than four times as large as its scale has room for, and was cut off
    underflow    more than half of the values of a tensor that are not zero became zero
    nonfinite    a tensor held an infinity or NaN, which its history ignores
    scale_jump   a scale is eight times as large as at the step before, or an eighth of it

No event changes the run. What is normal is not reported: under delayed scaling, scales lag behind a little. A tensor is
named once for each kind, and once more after each restart of the run. The figures of scales come from a `Monitor`,
which reads them in one transfer a step and counts values in every sixteenth step. A spike must also be far above the
usual spread of the losses, because every step has other rows.
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
from fp8serve.train.validation import RISE

WINDOW = 16  # losses
FEW = 8  # with fewer, a spike has to be three times as high
RISEN = 8  # spikes in a row
SPREADS = 6.0
OVERFLOW_BITS = 2.0
JUMP = 8.0

Kind = Literal["overflow", "underflow", "nonfinite", "scale_jump"]
_WORDS: dict[Kind, str] = {
    "overflow": "overflow, more than four times what the FP8 scale has room for",
    "underflow": "underflow, most values that are not zero became zero",
    "nonfinite": "infinities or NaN",
    "scale_jump": f"a scale {JUMP:g} times finer or coarser than a step before",
}


class Health:
    """Watches a run: call `step` after each of its steps, and `close` at its end. first_loss: see `Spikes`."""

    def __init__(self, forward: Forward, on_event: OnEvent, first_loss: float | None) -> None:
        self._monitor = Monitor(forward.network, log=False)
        self._on_event = on_event
        self._spikes = Spikes(first_loss)
        self._scales: dict[tuple[str, str], float] = {}
        self._dropped = {
            (name, tensor): int(state.nonfinite)
            for name, module in forward.network.named_modules()
            if isinstance(module, Stateful)
            for tensor, state in module.scaling.items()
        }
        self._reported: set[tuple[Kind, str, str]] = set()

    def step(self, step: int, loss: float) -> None:
        """The loss of step `step`, and the scales of all tensors as it left them."""
        if (reported := self._spikes.of(step, loss)) is not None:
            self._on_event(reported)
        readings = self._monitor.step()
        results: dict[Kind, list[Reading]] = {
            "overflow": [r for r in readings if r.headroom < -OVERFLOW_BITS],
            "underflow": [r for r in readings if "underflow" in r.troubles],
            "nonfinite": [r for r in readings if r.nonfinite > self._dropped.get((r.layer, r.tensor), 0)],
            "scale_jump": [r for r in readings if self._has_jumped(r)],
        }
        self._scales |= {(r.layer, r.tensor): r.scale for r in readings}
        self._dropped |= {(r.layer, r.tensor): r.nonfinite for r in readings}
        for kind, some in results.items():
            self._report(step, kind, some)

    def close(self) -> None:
        self._monitor.close()

    def _has_jumped(self, reading: Reading) -> bool:
        before = self._scales.get((reading.layer, reading.tensor), reading.scale)
        return before > 0 and not 1 / JUMP < reading.scale / before < JUMP and math.isfinite(reading.scale)

    def _report(self, step: int, kind: Kind, readings: Iterable[Reading]) -> None:
        new = [r for r in readings if (kind, r.layer, r.tensor) not in self._reported]
        if not new:
            return
        self._reported |= {(kind, r.layer, r.tensor) for r in new}
        worst = min(new, key=lambda r: r.headroom)
        name = f"{worst.layer.removeprefix('decoder.')}.{worst.tensor}"
        where = name if len(new) == 1 else f"{len(new)} tensors, above all {name}"
        text = f"Step {step}: {_WORDS[kind]}: {where} (amax {worst.amax:.3g}, scale {worst.scale:.3g})"
        numbers = {"amax": _finite(worst.amax), "scale": _finite(worst.scale)}
        self._on_event(message(kind, text, level="warn", step=step, tensors=len(new), tensor=name, **numbers))


class Spikes:
    """Compares the loss of each step with those before it. first: the loss of the first rows before the first step."""

    def __init__(self, first: float | None) -> None:
        self._usual: deque[float] = deque([] if first is None else [first], maxlen=WINDOW)
        self._high: list[float] = []

    def of(self, step: int, loss: float) -> Event | None:
        """The event for the loss of this step, if any; a loss that is not finite is reported elsewhere."""
        if not math.isfinite(loss):
            return None
        if not self._usual or loss <= (limit := self._limit()):
            self._usual.append(loss)
            self._high.clear()
            return None
        usual = median(self._usual)
        self._high.append(loss)
        numbers = {"step": step, "loss": loss, "usual": usual}
        if len(self._high) < RISEN:
            text = f"Step {step}: the training loss is {loss:.4f}; the median of the steps before is {usual:.4f}"
            return message("loss_spike", text, level="warn", **numbers)
        self._usual = deque(self._high, maxlen=WINDOW)
        self._high = []
        text = f"The training loss was above {limit:.4f} for {RISEN} steps, up to step {step}: the run may be diverging"
        return message("loss_risen", text, level="warn", **numbers)

    def _limit(self) -> float:
        usual = median(self._usual)
        spread = median(abs(loss - usual) for loss in self._usual)
        return usual + max(RISE if len(self._usual) >= FEW else 3 * RISE, SPREADS * spread)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
