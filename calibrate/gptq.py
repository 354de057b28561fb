"""Error-compensated rounding of a weight to FP8: GPTQ (Frantar et al., arXiv 2210.17323) on the grid of E4M3.

Rounding to nearest makes every weight's own error small. What counts is the error of the layer's output over the inputs
X [tokens, K] that it gets, |X W^T - (X + E) Q^T|^2, where E is what their own cast to FP8 does to them. With E's errors
independent of each other that is tr((Q - T) H (Q - T)^T) and a constant, where

    H = X^T X + diag(sum over tokens of E^2)     T = W X^T X H^-1

So the weight T is rounded instead of W: a little smaller where weights that cancel each other out would only multiply
the noise of inputs. Columns are rounded one after the other, and what a column lost is made up for, as far as inputs
are correlated, by those that are still to come: with U^T U = H^-1, U upper triangular, the error e of column j changes
the columns k > j by -e U[j, k] / U[j, j]. Columns with large inputs come first, for the last ones carry what nobody
makes up for.

The scales are given and stay: what comes out is served like a weight that was rounded to nearest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX, expand

E4M3 = torch.float8_e4m3fn
DAMPING = 0.01  # of the mean of the diagonal, added to it: X^T X of few tokens is singular
COLUMNS = 64  # rounded before the columns behind them are changed, in one product


@dataclass
class Moments:
    """What is to be known of a linear's inputs: sums over tokens, in FP32.

    products: [K, K], of x^T x. noise: [K], of the squared error that the cast to FP8 makes in each element.
    """

    products: Tensor
    noise: Tensor

    @classmethod
    def zeros(cls, in_features: int, device: torch.device | str = "cpu") -> "Moments":
        return cls(torch.zeros(in_features, in_features, device=device), torch.zeros(in_features, device=device))

    def add(self, x: Tensor, cast: Tensor) -> None:
        """x [tokens, K], and what the layer makes of it, dequantized."""
        x = x.float()
        self.products.addmm_(x.t(), x)
        self.noise += (cast - x).square().sum(0)


def compensated(weight: Tensor, inputs: Moments, scale_inv: Tensor, damping: float = DAMPING) -> Tensor:
    """weight [N, K] rounded to E4M3 [N, K] by its dequantizing scale, FP32 [], [N, 1] or [N / 128, K / 128].

    A column that no input reaches is rounded to nearest.
    """
    target, hessian = _problem(weight, inputs, damping)
    order = hessian.diagonal().argsort(descending=True)
    scale = expand(scale_inv.float().reciprocal(), *weight.shape).broadcast_to(weight.shape)[:, order]
    factors = _factors(hessian[order][:, order])
    left = target.float()[:, order] * scale  # in units of the grid; a row or block of columns has its own
    rounded = torch.empty_like(left)
    for start in range(0, left.shape[1], COLUMNS):
        end = min(start + COLUMNS, left.shape[1])
        errors = _round(left, scale, factors, rounded, start, end)
        left[:, end:] -= (errors @ factors[start:end, end:]) * scale[:, end:]
    found = torch.empty_like(rounded)
    found[:, order] = rounded
    return found.to(E4M3)


def _problem(weight: Tensor, inputs: Moments, damping: float) -> tuple[Tensor, Tensor]:
    """(T, H), in FP64."""
    products = inputs.products.double()
    added = damping * products.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    products.diagonal().add_(added)
    hessian = products + torch.diag(inputs.noise.double())
    if not inputs.noise.any():
        return weight, hessian
    return torch.linalg.solve(hessian, products @ weight.double().t()).t(), hessian


def _factors(hessian: Tensor) -> Tensor:
    """U [K, K] with U^T U = H^-1, every row divided by its diagonal element."""
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    factors: Tensor = upper / upper.diagonal().unsqueeze(1)
    return factors.float()


def _round(left: Tensor, scale: Tensor, factors: Tensor, rounded: Tensor, start: int, end: int) -> Tensor:
    """Rounds the columns start to end of `left` into `rounded`; their errors [N, end - start], in units of weights."""
    errors = torch.empty_like(left[:, start:end])
    for j in range(start, end):
        rounded[:, j] = left[:, j].clamp(-FP8_MAX[E4M3], FP8_MAX[E4M3]).to(E4M3).float()
        errors[:, j - start] = error = (left[:, j] - rounded[:, j]) / scale[:, j]
        left[:, j + 1 : end] -= torch.outer(error, factors[j, j + 1 : end]) * scale[:, j + 1 : end]
    return errors
