"""The losses of pairs, as published, from log-probabilities.

For an answer y to x, with policy p and reference q (none: reference-free), r(y) = log p(y|x) - log q(y|x), in nats: a
sum over the answer's tokens, or their mean if the loss is normalised by length. With d = r(chosen) - r(rejected):

    sigmoid        -log s(b d), sums                    Rafailov et al. 2023, eq. 7; smoothed: Mitchell's cDPO
    sigmoid_norm   -log s(b d), means                   Lambert et al. 2024 (Tulu 3), section 5.1.2
    ipo            (d - 1 / 2b)^2, means                Azar et al. 2024, eq. 17; means, as its authors have it
    simpo          -log s(b d - g), means, no reference Meng et al. 2024, eq. 6

s is the logistic function, b is beta, g is gamma. Label smoothing e takes (1 - e) of a loss and e of that of the
reversed pair: the labels are wrong with probability e. LD-DPO (Liu et al. 2024) multiplies the log-probabilities of the
tokens of the longer answer beyond the length of the shorter one by `ld_alpha`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fp8serve.train.methods.options import PairLoss

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
    wanted = beta * margins - (gamma if loss_type == "simpo" else 0.0)
    return -(1 - label_smoothing) * logsigmoid(wanted) - label_smoothing * logsigmoid(-wanted)
