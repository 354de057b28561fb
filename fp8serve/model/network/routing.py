"""How DeepSeek's routers choose experts: scores in FP32, the best groups of experts first, then the best in these."""

import torch
from torch import Tensor, nn

from fp8serve.fp8.own_product import product
from fp8serve.model.config.mixture import CORRECTION, Routing


class GroupRouter(nn.Module):
    """x [T, hidden] -> logits FP32 [T, experts].

    V3's has a correction by which experts get equally many tokens. It joins the scores for the choice alone, and no
    gradient trains it.
    """

    weight: nn.Parameter

    def __init__(self, inputs: int, experts: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(experts, inputs))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear
        correction = nn.Parameter(torch.zeros(experts), requires_grad=False) if routing.sigmoid else None
        self.register_parameter(CORRECTION, correction)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, None, torch.float32)

    def choose(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """logits [T, experts] -> (scores of the chosen FP32 [T, count], the chosen int64 [T, count])."""
        scores = logits.sigmoid() if self.routing.sigmoid else logits.softmax(-1)
        correction = self._parameters[CORRECTION]
        chosen = self._among_groups(scores if correction is None else scores + correction.float()).topk(count, -1)[1]
        return scores.gather(-1, chosen), chosen

    def _among_groups(self, scores: Tensor) -> Tensor:
        """`scores` [T, experts], with -inf where an expert is not in one of the best groups."""
        groups, kept = self.routing.groups, self.routing.kept
        if kept == groups:
            return scores
        grouped = scores.view(len(scores), groups, -1)
        values = grouped.topk(2, -1)[0].sum(-1) if self.routing.sigmoid else grouped.amax(-1)
        is_kept = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, values.topk(kept, -1)[1], True)
        return grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(1)
