"""Loss and token accuracy on held-out rows, with the scaling state frozen: the numbers the served model would have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8serve.train.batch import collate
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, summed_loss


@dataclass
class HeldOut:
    """Validation losses of a run in nats per target: before its first step, the lowest since, and the last."""

    first: float | None = None
    best: float | None = None
    best_step: int | None = None
    last: float | None = None
    since_best: int = 0  # validations

    def note(self, loss: float, step: int) -> None:
        """One more validation; a loss that is not finite is none of the best, and is kept as no number."""
        self.last = loss if math.isfinite(loss) else None
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.best_step, self.since_best = loss, step, 0
        else:
            self.since_best += 1


@torch.no_grad()
def held_out_metrics(forward: Forward, rows: Sequence[Row], batch_size: int, device: str) -> dict[str, float]:
    """{"valid_loss" (nats per target), "valid_mean_token_accuracy"} over all targets of `rows`."""
    loss, hits, targets = 0.0, 0, 0
    for start in range(0, len(rows), batch_size):
        batch = collate(rows[start : start + batch_size], device)
        batch_loss, batch_hits = summed_loss(forward.logits(batch), batch.targets)
        loss, hits, targets = loss + float(batch_loss), hits + int(batch_hits), targets + len(batch.targets)
    return {"valid_loss": loss / targets, "valid_mean_token_accuracy": hits / targets}
