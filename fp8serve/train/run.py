"""The progress of a training run, the state that the modules of the training loop share, and the losses that judge it.

A checkpoint records `Progress` besides its tensors. `TrainingRun` is the argument of steps (`train.train_step`)
and checkpointing. `train.trainer` calls these modules in order.

Evaluation freezes the scaling state, so its losses are those of the served model. It does not change the run.

The losses of single steps cannot show a divergence, because each step has other rows. The trainer therefore evaluates
the first microbatch before the first step and at the end. The run trains on these rows, so their loss should fall. A
run has diverged if that loss is not finite, if it rose by more than 1, or if all steps were skipped. (In supervised
training 1 is a nat: each token became less than 1/e times as likely.) A run has also failed if its final validation
loss is higher than its initial one. With on_divergence="return" (`train.checkpointing`), the first rows are evaluated
before each checkpoint, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fp8serve.ranks import ALONE, Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Cursor, Item, Step, iterate_steps
from fp8serve.train.events import OnEvent
from fp8serve.train.forward import Forward
from fp8serve.train.methods.interface import Method

if TYPE_CHECKING:
    from fp8serve.train.setup import Setup


@dataclass
class ValidationLosses:
    """The validation losses of a run: the one before the first step, the lowest one since then, and the last one."""

    first: float | None = None
    best: float | None = None
    best_step: int | None = None
    last: float | None = None
    since_best: int = 0  # validations since the lowest loss

    def record(self, loss: float, step: int) -> None:
        """Records the loss of a validation. A loss that is not finite is recorded as None and is never the lowest."""
        self.last = loss if math.isfinite(loss) else None
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.best_step, self.since_best = loss, step, 0
        else:
            self.since_best += 1


@dataclass
class Progress:
    """The progress of a run between two steps, as checkpoints store it. `returns` counts the returns to an earlier
    checkpoint after a divergence."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    trained_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    total_steps: int | None = None
    first_loss: float | None = None
    held_out: ValidationLosses = field(default_factory=ValidationLosses)
    metrics: dict[str, Any] = field(default_factory=dict)
    returns: int = 0


@dataclass
class TrainingRun:
    """A run in progress.

    `job_config` is the job's configuration. `config` is the one in effect, which recovery may have changed.
    `identity` is the result of `checkpointing.identity_of`.
    """

    job_config: TrainConfig
    config: TrainConfig
    ranks: Ranks
    on_event: OnEvent
    setup: "Setup"
    identity: dict[str, Any]
    progress: Progress

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    @property
    def may_recover(self) -> bool:
        """Whether a divergence sends the run back to an earlier checkpoint."""
        return self.job_config.on_divergence == "return"

    @property
    def save_every(self) -> int:
        """Recovery goes back to checkpoints of steps that are multiples of this number."""
        return self.job_config.save_every or 1

    @property
    def lengths(self) -> list[int]:
        return [item.tokens for item in self.setup.items]

    def microbatches(self, step: Step) -> list[list[Item]]:
        return [[self.setup.items[i] for i in microbatch] for microbatch in step]

    def is_due(self, every: int | None) -> bool:
        """Whether an action that runs every `every` steps is due after the current step; never if `every` is None."""
        return every is not None and self.progress.step % every == 0


MAX_LOSS_RISE = 1.0


class DivergenceError(Exception):
    """Tells the trainer to return to the last good checkpoint, for the reason in the message. Callers never see it."""


@dataclass(frozen=True)
class Outcome:
    """The losses of a run, from which `failure` follows. `initial_loss` and `final_loss` are means over the first
    microbatch; a loss that was not evaluated is None."""

    initial_loss: float | None
    final_loss: float
    steps: int
    skipped: int
    initial_valid_loss: float | None = None
    final_valid_loss: float | None = None

    @property
    def failure(self) -> str | None:
        """The reason why the run has failed, or None."""
        if self.steps and self.skipped == self.steps:
            return f"Training diverged: the gradients of all {self.steps} steps were not finite, so nothing was learnt"
        if (divergence := self.divergence) is not None:
            return divergence
        initial, final = self.initial_valid_loss, self.final_valid_loss
        if initial is not None and final is not None and final > initial:
            return f"Training made the model worse: its validation loss rose from {initial:.4f} to {final:.4f}"
        return None

    @property
    def divergence(self) -> str | None:
        """The reason why the current weights count as diverged, or None."""
        initial, final = self.initial_loss, self.final_loss
        if not math.isfinite(final):
            return f"Training diverged: the loss of its first rows is {final} after step {self.steps}"
        if initial is not None and final > initial + MAX_LOSS_RISE:
            return f"Training diverged: the loss of its first rows rose from {initial:.2f} to {final:.2f}"
        return None


@torch.no_grad()
def evaluate(
    method: Method[Any], forward: Forward, items: Sequence[Item], batch_size: int, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Returns {"valid_loss", and the metrics of `method`} as means over `items`. The ranks share the batches."""
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    sums = [0.0] * (1 + len(method.metrics))
    for batch_sums in ranks.map(batches, lambda batch: [float(s) for s in method.compute_sums(forward.logits, batch)]):
        sums = [total + value for total, value in zip(sums, batch_sums, strict=True)]
    terms, names = method.count_loss_terms(items), ["valid_loss", *(m.validation_name for m in method.metrics)]
    return {name: value / terms for name, value in zip(names, sums, strict=True)}


def evaluate_run(run: TrainingRun) -> dict[str, float]:
    """Returns `evaluate` on the run's validation data."""
    return evaluate(run.setup.method, run.setup.forward, run.setup.eval_items, run.config.batch_size, run.ranks)


def first_rows_loss(run: TrainingRun) -> float:
    """Returns the mean loss of the first microbatch with the current weights."""
    step, _ = next(iterate_steps(run.lengths, run.config, Cursor(), 1))
    items = run.microbatches(step)[0]
    return evaluate(run.setup.method, run.setup.forward, items, len(items))["valid_loss"]


def outcome_of(run: TrainingRun, final_valid_loss: float | None = None) -> Outcome:
    """Compares the current model with the initial model."""
    progress = run.progress
    return Outcome(
        initial_loss=progress.first_loss,
        final_loss=first_rows_loss(run),
        steps=progress.step,
        skipped=progress.skipped,
        initial_valid_loss=progress.held_out.first,
        final_valid_loss=final_valid_loss,
    )


def check_divergence(run: TrainingRun) -> None:
    """Raises DivergenceError on all ranks if a run that may recover has diverged."""
    divergences = run.ranks.gather(outcome_of(run).divergence) if run.may_recover else []
    if (reason := next(filter(None, divergences), None)) is not None:
        raise DivergenceError(reason)
