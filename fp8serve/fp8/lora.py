"""Training of low-rank adapters of a frozen linear layer: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).

    LoRA    y = base(x) + B (s A x)
    DoRA    y = (m / ||W + s B A||) * (W x + B (s A x)) + bias, with the norm of each row as a constant, as in peft

`base` is an FP8 layer (frozen.py) or a BF16 layer and never changes. A and B are FP32 master weights, rounded to BF16
for their products. These products use the batch-invariant op `mm`, and s multiplies the product A x in FP32. So a
server that calls `low_rank` on some rows of a batch gets the same bits as training.

The gradients of A and B are FP32, computed by products of BF16 operands. Autograd saves the layer's input and r numbers
per token. The norm of DoRA needs no product of the size of W: its three terms are products with A.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.frozen import FrozenLinear, multiply
from fp8serve.fp8.ops.arithmetic import E8M0, dequantize
from fp8serve.fp8.ops.packing import unpack_weight

_mm = torch.ops.fp8serve.mm.default
_wgrad = torch.ops.fp8serve.wgrad.default
ROWS_PER_CHUNK = 256  # rows of a weight that are cast to FP32 at a time


def low_rank(x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Returns B (s A x), BF16 [M, N], for x [M, K], a [r, K] and b [N, r] in BF16. It is batch-invariant."""
    return cast(Tensor, _mm(_project_down(x, a, scaling), b, None, torch.bfloat16))


def _project_down(x: Tensor, a: Tensor, scaling: float) -> Tensor:
    """Returns s A x, BF16 [M, r]."""
    ax: Tensor = _mm(x, a, None, torch.float32)
    return (ax * scaling).to(torch.bfloat16)


def _transpose_to_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).t().contiguous()


class _LowRank(torch.autograd.Function):
    """`low_rank` of FP32 master weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        inner = _project_down(x, a.to(torch.bfloat16), scaling)
        ctx.save_for_backward(x, a, b, inner)
        ctx.scaling = scaling
        return cast(Tensor, _mm(inner, b.to(torch.bfloat16), None, torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, inner = ctx.saved_tensors
        dy = dy.to(torch.bfloat16).contiguous()
        d_inner = (_mm(dy, _transpose_to_bf16(b), None, torch.float32) * ctx.scaling).to(torch.bfloat16)
        dx = _mm(d_inner, _transpose_to_bf16(a), None, x.dtype) if ctx.needs_input_grad[0] else None
        return dx, _wgrad(d_inner, x), _wgrad(inner, dy).t(), None


class _RescaleColumns(torch.autograd.Function):
    """Multiplies each column of z [M, N] by magnitude / norm, FP32 [N]; the norm has no gradient."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, magnitude: Tensor, norm: Tensor) -> Tensor:
        ctx.save_for_backward(z, magnitude, norm)
        return rescale_columns(z, magnitude / norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        z, magnitude, norm = ctx.saved_tensors
        return rescale_columns(dy, magnitude / norm), (dy.float() * z.float()).sum(0) / norm, None


def rescale_columns(z: Tensor, factor: Tensor) -> Tensor:
    """Returns z [M, N] times factor FP32 [N], rounded to z's dtype."""
    return (z.float() * factor).to(z.dtype)


class LoraLinear(nn.Module):
    """A linear layer [..., K] -> [..., N]: `base` with a trainable adapter.

    Its parameters are lora_A [r, K], lora_B [N, r] and, with DoRA, lora_magnitude_vector [N], all FP32. Initially B is
    zero and the magnitude has the norms of W's rows, so a new adapter changes no output (with DoRA, except for a
    rounding). Dropout applies to the adapter's input if gradients are enabled.
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
        """Returns the output [..., N] for an input [..., K]."""
        rows = input.reshape(-1, input.shape[-1])
        adapter_input = F.dropout(rows, self.dropout) if self.dropout and torch.is_grad_enabled() else rows
        a, b = self.lora_A, self.lora_B  # read once, because a parametrization is evaluated at every read
        y = self.base(rows) + _LowRank.apply(adapter_input, a, b, self.scaling)  # type: ignore[no-untyped-call]
        return self._apply_magnitude(y, a, b).view(*input.shape[:-1], -1)

    def _apply_magnitude(self, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        magnitude = self.lora_magnitude_vector
        if magnitude is None:
            return y
        a, b = (p.detach().to(torch.bfloat16) for p in (a, b))
        norm = row_norms(self.base, self.get_buffer("weight_squares"), a, b, self.scaling)
        bias = cast(Tensor | None, self.base.bias)
        z = y if bias is None else y - bias
        z = cast(Tensor, _RescaleColumns.apply(z, magnitude, norm))  # type: ignore[no-untyped-call]
        return z if bias is None else z + bias


def weight_of(base: nn.Module) -> Tensor:
    """Returns the weight of a FrozenLinear, an nn.Linear or another module with an attribute `weight`."""
    return cast(Tensor, base.weight)


def _unpacked(weight: Tensor) -> Tensor:
    return unpack_weight(weight) if weight.dim() == 3 else weight


def features(base: nn.Module) -> tuple[int, int]:
    """Returns (out_features, in_features)."""
    if isinstance(base, FrozenLinear):
        return base.out_features, base.in_features
    rows, cols = weight_of(base).shape
    return rows, cols


@torch.no_grad()
def squared_norms(base: nn.Module) -> Tensor:
    """Returns the squared norm of each row of the weight, FP32 [N]. Casts a chunk of rows to FP32 at a time."""
    weight = _unpacked(weight_of(base))
    chunks = torch.split(weight, ROWS_PER_CHUNK)
    if isinstance(base, FrozenLinear):
        scale = base.weight_scale_inv
        is_mx = scale.dtype == E8M0
        if is_mx or (scale.dim() and len(scale) != len(weight)):  # blocks of 1 or 128 rows
            scales = torch.split(scale, ROWS_PER_CHUNK // (1 if is_mx else 128))
            pairs = zip(chunks, scales, strict=True)
            return torch.cat([dequantize(chunk, chunk_scale).square().sum(1) for chunk, chunk_scale in pairs])
    sums = torch.cat([chunk.float().square().sum(1) for chunk in chunks])
    return sums * scale.flatten().square() if isinstance(base, FrozenLinear) else sums


@torch.no_grad()
def row_norms(base: nn.Module, squares: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Returns the norm of each row of W + s B A, FP32 [N], for a [r, K] and b [N, r] in BF16.

    `squares` has the squared norms of the rows of W.
    """
    weight, one = weight_of(base), torch.ones((), device=a.device)
    if isinstance(base, FrozenLinear):
        a_w = multiply(a, one, weight, base.weight_scale_inv, None, torch.float32)  # A W^T [r, N]
    else:
        a_w = _mm(a, _unpacked(weight), None, torch.float32)
    b = b.float()
    cross_terms = (a_w.t() * b).sum(1)
    ba_squares = ((b @ (a.float() @ a.float().t())) * b).sum(1)
    total = squares + 2 * scaling * cross_terms + scaling * scaling * ba_squares
    return total.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
