"""Where a run stands, and what the parts of the loop share.

`Progress` is everything that a checkpoint records besides tensors. `Course` is what the parts of a run work on: a step
(`train.train_step`), validation, checkpoints (`train.checkpointing`), and going back (`train.recovery`).
`train.trainer` calls them in order.
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
class HeldOut:
    """Validation losses of a run: before its first step, the lowest since, and the last."""

    first: float | None = None
    best: float | None = None
    best_step: int | None = None
    last: float | None = None
    since_best: int = 0  # validations

    def note(self, loss: float, step: int) -> None:
        """Records a validation; a loss that is not finite is never the best, and is kept as None."""
        self.last = loss if math.isfinite(loss) else None
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.best_step, self.since_best = loss, step, 0
        else:
            self.since_best += 1


@dataclass
class Progress:
    """Where a run stands between two steps; all of it is in the checkpoint. returns: how often it went back."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    trained_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    total_steps: int | None = None
    first_loss: float | None = None
    held_out: HeldOut = field(default_factory=HeldOut)
    metrics: dict[str, Any] = field(default_factory=dict)
    returns: int = 0


@dataclass
class Course:
    """A run on its way.

    job: the job's own configuration. config: the one that is in effect, after `progress.returns` returns. identity:
    see `identity_of`.
    """

    job: TrainConfig
    config: TrainConfig
    ranks: Ranks
    on_event: OnEvent
    setup: "Setup"
    identity: dict[str, Any]
    progress: Progress

    @property
    def out(self) -> Path:
        return Path(self.job.out)

    @property
    def may_go_back(self) -> bool:
        return self.job.on_divergence == "return"

    @property
    def save_every(self) -> int:
        """The run may go back to the checkpoints of the multiples of this step."""
        return self.job.save_every or 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item."""
        return [item.tokens for item in self.setup.items]

    def items(self, step: Step) -> list[list[Item]]:
        """The items of every microbatch of a step."""
        return [[self.setup.items[i] for i in items] for items in step]

    def due(self, every: int | None) -> bool:
        """Whether something that is done every so many steps is to be done now."""
        return every is not None and self.progress.step % every == 0
