"""The loss of supervised fine-tuning: nats per target, whichever row or microbatch it is in."""

from collections.abc import Sequence

from torch import Tensor

from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row
from fp8serve.train.forward import Logits, collate, summed_loss
from fp8serve.train.methods.interface import FromData, Measure


class Sft(FromData):
    """See `interface.Method`. It does not depend on the initial model."""

    measures: tuple[Measure, ...] = (Measure("train_mean_token_accuracy"),)

    def __init__(self, config: TrainConfig) -> None:
        self.device = config.device

    def weight(self, items: Sequence[Row]) -> int:
        return sum(row.trainable for row in items)

    def sums(self, logits: Logits, items: Sequence[Row]) -> tuple[Tensor, ...]:
        batch = collate(items, self.device)
        return summed_loss(logits(batch), batch.targets)
