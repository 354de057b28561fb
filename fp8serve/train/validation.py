"""The losses of a run's model on held-out items and on its first rows, and whether the run made the model worse.

Losses are measured with the scaling state frozen: the numbers the served model would have. Measuring changes nothing.

Single steps cannot tell whether a run diverges, because each sees other rows. So the first microbatch is evaluated once
before training and once at the end. Its rows were trained on, so their loss should fall. A run has diverged when that
loss is not finite, when it rose by more than 1 (in supervised training a nat: each token became less than 1/e times as
likely), or when no step was taken at all. Where rows are held out, a run has failed, too, when its model ends with a
higher loss on them than it began with. A run that may go back (`train.recovery`) is judged in the same way before each
checkpoint, by its first rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8serve.ranks import ALONE, Ranks
from fp8serve.train.data import Cursor, Item, walk
from fp8serve.train.forward import Forward
from fp8serve.train.methods.interface import Method
from fp8serve.train.run import Course

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


@torch.no_grad()
def held_out_metrics(
    method: Method[Any], forward: Forward, items: Sequence[Item], batch_size: int, ranks: Ranks = ALONE
) -> dict[str, float]:
    """{"valid_loss", and the measures of `method`}: means over all `items`; one rank computes each batch."""
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    sums = [0.0] * (1 + len(method.measures))
    for result in ranks.each(batches, lambda batch: [float(value) for value in method.sums(forward.logits, batch)]):
        sums = [so_far + more for so_far, more in zip(sums, result, strict=True)]
    weight, names = method.weight(items), ["valid_loss", *(measure.held_out for measure in method.measures)]
    return {name: value / weight for name, value in zip(names, sums, strict=True)}


def validate_run(course: Course) -> dict[str, float]:
    """See `held_out_metrics`; of the run's held-out items."""
    setup, size = course.setup, course.config.batch_size
    return held_out_metrics(setup.method, setup.forward, setup.eval_items, size, course.ranks)


def first_loss(course: Course) -> float:
    """The mean loss of the first microbatch, with the weights as they are."""
    step, _ = next(walk(course.lengths, course.config, Cursor(), 1))
    items = course.items(step)[0]
    return held_out_metrics(course.setup.method, course.setup.forward, items, len(items))["valid_loss"]


def outcome(course: Course, held_out_after: float | None = None) -> Outcome:
    """Compares the model now with the model before the run."""
    progress = course.progress
    return Outcome(
        before=progress.first_loss,
        after=first_loss(course),
        steps=progress.step,
        skipped=progress.skipped,
        held_out_before=progress.held_out.first,
        held_out_after=held_out_after,
    )
