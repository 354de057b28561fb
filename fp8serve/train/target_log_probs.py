"""Log-probabilities of given tokens from logits, some rows at a time.

log_softmax of FP32 logits [P, vocab] as one op would keep three such matrices for its backward pass: with 512 tokens
and a vocabulary of 49,152 that is 300 MB. Here the logits stay as the head computed them, in BF16, and are widened for
LOGITS_AT_ONCE elements at a time, once in each direction. A row has the same bits as in one op over all of them.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8serve.train.memory import LOGITS_AT_ONCE


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        found = [
            torch.log_softmax(_wide(logits[rows], temperature), -1).gather(1, targets[rows, None])[:, 0]
            for rows in _pieces(logits)
        ]
        return torch.cat(found) if found else logits.new_empty(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """dy_i (onehot(target_i) - softmax_i) / temperature, rounded to the dtype of the logits."""
        logits, targets = ctx.saved_tensors
        dx, dy = torch.empty_like(logits), dy / ctx.temperature
        for rows in _pieces(logits):
            part = torch.softmax(_wide(logits[rows], ctx.temperature), -1).mul_(-dy[rows, None])
            dx[rows] = part.scatter_add_(1, targets[rows, None], dy[rows, None])
        return dx, None, None


def _wide(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.float()
    return wide if temperature == 1 else wide / temperature


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Rows of about LOGITS_AT_ONCE elements together."""
    size = max(1, LOGITS_AT_ONCE // max(1, logits.shape[1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))


def target_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """logits [P, vocab] of any floating type, targets int64 [P] -> FP32 [P], in nats: log softmax(logits / temperature)
    at the targets; differentiable."""
    return cast(Tensor, _TargetLogProbs.apply(logits, targets, temperature))  # type: ignore[no-untyped-call]


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the cross-entropies in nats, number of positions whose likeliest token is the target)."""
    hits = (logits.detach().argmax(-1) == targets).sum()
    return -target_log_probs(logits, targets).sum(), hits
