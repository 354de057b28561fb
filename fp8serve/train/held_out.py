"""Loss and measures on held-out items, with the scaling state frozen: the numbers the served model would have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8serve.ranks import ALONE, Ranks
from fp8serve.train.data import Item
from fp8serve.train.forward import Forward
from fp8serve.train.methods.interface import Method


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


@torch.no_grad()
def held_out_metrics(
    method: Method[Any], forward: Forward, items: Sequence[Item], batch_size: int, ranks: Ranks = ALONE
) -> dict[str, float]:
    """{"valid_loss", and the measures of `method`}: means over all `items`; one rank computes each batch."""
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    sums = [0.0] * (1 + len(method.measures))
    for found in ranks.each(batches, lambda batch: [float(value) for value in method.sums(forward.logits, batch)]):
        sums = [so_far + more for so_far, more in zip(sums, found, strict=True)]
    weight, names = method.weight(items), ["valid_loss", *(measure.held_out for measure in method.measures)]
    return {name: value / weight for name, value in zip(names, sums, strict=True)}
