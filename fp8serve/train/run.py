"""The progress of a training run, and the state that the modules of the training loop share.

A checkpoint records `Progress` besides its tensors. `TrainingRun` is the argument of steps (`train.train_step`),
validation, checkpointing and recovery. `train.trainer` calls these modules in order.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8serve.ranks import Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Cursor, Item, Step
from fp8serve.train.events import OnEvent

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
        """The tokens of each item."""
        return [item.tokens for item in self.setup.items]

    def microbatches(self, step: Step) -> list[list[Item]]:
        """Returns the items of each microbatch of a step."""
        return [[self.setup.items[i] for i in microbatch] for microbatch in step]

    def is_due(self, every: int | None) -> bool:
        """Whether an action that runs every `every` steps is due after the current step; never if `every` is None."""
        return every is not None and self.progress.step % every == 0
