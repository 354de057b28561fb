"""Serving of several adapters of a linear layer in one batch, each for its own rows.

lora.py trains one adapter; this module serves several, with the same arithmetic in the same order:

    LoRA    y = base(x) + B (s A x)
    DoRA    y = factor * (base(x) + B (s A x) - bias) + bias, with the constant factor = m / ||W + s B A||

Rows with an adapter are sorted by adapter and multiplied by `grouped_mm`: one call for A and one for B, whatever the
number of adapters. Stacked adapters are padded with zeros to the largest rank among them. The zeros do not change a
sum's bits, because they come last and sums start at +0. Rows without an adapter are not changed.

`AdapterAssignment` holds which row has which adapter in the current step. Layers read it (`FrozenLinear.adapters`), so
the model's code does not deal with adapters.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.lora import rescale_columns, row_norms, squared_norms

_grouped_mm = torch.ops.fp8serve.grouped_mm.default
_mm = torch.ops.fp8serve.mm.default
NO_ADAPTER = -1


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


def attach_adapters(linear: nn.Module, adapters: ServedAdapters | None) -> None:
    """Sets or, with None, removes the adapters of a FrozenLinear or a BatchInvariantLinear."""
    linear.adapters = adapters  # type: ignore[assignment]  # a class attribute of both classes
