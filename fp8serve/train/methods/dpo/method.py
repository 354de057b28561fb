"""The losses of direct preference optimisation, and the method that the trainer calls.

For a completion y of a prompt x with policy p and reference model q, r(y) = log p(y|x) - log q(y|x) in nats. With
d = r(chosen) - r(rejected), the losses are

    sigmoid    -log s(b d), log-probabilities summed over the tokens of a completion     Rafailov et al. 2023, eq. 7
    simpo      -log s(b d - g), log-probabilities averaged, r(y) = log p(y|x)            Meng et al. 2024, eq. 6

where s is the logistic function, b is beta and g is gamma. With label smoothing e (Mitchell's cDPO), the loss is
(1 - e) times the loss of the pair plus e times the loss of the swapped pair, for labels that are wrong with probability
e.

The reference model is the model before its first step. Its scores of both completions are computed once with this run's
forward pass, held with the pairs, and written into every checkpoint (8 bytes a pair), so that no second model is in
memory. The reference of an adapter is the base model, because a new adapter does not change the outputs. Under a recipe
whose rows are independent, all margins are exactly 0 before the first step.
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
from fp8serve.train.methods.interface import Method, Metric
from fp8serve.train.methods.options import SIMPO_GAMMA


class Dpo(Method[Pair]):
    """Direct preference optimisation. The metrics have TRL's names; the reward of a completion is beta r(y)."""

    metrics = (
        Metric("rewards/chosen"),
        Metric("rewards/rejected"),
        Metric("rewards/accuracies", "reward accuracy"),
        Metric("rewards/margins", "margin"),
        Metric("logps/chosen"),
        Metric("logps/rejected"),
    )

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.beta, self.is_simpo = config.effective_beta, config.dpo_loss == "simpo"
        default_gamma = SIMPO_GAMMA if self.is_simpo else 0.0
        self.gamma = default_gamma if config.simpo_gamma is None else config.simpo_gamma

    def count_loss_terms(self, items: Sequence[Pair]) -> int:
        return len(items)

    def compute_sums(self, logits: Logits, items: Sequence[Pair]) -> tuple[Tensor, ...]:
        scores = self._policy_scores(logits, items)
        ratios = scores - self._reference_scores(items, scores)
        margins = ratios[:, 0] - ratios[:, 1]
        preference_logits, smoothing = self.beta * margins - self.gamma, self.config.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(preference_logits) - smoothing * logsigmoid(-preference_logits)
        chosen, rejected = (self.beta * ratios.detach()).unbind(1)
        metrics = chosen, rejected, (chosen > rejected).float(), chosen - rejected, *scores.detach().unbind(1)
        return losses.sum(), *(metric.sum() for metric in metrics)

    def _policy_scores(self, logits: Logits, items: Sequence[Pair]) -> Tensor:
        """Returns log p(y|x) of the chosen and the rejected completions, FP32 [pairs, 2]."""
        batch = collate([row for pair in items for row in pair.rows], self.config.device)
        log_probs = target_log_probs(logits(batch), batch.targets)
        completions = torch.split(log_probs, [row.trainable_tokens for pair in items for row in pair.rows])
        scores = [tokens.sum() / (len(tokens) if self.is_simpo else 1) for tokens in completions]
        return torch.stack(scores).view(-1, 2)

    def _reference_scores(self, items: Sequence[Pair], scores: Tensor) -> Tensor:
        """Returns the scores of the reference model [pairs, 2]. Before `compute_reference` these are `scores`: the
        weights have not changed yet, so the policy is the reference model."""
        if self.is_simpo:
            return torch.zeros_like(scores)
        references = [pair.reference for pair in items if pair.reference is not None]
        return torch.tensor(references, device=scores.device) if len(references) == len(items) else scores.detach()

    @torch.no_grad()
    def compute_reference(self, forward: Forward, items: Sequence[Pair], ranks: Ranks) -> list[Pair]:
        if self.is_simpo:
            return list(items)
        size = self.config.batch_size
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        results = ranks.map(batches, lambda batch: self._policy_scores(forward.logits, batch).tolist())
        return _with_reference(items, [scores for batch_scores in results for scores in batch_scores])

    def reference_tensors(self, items: Sequence[Pair]) -> dict[str, Tensor]:
        references = [pair.reference for pair in items if pair.reference is not None]
        return {"reference": torch.tensor(references), "pairs": _digest(items)} if references else {}

    def load_reference(self, items: Sequence[Pair], tensors: Mapping[str, Tensor]) -> list[Pair]:
        if self.is_simpo or not items:
            return list(items)
        if not tensors or not torch.equal(tensors["pairs"], _digest(items)):
            raise JobError(
                "The checkpoint has reference scores of other pairs than those of data and eval_data, and the initial "
                "model, which could compute them, no longer exists; give the same data and eval_data as before, leave "
                "eval_data out, or use another output directory."
            )
        return _with_reference(items, tensors["reference"].tolist())


def _digest(items: Sequence[Pair]) -> Tensor:
    """Returns the SHA-256 that identifies these pairs, uint8 [32]."""
    return torch.frombuffer(bytearray.fromhex(fingerprint(items)), dtype=torch.uint8)


def _with_reference(items: Sequence[Pair], references: Sequence[Sequence[float]]) -> list[Pair]:
    """Returns the pairs with their reference scores. Python floats represent the FP32 numbers exactly."""
    return [replace(pair, reference=(scores[0], scores[1])) for pair, scores in zip(items, references, strict=True)]
