"""Apertus' MLP: a projection, xIELU (arXiv 2411.13010) with two trained parameters, and the projection back.

xIELU is computed step by step in the type of its input and rounded where transformers rounds. Its constants `beta` and
`eps` are in the file, too; they stay FP32 and are not trained (`keeps_fp32`).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.network.fusing import Ending, Projections, add_projection


class XIELU(nn.Module):
    """a x^2 + beta x above 0, and b (exp(x) - 1 - x) + beta x below, element by element; a and b are above 0 and beta.

    alpha_p, alpha_n [1]: a and b before softplus makes them so. eps: below 0, the exponent goes no nearer to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.full((1,), 0.8).expm1().log())
        self.alpha_n = nn.Parameter(torch.full((1,), 0.8 - 0.5).expm1().log())
        self.beta = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.eps = nn.Parameter(torch.tensor(-1e-6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        beta, eps = self.beta.to(x.dtype), self.eps.to(x.dtype)
        above, below = F.softplus(self.alpha_p), beta + F.softplus(self.alpha_n)
        line = beta * x
        return torch.where(x > 0, above * x * x + line, (torch.expm1(torch.minimum(x, eps)) - x) * below + line)


class UngatedMLP(nn.Module):
    """down(xIELU(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.act_fn = XIELU()
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.up = Projections(self, "up_proj")

    def forward(self, x: Tensor, norm: nn.Module | None, ending: Ending, residual: Tensor | None = None) -> Tensor:
        """residual [T, hidden], or x where there is none, plus ending(MLP of norm(x [T, hidden]))."""
        (up,) = self.up(x, norm)
        onto = x if residual is None else residual
        return add_projection(onto, self._modules["down_proj"], self.act_fn(up), ending)  # type: ignore[arg-type]

    def join(self) -> None:
        """For serving: fuse the norm before the projection with its cast."""
        self.up.join()

    def matrices(self) -> Iterator[nn.Module | Projections]:
        """The matrices that a step multiplies by."""
        yield from (*self.up.matrices(), self.down_proj)
