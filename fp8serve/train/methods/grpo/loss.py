"""The losses of answers to one prompt, as published, from their rewards and log-probabilities.

For G answers with rewards r to one prompt, the advantage of each is A = r - mean(r), divided by (std(r) + 1e-4): the
deviation within the group, within the whole step, or not at all (`scale_rewards`: group, batch, none). For a token with
log-probabilities l of the policy, l_old of the policy that drew it and l_ref of the reference,

    w = exp(l - l_old)
    loss = -min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A) + beta (exp(l_ref - l) - (l_ref - l) - 1)

and these are averaged (`loss_type`)

    grpo       over an answer's tokens, then over answers       Shao et al. 2024, eq. 3
    dapo       over all tokens of the step                      Yu et al. 2025, eq. 8
    dr_grpo    answers' sums over max_completion_length          Liu et al. 2025; with scale_rewards none

Names and details (the unbiased deviation, its 1e-4) are TRL's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8serve.train.methods.options import AnswerLoss, ScaleRewards

LEAST_DEVIATION = 1e-4


def advantages(rewards: Tensor, scale: ScaleRewards) -> Tensor:
    """FP64 [groups, G], from rewards of the same shape."""
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred
    deviation = rewards.std(1, keepdim=True) if scale == "group" else rewards.std()
    return centred / (deviation + LEAST_DEVIATION)


def token_shares(lengths: Sequence[int], loss_type: AnswerLoss, longest: int) -> list[float]:
    """The weight of a token of each answer, such that the mean over answers of weighted sums is the loss."""
    if loss_type == "grpo":
        return [1 / length for length in lengths]
    if loss_type == "dapo":
        return [len(lengths) / sum(lengths)] * len(lengths)
    return [1 / longest] * len(lengths)


def token_losses(
    ratio: Tensor, advantage: Tensor, epsilon: float, epsilon_high: float, beta: float, kl: Tensor | None
) -> Tensor:
    """FP32 [P], the loss of every token; advantage: that of its answer."""
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    losses = -torch.min(ratio * advantage, clipped * advantage)
    return losses if kl is None else losses + beta * kl


def token_kl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's estimate of KL(policy || reference), FP32 [P]: never negative, and 0 where the two are equal."""
    apart = reference - log_probs
    return torch.expm1(apart) - apart
