"""Preference optimisation as the trainer uses it, and the losses of pairs, as published, from log-probabilities.

For an answer y to x, with policy p and reference q (none: reference-free), r(y) = log p(y|x) - log q(y|x), in nats: a
sum over the answer's tokens, or their mean if the loss is normalised by length. With d = r(chosen) - r(rejected):

    sigmoid        -log s(b d), sums                    Rafailov et al. 2023, eq. 7; smoothed: Mitchell's cDPO
    sigmoid_norm   -log s(b d), means                   Lambert et al. 2024 (Tulu 3), section 5.1.2
    ipo            (d - 1 / 2b)^2, means                Azar et al. 2024, eq. 17; means, as its authors have it
    simpo          -log s(b d - g), means, no reference Meng et al. 2024, eq. 6

s is the logistic function, b is beta, g is gamma. Label smoothing e takes (1 - e) of a loss and e of that of the
reversed pair: the labels are wrong with probability e. LD-DPO (Liu et al. 2024) multiplies the log-probabilities of the
tokens of the longer answer beyond the length of the shorter one by `ld_alpha`.

The reference is the model before its first step, computed as this run computes: its log-probabilities of both answers
are computed once, held with the pairs, and written into every checkpoint, 8 bytes a pair. No second model is in memory
while a run trains. For an adapter the reference is the base alone, because a new adapter changes nothing. Under a
recipe whose rows are independent, all margins are exactly 0 before the first step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fp8serve.errors import JobError
from fp8serve.ranks import Ranks
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import fingerprint
from fp8serve.train.forward import Forward, Logits, collate, target_log_probs
from fp8serve.train.methods.dpo.data import Pair
from fp8serve.train.methods.interface import FromData, Measure
from fp8serve.train.methods.options import SIMPO_GAMMA, PairLoss

BY_LENGTH = ("sigmoid_norm", "ipo", "simpo")


def answer_scores(
    log_probs: Tensor, lengths: Sequence[tuple[int, int]], loss_type: PairLoss, ld_alpha: float | None
) -> Tensor:
    """FP32 [n, 2]: the score of each answer in the loss, from the log-probabilities of all learnt tokens.

    log_probs: FP32 [P], pair by pair, chosen first. lengths: tokens of both answers of each pair. An answer's number
    depends on its own tokens only, and with `ld_alpha` on the length of the other.
    """
    answers = torch.split(log_probs, [length for pair in lengths for length in pair])
    shared = [min(pair) for pair in lengths for _ in pair]
    scores = [_score(answer, n, loss_type, ld_alpha) for answer, n in zip(answers, shared, strict=True)]
    return torch.stack(scores).view(-1, 2)


def _score(answer: Tensor, shared: int, loss_type: PairLoss, ld_alpha: float | None) -> Tensor:
    if ld_alpha is not None:
        return answer[:shared].sum() + ld_alpha * answer[shared:].sum()
    return answer.sum() / (len(answer) if loss_type in BY_LENGTH else 1)


def pair_losses(margins: Tensor, beta: float, loss_type: PairLoss, label_smoothing: float, gamma: float) -> Tensor:
    """The loss of each pair, from d [n], the difference of its answers' scores."""
    if loss_type == "ipo":
        return (margins - 1 / (2 * beta)).square()
    expected = beta * margins - (gamma if loss_type == "simpo" else 0.0)
    return -(1 - label_smoothing) * logsigmoid(expected) - label_smoothing * logsigmoid(-expected)


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
        self.beta, self.loss_type = config.effective_beta, config.pair_loss
        self.gamma = SIMPO_GAMMA if config.simpo_gamma is None else config.simpo_gamma
        self.reference_free = config.reference_free or self.loss_type == "simpo"

    def weight(self, items: Sequence[Pair]) -> int:
        return len(items)

    def sums(self, logits: Logits, items: Sequence[Pair]) -> tuple[Tensor, ...]:
        result = self._scores(logits, items)
        scores = result - self._reference(items, result)
        config, (chosen, rejected) = self.config, (self.beta * scores.detach()).unbind(1)
        losses = pair_losses(scores[:, 0] - scores[:, 1], self.beta, self.loss_type, config.label_smoothing, self.gamma)
        means = chosen, rejected, (chosen > rejected).float(), chosen - rejected, *result.detach().unbind(1)
        return losses.sum(), *(each.sum() for each in means)

    def _scores(self, logits: Logits, items: Sequence[Pair]) -> Tensor:
        """FP32 [n, 2] of the policy."""
        batch = collate([row for pair in items for row in pair.rows], self.config.device)
        log_probs = target_log_probs(logits(batch), batch.targets)
        lengths = [(pair.chosen.trainable, pair.rejected.trainable) for pair in items]
        return answer_scores(log_probs, lengths, self.loss_type, self.config.ld_alpha)

    def _reference(self, items: Sequence[Pair], scores: Tensor) -> Tensor:
        """The reference [n, 2]. Until it is known, the policy is its own reference, because it has not changed yet."""
        if self.reference_free:
            return torch.zeros_like(scores)
        known = [pair.reference for pair in items if pair.reference is not None]
        return torch.tensor(known, device=scores.device) if len(known) == len(items) else scores.detach()

    def begin(self, forward: Forward, items: Sequence[Pair], ranks: Ranks) -> list[Pair]:
        return list(items) if self.reference_free else _with_reference(items, self._before(forward, items, ranks))

    @torch.no_grad()
    def _before(self, forward: Forward, items: Sequence[Pair], ranks: Ranks) -> list[list[float]]:
        size = self.config.batch_size
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        result = ranks.each(parts, lambda part: self._scores(forward.logits, part).tolist())
        return [scores for part in result for scores in part]

    def keep(self, items: Sequence[Pair]) -> dict[str, Tensor]:
        known = [pair.reference for pair in items if pair.reference is not None]
        return {"reference": torch.tensor(known), "pairs": _digest(items)} if known else {}

    def recall(self, items: Sequence[Pair], stored: Mapping[str, Tensor]) -> list[Pair]:
        if self.reference_free or not items:
            return list(items)
        if not stored or not torch.equal(stored["pairs"], _digest(items)):
            raise JobError(
                "The checkpoint holds a reference for other pairs than the data hold, and the model that the run began "
                "with is gone; give the same data and eval_data as before, leave eval_data out, or use another output "
                "directory."
            )
        return _with_reference(items, stored["reference"].tolist())


def _digest(items: Sequence[Pair]) -> Tensor:
    """The digest that identifies these pairs: uint8 [32]."""
    return torch.frombuffer(bytearray.fromhex(fingerprint(items)), dtype=torch.uint8)


def _with_reference(items: Sequence[Pair], references: Sequence[Sequence[float]]) -> list[Pair]:
    """The pairs with their references; FP32 numbers are held as Python floats, which represent them exactly."""
    return [replace(pair, reference=(scores[0], scores[1])) for pair, scores in zip(items, references, strict=True)]
