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
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, hits: Tensor | None) -> Tensor:
        """hits: bool [P], which is filled in: whether the likeliest token is the target."""
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        found = logits.new_empty(len(logits), dtype=torch.float32)
        for rows, wide, spare in _pieces(logits, temperature):
            if hits is not None:
                hits[rows] = wide.argmax(-1) == targets[rows]
            torch.log_softmax(wide, -1, out=spare)
            found[rows] = spare.gather(1, targets[rows, None])[:, 0]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        """dy_i (onehot(target_i) - softmax_i) / temperature, rounded to the dtype of the logits."""
        logits, targets = ctx.saved_tensors
        dx, dy = torch.empty_like(logits), dy / ctx.temperature
        for rows, wide, spare in _pieces(logits, ctx.temperature):
            torch.softmax(wide, -1, out=spare)
            dx[rows] = spare.mul_(-dy[rows, None]).scatter_add_(1, targets[rows, None], dy[rows, None])
        return dx, None, None, None


def _pieces(logits: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their logits in FP32 divided by the temperature, scratch memory of the same size), for pieces of about
    LOGITS_AT_ONCE elements. The next piece overwrites both tensors."""
    size = max(1, LOGITS_AT_ONCE // max(1, logits.shape[1]))
    wide, spare = logits.new_empty(2, min(size, len(logits)), logits.shape[1], dtype=torch.float32)
    for start in range(0, len(logits), size):
        rows = slice(start, min(start + size, len(logits)))
        count = rows.stop - start
        part = wide[:count].copy_(logits[rows])
        yield rows, part if temperature == 1 else part.div_(temperature), spare[:count]


def target_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """logits [P, vocab] of any floating type, targets int64 [P] -> FP32 [P], in nats: log softmax(logits / temperature)
    at the targets; differentiable."""
    return cast(Tensor, _TargetLogProbs.apply(logits, targets, temperature, None))  # type: ignore[no-untyped-call]


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the cross-entropies in nats, number of positions whose likeliest token is the target)."""
    hits = torch.empty_like(targets, dtype=torch.bool)
    found = _TargetLogProbs.apply(logits, targets, 1.0, hits)  # type: ignore[no-untyped-call]
    return -found.sum(), hits.sum()
