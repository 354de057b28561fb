"""Loss and token accuracy on held-out rows, with the scaling state frozen: the numbers the served model would have."""

from collections.abc import Sequence

import torch

from fp8serve.train.batch import collate
from fp8serve.train.data import Row
from fp8serve.train.forward import Forward, summed_loss


@torch.no_grad()
def held_out_metrics(forward: Forward, rows: Sequence[Row], batch_size: int, device: str) -> dict[str, float]:
    """{"valid_loss" (nats per target), "valid_mean_token_accuracy"} over all targets of `rows`."""
    loss, hits, targets = 0.0, 0, 0
    for start in range(0, len(rows), batch_size):
        batch = collate(rows[start : start + batch_size], device)
        batch_loss, batch_hits = summed_loss(forward.logits(batch), batch.targets)
        loss, hits, targets = loss + float(batch_loss), hits + int(batch_hits), targets + len(batch.targets)
    return {"valid_loss": loss / targets, "valid_mean_token_accuracy": hits / targets}
