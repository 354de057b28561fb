"""Adapters beside a linear layer that serves: several at once, each for its own rows of a batch.

lora.py trains one adapter; this module serves several, with the same arithmetic in the same order:

    LoRA    y = base(x) + B (s A x)
    DoRA    y = factor * (base(x) + B (s A x) - bias) + bias, where factor = m / ||W + s B A|| never changes

Rows that have an adapter are sorted by it and multiplied by `grouped_mm`, one call for A and one for B whatever the
number of adapters. Stacked adapters have the largest rank among them. The others are padded with zeros, which do not
change a sum's bits, because they come last and sums begin at +0. A row without an adapter is not touched.

`Assignment` says which row has which adapter in the current step. Layers read it (`FrozenLinear.adapters`), so the
model's code does not deal with adapters.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.fp8 import ops as ops  # registers the ops called below
from fp8serve.fp8.lora import rescaled, row_norms, squared_norms

_grouped_mm = torch.ops.fp8serve.grouped_mm.default
_mm = torch.ops.fp8serve.mm.default
NONE = -1


class Rows(NamedTuple):
    """Rows with an adapter, sorted by it. where int64 [n]: their places in the batch. place int64 [n]: the adapter's
    place in the stack. offsets int32 [adapters]: where each one's rows end."""

    where: Tensor
    place: Tensor
    offsets: Tensor


class Assignment:
    """The number of each row's adapter in the current step; in most steps no row has one."""

    def __init__(self) -> None:
        self._of_rows: Tensor | None = None
        self._of_last: Tensor | None = None
        self._sorted_rows: dict[tuple[tuple[int, ...], bool], Rows | None] = {}

    def begin(self, of_rows: Tensor, last: Tensor | None) -> None:
        """of_rows int64 [T], NONE for a row without an adapter; last int64 [R]: the rows that pruned layers see."""
        self._of_rows, self._sorted_rows = of_rows, {}
        self._of_last = of_rows if last is None else of_rows[last]

    def end(self) -> None:
        """The step is over: no row has an adapter."""
        self._of_rows = self._of_last = None
        self._sorted_rows = {}

    @property
    def active(self) -> bool:
        return self._of_rows is not None

    def rows(self, numbers: tuple[int, ...], is_pruned: bool) -> Rows | None:
        """The rows of the adapters with these numbers; None where there are none. Layers with equal adapters share
        them."""
        key = numbers, is_pruned
        if key not in self._sorted_rows:
            of_rows = self._of_last if is_pruned else self._of_rows
            self._sorted_rows[key] = None if of_rows is None else _sorted(of_rows, numbers)
        return self._sorted_rows[key]


def _sorted(of_rows: Tensor, numbers: tuple[int, ...]) -> Rows | None:
    places = torch.full_like(of_rows, NONE)
    for at, number in enumerate(numbers):
        places[of_rows == number] = at
    where = (places != NONE).nonzero()[:, 0]
    if len(where) == 0:
        return None
    place, order = torch.sort(places[where], stable=True)
    offsets = torch.bincount(place, minlength=len(numbers)).cumsum(0).to(torch.int32)
    return Rows(where[order], place, offsets)


@dataclass(frozen=True, eq=False)
class Part:
    """One adapter of one linear: a [r, K] and b [N, r] in BF16, factor FP32 [N] where it is a DoRA."""

    a: Tensor
    b: Tensor
    scaling: float
    factor: Tensor | None = None


class ServedAdapters:
    """The adapters of one linear, by their numbers. is_pruned: the layer sees no rows but those with logits."""

    def __init__(self, assignment: Assignment, parts: dict[int, Part], bias: Tensor | None, *, is_pruned: bool) -> None:
        self._assignment, self._is_pruned, self._bias = assignment, is_pruned, bias
        self._numbers, every = tuple(parts), list(parts.values())
        rank = max(part.a.shape[0] for part in every)
        self._a = torch.stack([F.pad(part.a, (0, 0, 0, rank - part.a.shape[0])) for part in every])
        self._b = torch.stack([F.pad(part.b, (0, rank - part.b.shape[1])) for part in every])
        device = self._a.device
        self._scaling = torch.tensor([part.scaling for part in every], dtype=torch.float32, device=device)
        self._one, self._ones = torch.ones((), device=device), torch.ones(len(every), device=device)
        factors = [part.factor for part in every]
        self._is_dora = torch.tensor([factor is not None for factor in factors], device=device)
        first = next((factor for factor in factors if factor is not None), None)
        one = None if first is None else torch.ones_like(first)
        self._factor = None if one is None else torch.stack([one if f is None else f for f in factors])

    @property
    def is_active(self) -> bool:
        """Whether a row of this step has one of these adapters."""
        return self._assignment.active and self._rows() is not None

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """y [..., N], the layer's output for x [..., K], plus each row's adapter; changes y in place."""
        rows = self._rows() if self._assignment.active else None
        if rows is None:
            return y
        flat, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]).index_select(0, rows.where)
        moved = flat.index_select(0, rows.where) + self._low_rank(inputs.to(torch.bfloat16), rows).to(y.dtype)
        flat.index_copy_(0, rows.where, self._with_magnitude(moved, rows))
        return y

    def _rows(self) -> Rows | None:
        return self._assignment.rows(self._numbers, self._is_pruned)

    def _low_rank(self, x: Tensor, rows: Rows) -> Tensor:
        """B (s A x), BF16 [n, N]: `lora.low_rank` of each adapter's rows."""
        wide = self._product(x, self._a, rows, torch.float32)
        inner = (wide * self._scaling[rows.place].unsqueeze(1)).to(torch.bfloat16)
        return self._product(inner, self._b, rows, torch.bfloat16)

    def _product(self, x: Tensor, stack: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Each row times the matrix of its adapter. On a GPU grouped_mm multiplies FP8 only."""
        if not x.is_cuda:
            return cast(Tensor, _grouped_mm(x, stack, self._one, self._ones, rows.offsets, None, dtype))
        spans = list(pairwise([0, *rows.offsets.tolist()]))
        parts = [_mm(x[a:b], matrix, None, dtype) for (a, b), matrix in zip(spans, stack, strict=True) if a < b]
        return torch.cat(parts)

    def _with_magnitude(self, y: Tensor, rows: Rows) -> Tensor:
        """The output as `LoraLinear` computes it where the row's adapter is a DoRA."""
        if self._factor is None:
            return y
        z = y if self._bias is None else y - self._bias
        z = rescaled(z, self._factor[rows.place])
        z = z if self._bias is None else z + self._bias
        return torch.where(self._is_dora[rows.place].unsqueeze(1), z, y)


@torch.no_grad()
def factor_of(base: nn.Module, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None) -> Tensor | None:
    """FP32 [N]: the factor by which a DoRA multiplies each output of `base`, a linear layer whose weight may be packed;
    None for a LoRA."""
    if magnitude is None:
        return None
    return magnitude / row_norms(base, squared_norms(base), a, b, scaling)


def attach(linear: nn.Module, adapters: ServedAdapters | None) -> None:
    """From now on the layer adds these; None: nothing. The layer is a FrozenLinear or a BatchInvariantLinear."""
    linear.adapters = adapters  # type: ignore[assignment]  # a class attribute of both
