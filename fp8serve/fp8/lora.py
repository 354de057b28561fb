"""Low-rank adapters beside a frozen linear layer: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).

    LoRA    y = base(x) + B (s A x)
    DoRA    y = (m / ||W + s B A||) * (W x + B (s A x)) + bias, the norm of each row taken as a constant, as peft does

`base` is an FP8 layer (frozen.py) or a BF16 one and is never changed. A and B are FP32 masters, rounded to BF16 for
their products. These products are the op `mm`, whose rows do not depend on their batch, and s multiplies the small
vector between them in FP32. A server that calls `low_rank` on some rows of a batch gets the same bits as training.

Masters get their gradients in FP32, from products of BF16 operands. A layer keeps its input and r numbers per token for
the backward pass. The norm of DoRA needs no product as large as W: its three terms are products with A.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.frozen import FrozenLinear, multiply
from fp8serve.fp8.ops.arithmetic import dequantize
from fp8serve.fp8.ops.packing import unpack_weight

_mm = torch.ops.fp8serve.mm.default
_wgrad = torch.ops.fp8serve.wgrad.default
ROWS_AT_ONCE = 256  # rows of a weight that are widened to FP32 at a time


def low_rank(x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """B (s A x): x [M, K], a [r, K] and b [N, r] in BF16 -> BF16 [M, N]; a row does not depend on the others."""
    return cast(Tensor, _mm(_inner(x, a, scaling), b, None, torch.bfloat16))


def _inner(x: Tensor, a: Tensor, scaling: float) -> Tensor:
    """s A x, BF16 [M, r]."""
    wide: Tensor = _mm(x, a, None, torch.float32)
    return (wide * scaling).to(torch.bfloat16)


def _turned(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).t().contiguous()


class _LowRank(torch.autograd.Function):
    """`low_rank` of FP32 masters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        inner = _inner(x, a.to(torch.bfloat16), scaling)
        ctx.save_for_backward(x, a, b, inner)
        ctx.scaling = scaling
        return cast(Tensor, _mm(inner, b.to(torch.bfloat16), None, torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, inner = ctx.saved_tensors
        dy = dy.to(torch.bfloat16).contiguous()
        d_inner = (_mm(dy, _turned(b), None, torch.float32) * ctx.scaling).to(torch.bfloat16)
        dx = _mm(d_inner, _turned(a), None, x.dtype) if ctx.needs_input_grad[0] else None
        return dx, _wgrad(d_inner, x), _wgrad(inner, dy).t(), None


class _Rescaled(torch.autograd.Function):
    """z [M, N] with each column times magnitude / norm, FP32 [N]; the norm is a constant."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, magnitude: Tensor, norm: Tensor) -> Tensor:
        ctx.save_for_backward(z, magnitude, norm)
        return rescaled(z, magnitude / norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        z, magnitude, norm = ctx.saved_tensors
        return rescaled(dy, magnitude / norm), (dy.float() * z.float()).sum(0) / norm, None


def rescaled(z: Tensor, factor: Tensor) -> Tensor:
    """z [M, N] times factor FP32 [N], rounded to z's type."""
    return (z.float() * factor).to(z.dtype)


class LoraLinear(nn.Module):
    """[..., K] -> [..., N]: `base` with an adapter that trains. Parameters: lora_A [r, K], lora_B [N, r] and, for DoRA,
    lora_magnitude_vector [N], all FP32. B begins as zero and the magnitude as the norms of W's rows: a new adapter
    changes nothing (with DoRA, except for a rounding). dropout acts on the adapter's input, and only where gradients
    are recorded.
    """

    lora_magnitude_vector: nn.Parameter | None

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        scaling: float,
        *,
        dora: bool = False,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        rows, cols = features(base)
        device = weight_of(base).device
        self.base, self.scaling, self.dropout = base, scaling, dropout
        bound = 1 / math.sqrt(cols)
        a = torch.empty(rank, cols).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(a.to(device))
        self.lora_B = nn.Parameter(torch.zeros(rows, rank, device=device))
        squares = squared_norms(base) if dora else None
        self.register_buffer("weight_squares", squares, persistent=False)
        magnitude = None if squares is None else nn.Parameter(squares.sqrt())
        self.register_parameter("lora_magnitude_vector", magnitude)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N]."""
        rows = input.reshape(-1, input.shape[-1])
        seen = F.dropout(rows, self.dropout) if self.dropout and torch.is_grad_enabled() else rows
        a, b = self.lora_A, self.lora_B  # once: a parametrization is evaluated at every read
        y = self.base(rows) + _LowRank.apply(seen, a, b, self.scaling)  # type: ignore[no-untyped-call]
        return self._with_magnitude(y, a, b).view(*input.shape[:-1], -1)

    def _with_magnitude(self, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        magnitude = self.lora_magnitude_vector
        if magnitude is None:
            return y
        a, b = (p.detach().to(torch.bfloat16) for p in (a, b))
        norm = row_norms(self.base, self.get_buffer("weight_squares"), a, b, self.scaling)
        bias = cast(Tensor | None, self.base.bias)
        z = y if bias is None else y - bias
        z = cast(Tensor, _Rescaled.apply(z, magnitude, norm))  # type: ignore[no-untyped-call]
        return z if bias is None else z + bias


def weight_of(base: nn.Module) -> Tensor:
    """Of a FrozenLinear, an nn.Linear, or another module that names its weight so."""
    return cast(Tensor, base.weight)


def _in_rows(weight: Tensor) -> Tensor:
    """[N, K], packed or not."""
    return unpack_weight(weight) if weight.dim() == 3 else weight


def features(base: nn.Module) -> tuple[int, int]:
    """(out, in)."""
    if isinstance(base, FrozenLinear):
        return base.out_features, base.in_features
    rows, cols = weight_of(base).shape
    return rows, cols


@torch.no_grad()
def squared_norms(base: nn.Module) -> Tensor:
    """FP32 [N]: the squared norm of each row of the weight. A few rows at a time are widened; a packed weight is
    unpacked."""
    weight = _in_rows(weight_of(base))
    if not isinstance(base, FrozenLinear):
        return torch.cat([part.float().square().sum(1) for part in torch.split(weight, ROWS_AT_ONCE)])
    scale = base.weight_scale_inv
    if scale.dim() and len(scale) != len(weight):  # blocks of 128 rows
        parts = zip(torch.split(weight, ROWS_AT_ONCE), torch.split(scale, ROWS_AT_ONCE // 128), strict=True)
        return torch.cat([dequantize(part, of_part).square().sum(1) for part, of_part in parts])
    sums = torch.cat([part.float().square().sum(1) for part in torch.split(weight, ROWS_AT_ONCE)])
    return sums * scale.flatten().square()


@torch.no_grad()
def row_norms(base: nn.Module, squares: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """FP32 [N]: the norms of the rows of W + s B A, from those of W squared; a [r, K], b [N, r] in BF16."""
    weight, one = weight_of(base), torch.ones((), device=a.device)
    if isinstance(base, FrozenLinear):
        crossed = multiply(a, one, weight, base.weight_scale_inv, None, torch.float32)  # A W^T [r, N]
    else:
        crossed = _mm(a, _in_rows(weight), None, torch.float32)
    wide = b.float()
    between = (crossed.t() * wide).sum(1)
    added = ((wide @ (a.float() @ a.float().t())) * wide).sum(1)
    total = squares + 2 * scaling * between + scaling * scaling * added
    return total.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
