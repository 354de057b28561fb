"""Whether a run made its model worse: its first rows, before the first step and after the last.

Single steps are a poor witness, for each sees other rows. So the first microbatch is evaluated once before training and
once at the end. Those rows were trained on: their loss falls. A run has diverged when it is not finite, when it rose by
more than one nat (each token became less than 1/e times as likely), or when no step was taken at all.
"""

import math
from dataclasses import dataclass

RISE = 1.0  # nats per token


@dataclass(frozen=True)
class Outcome:
    """Losses of the first microbatch in nats per target; before is None when it was not measured."""

    before: float | None
    after: float
    steps: int
    skipped: int

    @property
    def problem(self) -> str | None:
        """Why the run has diverged, in words; None when it has not."""
        if self.steps and self.skipped == self.steps:
            return f"the gradients of all {self.steps} steps were not finite, so nothing was learnt"
        if not math.isfinite(self.after):
            return f"the loss of its first rows is {self.after} after the last step"
        if self.before is not None and self.after > self.before + RISE:
            return f"the loss of its first rows rose from {self.before:.2f} to {self.after:.2f}"
        return None
