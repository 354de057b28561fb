"""Whether a run made its model worse: its first rows, before the first step and after the last.

Single steps cannot tell, because each sees other rows. So the first microbatch is evaluated once before training and
once at the end. Its rows were trained on, so their loss should fall. A run has diverged when that loss is not finite,
when it rose by more than 1 (in supervised training a nat: each token became less than 1/e times as likely), or when no
step was taken at all. Where rows are held out, a run has failed, too, when its model ends with a higher loss on them
than it began with. A run that may go back (`train.fallback`) is judged in the same way before each checkpoint, by its
first rows.
"""

import math
from dataclasses import dataclass

RISE = 1.0


class DivergenceError(Exception):
    """A run must go back to its last good checkpoint; the message says why. Never leaves the trainer."""


@dataclass(frozen=True)
class Outcome:
    """Mean losses of the first microbatch; before is None when it was not measured."""

    before: float | None
    after: float
    steps: int
    skipped: int
    held_out_before: float | None = None
    held_out_after: float | None = None

    @property
    def problem(self) -> str | None:
        """Why the run has failed, in words; None when it has not."""
        if self.steps and self.skipped == self.steps:
            return f"Training diverged: the gradients of all {self.steps} steps were not finite, so nothing was learnt"
        if (why := self.divergence) is not None:
            return why
        before, after = self.held_out_before, self.held_out_after
        if before is not None and after is not None and after > before:
            return f"Training made the model worse: its loss on held-out rows rose from {before:.4f} to {after:.4f}"
        return None

    @property
    def divergence(self) -> str | None:
        """Why the model, as it is now, has diverged, in words; None when it has not."""
        if not math.isfinite(self.after):
            return f"Training diverged: the loss of its first rows is {self.after} after step {self.steps}"
        if self.before is not None and self.after > self.before + RISE:
            return f"Training diverged: the loss of its first rows rose from {self.before:.2f} to {self.after:.2f}"
        return None
