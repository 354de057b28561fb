"""How routers choose: each token's experts and their weights, from the logits that it gets.

What most families do is one op (fp8/ops/mixture.py) in training as in serving, so that both choose the same experts and
weigh them by the same bits; only its gradient is computed by PyTorch. Phi-3.5-MoE's sparsemixer (arXiv 2409.12136) is
written out, without the sampling by which it was trained, so that a trainer's log-probabilities are a server's.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops as ops  # registers the op called below
from fp8serve.fp8.ops.mixture import Scores, weigh
from fp8serve.fp8.own_product import product
from fp8serve.model.config.mixture import CORRECTION, Experts, Routing

_choose_experts = torch.ops.fp8serve.choose_experts.default

Chosen = tuple[Tensor, Tensor]  # experts int64 [T, k], their weights [T, k]


class GroupRouter(nn.Module):
    """x [T, hidden] -> logits FP32 [T, experts]: DeepSeek's.

    V3's has a correction that balances the experts' load. It is added to the scores for the choice only, and no
    gradient trains it.
    """

    weight: nn.Parameter

    def __init__(self, inputs: int, experts: int, routing: Routing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inputs))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear
        correction = nn.Parameter(torch.zeros(experts), requires_grad=False) if routing.sigmoid else None
        self.register_parameter(CORRECTION, correction)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, None, torch.float32)


class Choice:
    """The way of one family."""

    def __init__(self, settings: Experts) -> None:
        routing = settings.routing or Routing(scale=1.0, groups=1, kept=1, sigmoid=False)
        self._scores = Scores.SIGMOID if routing.sigmoid else Scores.SOFTMAX
        if settings.weighs_chosen:
            self._scores = Scores.SOFTMAX_OF_CHOSEN
        self._groups = settings.per_token, int(self._scores), routing.groups, routing.kept
        self._weights = settings.normalizes, routing.scale
        self._dtype = torch.float32 if settings.wide_weights else None
        self._closeness = settings.closeness

    def __call__(self, logits: Tensor, router: nn.Module) -> Chosen:
        """logits [T, experts] of `router`."""
        if self._closeness is not None:
            return sparsely_mixed(logits, self._closeness)
        correction = router._parameters.get(CORRECTION)
        if correction is not None:
            correction = correction.float()  # type: ignore[assignment]  # in case someone moved all to another type
        rule = *self._groups, *self._weights, self._dtype or logits.dtype
        if logits.requires_grad and torch.is_grad_enabled():
            return cast(Chosen, _Chosen.apply(logits, correction, *rule))  # type: ignore[no-untyped-call]
        return cast(Chosen, _choose_experts(logits, correction, *rule))


class _Chosen(torch.autograd.Function):
    """The op, with the gradient of `weigh`, which computes the same weights of the experts that were chosen."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, correction: Tensor | None, count: int, scores: int, *rest: Any) -> Chosen:
        chosen, weights = _choose_experts(logits, correction, count, scores, *rest)
        ctx.save_for_backward(logits, chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.weigh = partial(weigh, scores=scores, normalizes=rest[2], scale=rest[3], dtype=rest[4])
        return chosen, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            weights = ctx.weigh(logits, chosen)
        return *torch.autograd.grad(weights, logits, grad), *[None] * 8


def sparsely_mixed(logits: Tensor, closeness: float) -> Chosen:
    """logits [T, experts] -> (the chosen int64 [T, 2], weights [T, 2] in the logits' type): sparsemixer's.

    The best expert, then the best of the others; each weight comes from a softmax over the experts that are about as
    good.
    """
    weight, best = _among_close(logits, logits, closeness)
    other_weight, other = _among_close(logits.scatter(-1, best, -torch.inf), logits, closeness)
    return torch.cat((best, other), -1), torch.cat((weight, other_weight), -1)


def _among_close(left: Tensor, logits: Tensor, closeness: float) -> tuple[Tensor, Tensor]:
    """(weight, index) [T, 1] of the largest of `left`: `logits` with -inf where an expert is chosen already."""
    with torch.no_grad():
        largest, index = left.max(-1, keepdim=True)
        is_far = (largest - logits) / logits.abs().clamp(min=largest) > closeness
    return left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, index), index
