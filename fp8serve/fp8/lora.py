"""Low-rank adapters of a frozen linear layer: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024), trained and served.

    LoRA    y = base(x) + B (s A x)
    DoRA    y = (m / ||W + s B A||) * (W x + B (s A x)) + bias, with the norm of each row as a constant, as in peft

`base` is an FP8 layer (frozen.py) or a BF16 layer and never changes.

Training (`LoraLinear`): A and B are FP32 master weights, rounded to BF16 for their products. These products use the
batch-invariant op `mm`, and s multiplies the product A x in FP32. So a server that calls `low_rank` on some rows of a
batch gets the same bits as training. The gradients of A and B are FP32, computed by products of BF16 operands. Autograd
saves the layer's input and r numbers per token. The norm of DoRA needs no product of the size of W: its three terms are
products with A.

Serving (`ServedAdapters`): several adapters of a layer in one batch, each for its own rows, with the arithmetic of
training in the same order. Rows with an adapter are sorted by adapter and multiplied by `grouped_mm`: one call for A
and one for B, whatever the number of adapters. Stacked adapters are padded with zeros to the largest rank among them.
The zeros do not change a sum's bits, because they come last and sums start at +0. Rows without an adapter are not
changed. `AdapterAssignment` holds which row has which adapter in the current step. Layers read it
(`FrozenLinear.adapters`), so the model's code does not deal with adapters.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.frozen import FrozenLinear, multiply
from fp8serve.fp8.ops import e2m1
from fp8serve.fp8.ops.arithmetic import E8M0, dequantize
from fp8serve.fp8.ops.packing import GROUP, unpack_weight

_grouped_mm = torch.ops.fp8serve.grouped_mm.default
_mm = torch.ops.fp8serve.mm.default
_wgrad = torch.ops.fp8serve.wgrad.default
NO_ADAPTER = -1
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
    if isinstance(base, FrozenLinear) and base.is_4bit:
        count = ROWS_PER_CHUNK // GROUP if base.is_packed else ROWS_PER_CHUNK
        pairs = zip(torch.split(base.weight_q, count), torch.split(base.weight_scale_inv, count), strict=True)
        factors = 1.0 if base.pre_quant_scale is None else base.pre_quant_scale
        sums = torch.cat([(e2m1.dequantize(*pair, None) * factors).square().sum(1) for pair in pairs])
        return sums if base.weight_global_scale is None else sums * base.weight_global_scale.square()
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

    `squares` has the squared norms of the rows of W. If the layer has some columns of W (sharded.py), all ranks must
    call this function.
    """
    weight, one = weight_of(base), torch.ones((), device=a.device)
    if isinstance(base, FrozenLinear):
        global_scale = base.weight_global_scale
        x, x_scale = base.scale_input(a), None if base.is_4bit else one  # A stays in BF16
        a_w = multiply(x, x_scale, weight, base.weight_scale_inv, None, torch.float32, global_scale)  # A W^T [r, N]
    else:
        a_w = _mm(a, _unpacked(weight), None, torch.float32)
    b = b.float()
    cross_terms = (a_w.t() * b).sum(1)
    ba_squares = ((b @ (a.float() @ a.float().t())) * b).sum(1)
    total = squares + 2 * scaling * cross_terms + scaling * scaling * ba_squares
    if (shard := getattr(base, "input_shard", None)) is not None:  # the layer has some columns
        total = shard.sum_over_ranks(total)
    return total.clamp_min(torch.finfo(torch.float32).tiny).sqrt()


class AdapterRows(NamedTuple):
    """The rows of a batch that have an adapter, sorted by adapter.

    Attributes:
        indices: int64 [n], the indices of the rows in the batch.
        stack_indices: int64 [n], the index of each row's adapter in the stack.
        offsets: int32 [adapters], the end of each adapter's rows.
    """

    indices: Tensor
    stack_indices: Tensor
    offsets: Tensor


class AdapterAssignment:
    """The adapter number of each row in the current step. In most steps no row has an adapter."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None
        self._pruned_numbers: Tensor | None = None  # of the rows that pruned layers receive
        self._rows: dict[tuple[tuple[int, ...], bool], AdapterRows | None] = {}

    def begin(self, numbers: Tensor, pruned_indices: Tensor | None) -> None:
        """Starts a step with the adapter number of each row, int64 [T], NO_ADAPTER for a row without an adapter.

        `pruned_indices` int64 [R] are the rows that pruned layers receive; None if they receive all rows.
        """
        self._numbers, self._rows = numbers, {}
        self._pruned_numbers = numbers if pruned_indices is None else numbers[pruned_indices]

    def end(self) -> None:
        """Ends the step; no row has an adapter any more."""
        self._numbers = self._pruned_numbers = None
        self._rows = {}

    def rows(self, numbers: tuple[int, ...], is_pruned: bool) -> AdapterRows | None:
        """Returns the rows that have one of these adapters, or None if there are none. The result is cached for the
        step."""
        if self._numbers is None:
            return None
        key = numbers, is_pruned
        if key not in self._rows:
            row_numbers = self._pruned_numbers if is_pruned else self._numbers
            self._rows[key] = None if row_numbers is None else _sort_rows(row_numbers, numbers)
        return self._rows[key]


def _sort_rows(row_numbers: Tensor, numbers: tuple[int, ...]) -> AdapterRows | None:
    stack_indices = torch.full_like(row_numbers, NO_ADAPTER)
    for i, number in enumerate(numbers):
        stack_indices[row_numbers == number] = i
    indices = (stack_indices != NO_ADAPTER).nonzero()[:, 0]
    if len(indices) == 0:
        return None
    stack_indices, order = torch.sort(stack_indices[indices], stable=True)
    offsets = torch.bincount(stack_indices, minlength=len(numbers)).cumsum(0).to(torch.int32)
    return AdapterRows(indices[order], stack_indices, offsets)


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """The weights of one adapter for one linear layer: a [r, K] and b [N, r] in BF16, and for DoRA factor FP32 [N]."""

    a: Tensor
    b: Tensor
    scaling: float
    factor: Tensor | None = None


class ServedAdapters:
    """The adapters of one linear layer, by number.

    If `is_pruned` is True, the layer receives only the rows for which logits are computed.
    """

    def __init__(
        self,
        assignment: AdapterAssignment,
        weights: dict[int, AdapterWeights],
        bias: Tensor | None,
        *,
        is_pruned: bool,
    ) -> None:
        self._assignment, self._is_pruned, self._bias = assignment, is_pruned, bias
        self._numbers, adapters = tuple(weights), list(weights.values())
        rank = max(adapter.a.shape[0] for adapter in adapters)
        self._a = torch.stack([F.pad(adapter.a, (0, 0, 0, rank - adapter.a.shape[0])) for adapter in adapters])
        self._b = torch.stack([F.pad(adapter.b, (0, rank - adapter.b.shape[1])) for adapter in adapters])
        device = self._a.device
        self._scaling = torch.tensor([adapter.scaling for adapter in adapters], dtype=torch.float32, device=device)
        self._one, self._ones = torch.ones((), device=device), torch.ones(len(adapters), device=device)
        factors = [adapter.factor for adapter in adapters]
        self._is_dora = torch.tensor([factor is not None for factor in factors], device=device)
        first = next((factor for factor in factors if factor is not None), None)
        one = None if first is None else torch.ones_like(first)
        self._factor = None if one is None else torch.stack([one if f is None else f for f in factors])

    @property
    def is_active(self) -> bool:
        """Whether a row of this step has one of these adapters."""
        return self._rows() is not None

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Adds each row's adapter to y [..., N], the layer's output for x [..., K], in place and returns y."""
        rows = self._rows()
        if rows is None:
            return y
        outputs, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]).index_select(0, rows.indices)
        sums = outputs.index_select(0, rows.indices) + self._low_rank(inputs.to(torch.bfloat16), rows).to(y.dtype)
        outputs.index_copy_(0, rows.indices, self._apply_magnitude(sums, rows))
        return y

    def _rows(self) -> AdapterRows | None:
        return self._assignment.rows(self._numbers, self._is_pruned)

    def _low_rank(self, x: Tensor, rows: AdapterRows) -> Tensor:
        """Returns B (s A x), BF16 [n, N]: `lora.low_rank` of each adapter's rows."""
        ax = self._product(x, self._a, rows, torch.float32)
        inner = (ax * self._scaling[rows.stack_indices].unsqueeze(1)).to(torch.bfloat16)
        return self._product(inner, self._b, rows, torch.bfloat16)

    def _product(self, x: Tensor, stack: Tensor, rows: AdapterRows, dtype: torch.dtype) -> Tensor:
        """Multiplies each row by the matrix of its adapter."""
        if not x.is_cuda:  # on a GPU grouped_mm supports only FP8
            return cast(Tensor, _grouped_mm(x, stack, self._one, self._ones, rows.offsets, None, dtype))
        spans = list(pairwise([0, *rows.offsets.tolist()]))
        return torch.cat(
            [_mm(x[a:b], matrix, None, dtype) for (a, b), matrix in zip(spans, stack, strict=True) if a < b]
        )

    def _apply_magnitude(self, y: Tensor, rows: AdapterRows) -> Tensor:
        """Rescales the rows that have a DoRA adapter, as `LoraLinear` does."""
        if self._factor is None:
            return y
        z = y if self._bias is None else y - self._bias
        z = rescale_columns(z, self._factor[rows.stack_indices])
        z = z if self._bias is None else z + self._bias
        return torch.where(self._is_dora[rows.stack_indices].unsqueeze(1), z, y)


@torch.no_grad()
def dora_factor(base: nn.Module, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None) -> Tensor | None:
    """Returns the factors by which a DoRA adapter multiplies the outputs of `base`, FP32 [N], or None for LoRA."""
    if magnitude is None:
        return None
    return magnitude / row_norms(base, squared_norms(base), a, b, scaling)
