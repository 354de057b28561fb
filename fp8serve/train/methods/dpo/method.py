"""Preference optimisation as the trainer uses it.

The reference is the model before its first step, computed as this run computes: its log-probabilities of both answers
are computed once, held with the pairs, and written into every checkpoint, 8 bytes a pair. No second model is in memory
while a run trains. For an adapter the reference is the base alone, because a new adapter changes nothing. Under a
recipe whose rows are independent, all margins are exactly 0 before the first step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fp8serve.errors import JobError
from fp8serve.ranks import Ranks
from fp8serve.train.batch import collate
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import fingerprint
from fp8serve.train.forward import Forward, Logits
from fp8serve.train.methods.dpo.loss import answer_scores, pair_losses
from fp8serve.train.methods.dpo.reader import Pair
from fp8serve.train.methods.interface import FromData, Measure
from fp8serve.train.methods.options import SIMPO_GAMMA, beta_of, pair_loss
from fp8serve.train.target_log_probs import target_log_probs


class Dpo(FromData):
    """See `interface.Method`. The measures have TRL's names; rewards are beta times what the loss compares."""

    measures: tuple[Measure, ...] = (
        Measure("rewards/chosen"),
        Measure("rewards/rejected"),
        Measure("rewards/accuracies", "reward accuracy"),
        Measure("rewards/margins", "margin"),
        Measure("logps/chosen"),
        Measure("logps/rejected"),
    )

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.beta, self.loss_type = beta_of(config), pair_loss(config)
        self.gamma = SIMPO_GAMMA if config.simpo_gamma is None else config.simpo_gamma
        self.reference_free = config.reference_free or self.loss_type == "simpo"

    def weight(self, items: Sequence[Pair]) -> int:
        return len(items)

    def sums(self, logits: Logits, items: Sequence[Pair]) -> tuple[Tensor, ...]:
        found = self._scores(logits, items)
        scores = found - self._reference(items, found)
        config, (chosen, rejected) = self.config, (self.beta * scores.detach()).unbind(1)
        losses = pair_losses(scores[:, 0] - scores[:, 1], self.beta, self.loss_type, config.label_smoothing, self.gamma)
        means = chosen, rejected, (chosen > rejected).float(), chosen - rejected, *found.detach().unbind(1)
        return losses.sum(), *(each.sum() for each in means)

    def _scores(self, logits: Logits, items: Sequence[Pair]) -> Tensor:
        """FP32 [n, 2] of the policy."""
        batch = collate([row for pair in items for row in pair.rows], self.config.device)
        log_probs = target_log_probs(logits(batch), batch.targets)
        lengths = [(pair.chosen.trainable, pair.rejected.trainable) for pair in items]
        return answer_scores(log_probs, lengths, self.loss_type, self.config.ld_alpha)

    def _reference(self, items: Sequence[Pair], found: Tensor) -> Tensor:
        """The reference [n, 2]. Until it is known, the policy is its own reference, because it has not changed yet."""
        if self.reference_free:
            return torch.zeros_like(found)
        known = [pair.reference for pair in items if pair.reference is not None]
        return torch.tensor(known, device=found.device) if len(known) == len(items) else found.detach()

    def begin(self, forward: Forward, items: Sequence[Pair], ranks: Ranks) -> list[Pair]:
        return list(items) if self.reference_free else _with_reference(items, self._before(forward, items, ranks))

    @torch.no_grad()
    def _before(self, forward: Forward, items: Sequence[Pair], ranks: Ranks) -> list[list[float]]:
        size = self.config.batch_size
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        found = ranks.each(parts, lambda part: self._scores(forward.logits, part).tolist())
        return [scores for part in found for scores in part]

    def keep(self, items: Sequence[Pair]) -> dict[str, Tensor]:
        known = [pair.reference for pair in items if pair.reference is not None]
        return {"reference": torch.tensor(known), "pairs": _digest(items)} if known else {}

    def recall(self, items: Sequence[Pair], kept: Mapping[str, Tensor]) -> list[Pair]:
        if self.reference_free or not items:
            return list(items)
        if not kept or not torch.equal(kept["pairs"], _digest(items)):
            raise JobError(
                "The checkpoint holds a reference for other pairs than the data hold, and the model that the run began "
                "with is gone; give the same data and eval_data as before, leave eval_data out, or use another output "
                "directory."
            )
        return _with_reference(items, kept["reference"].tolist())


def _digest(items: Sequence[Pair]) -> Tensor:
    """The digest that identifies these pairs: uint8 [32]."""
    return torch.frombuffer(bytearray.fromhex(fingerprint(items)), dtype=torch.uint8)


def _with_reference(items: Sequence[Pair], found: Sequence[Sequence[float]]) -> list[Pair]:
    """The pairs with their references; FP32 numbers are held as Python floats, which represent them exactly."""
    return [replace(pair, reference=(scores[0], scores[1])) for pair, scores in zip(items, found, strict=True)]
