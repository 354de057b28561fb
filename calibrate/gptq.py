"""Error-compensated rounding of a weight to FP8: GPTQ (Frantar et al., arXiv 2210.17323) on the grid of E4M3.

Rounding to nearest makes every weight's own error small. But the error of the layer's output over its inputs X [tokens,
K] matters, |X (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T) with H = X^T X. X are the inputs as the layer reads them, after
their cast to FP8: the errors of that cast are correlated with the inputs, and weights that are fitted to uncast inputs
do worse (docs/studies.md).

Columns are rounded one after the other, and the columns after them compensate for their errors, as far as inputs are
correlated: with U^T U = H^-1, U upper triangular, the error e of column j changes the columns k > j by -e U[j, k] /
U[j, j]. Columns with large inputs come first, because the errors of the last ones are not compensated.

The scales are given and do not change: the result is served like a weight that was rounded to nearest.
"""

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX, expand

E4M3 = torch.float8_e4m3fn
DAMPING = 0.01  # this fraction of the diagonal's mean is added to it, because X^T X of few tokens is singular
COLUMNS = 64  # columns rounded before one product updates the columns after them


def compensated(weight: Tensor, products: Tensor, scale_inv: Tensor, damping: float = DAMPING) -> Tensor:
    """weight [N, K] rounded to E4M3 [N, K] by its dequantizing scale, FP32 [], [N, 1] or [N / 128, K / 128].

    products: X^T X [K, K], FP32. A column that no input reaches is rounded to nearest.
    """
    order = products.diagonal().argsort(descending=True)
    scale = expand(scale_inv.float().reciprocal(), *weight.shape).broadcast_to(weight.shape)[:, order]
    factors = _factors(products[order][:, order], damping)
    left = weight.float()[:, order] * scale  # in units of the grid; a row or block of columns has its own
    rounded = torch.empty_like(left)
    for start in range(0, left.shape[1], COLUMNS):
        end = min(start + COLUMNS, left.shape[1])
        errors = _round(left, scale, factors, rounded, start, end)
        left[:, end:] -= (errors @ factors[start:end, end:]) * scale[:, end:]
    found = torch.empty_like(rounded)
    found[:, order] = rounded
    return found.to(E4M3)


def _factors(products: Tensor, damping: float) -> Tensor:
    """U [K, K] with U^T U = H^-1, every row divided by its diagonal element. H: the products, damped.

    Every step overwrites the one matrix in FP64, which is the largest thing in memory.
    """
    matrix = products.double()
    matrix.diagonal().add_(damping * matrix.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    torch.linalg.cholesky(matrix, out=matrix)
    torch.cholesky_inverse(matrix, out=matrix)
    torch.linalg.cholesky(matrix, upper=True, out=matrix)
    return matrix.div_(matrix.diagonal().clone().unsqueeze(1)).float()


def _round(left: Tensor, scale: Tensor, factors: Tensor, rounded: Tensor, start: int, end: int) -> Tensor:
    """Rounds the columns start to end of `left` into `rounded`; their errors [N, end - start], in units of weights."""
    errors = torch.empty_like(left[:, start:end])
    for j in range(start, end):
        rounded[:, j] = left[:, j].clamp(-FP8_MAX[E4M3], FP8_MAX[E4M3]).to(E4M3).float()
        errors[:, j - start] = error = (left[:, j] - rounded[:, j]) / scale[:, j]
        left[:, j + 1 : end] -= torch.outer(error, factors[j, j + 1 : end]) * scale[:, j + 1 : end]
    return errors
