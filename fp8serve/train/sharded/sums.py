"""Gradients of sharded weights, added in the order of the microbatches.

FSDP2 hands over the gradients of a unit when its backward pass has computed them. Here every rank gets its rows of all
N gradients and adds them to its sum in FP32, one after the other: the order in which one process adds them, where a
reduce-scatter would add N of them first. A step has one sum for each unit, 1/N of its size; nothing else of the
gradients is kept. It costs what a reduce-scatter costs, and the N parts are in memory at once, for one unit at a time.

A rank that has no microbatch in the last round of a step repeats that of rank 0, because the others need its shards.
What it finds is not added: amaxes are maxima, to which it adds nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.fp8.fsdp import local_rows
from fp8serve.train.exchange import NOTHING
from fp8serve.train.sharded.rows import Shards
from fp8serve.train.sharded.units import Unit


class OrderedSum:
    """What FSDP2 calls in the place of its reduce-scatter, for one unit (`set_custom_reduce_scatter`).

    working: how many ranks have a microbatch of their own.
    """

    def __init__(self, size: int) -> None:
        self.size = self.working = size
        self.total: Tensor | None = None
        self._asked = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, and the next time for the result: that is the sum."""
        count = size[0]
        if self._asked != count * self.size:
            self._asked = count
            return torch.empty(count, dtype=dtype, device=device)
        self._asked = 0
        if self.total is None:
            self.total = torch.full((count,), NOTHING, dtype=dtype, device=device)
        return self.total

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """input_tensor: this rank's gradients, part by part; output_tensor: the sum, to which all are added."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for part in received.view(self.size, -1)[: self.working]:
            output_tensor += part


class ShardedExchange:
    """Sums gradients over the microbatches of one step, as `train.exchange.Exchange` does, into shards."""

    def __init__(self, shards: Shards, units: Sequence[Unit], sums: Sequence[OrderedSum]) -> None:
        self._shards, self._units, self._sums = shards, units, sums
        self._device = next(iter(shards.masters.values())).device
        for unit in units:
            unit.seen.clear()
        self._drop()

    def begin(self, working: int) -> None:
        """Before a round, of which so many ranks compute microbatches of their own."""
        for total in self._sums:
            total.working = working
        self._clear()

    def round(self) -> None:
        """FSDP2 has added the gradients already."""

    def finish(self) -> None:
        """Puts the sums into `.grad` of the masters; None where no microbatch gave a gradient."""
        missing = self._missing()
        for name, parameter in self._shards.parameters.items():
            grad = None if name in missing else parameter.grad
            self._shards.masters[name].grad = None if grad is None else local_rows(grad)
        self._clear()
        self._drop()

    def _missing(self) -> set[str]:
        """The parameters that had no gradient on any rank: of experts that no token chose."""
        names = [f"{unit.name}.{name}" for unit in self._units for name in unit.trained]
        own = {f"{unit.name}.{name}" for unit in self._units for name in unit.seen}
        seen = torch.tensor([name in own for name in names], dtype=torch.uint8, device=self._device)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return {name for name, yes in zip(names, seen.tolist(), strict=True) if not yes}

    def _clear(self) -> None:
        for parameter in self._shards.parameters.values():
            parameter.grad = None

    def _drop(self) -> None:
        for total in self._sums:
            total.total = None
