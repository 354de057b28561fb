"""Several processes calibrate together: each takes every n-th batch, and all end with the bits of one process.

A maximum does not care for order, but a history of amaxes and a sum of FP32 numbers do. So what batches give is
exchanged batch by batch, and every process adds it up in the order of the batches. The processes run the same code at
the same time up to the scales and the rounded weights; rank 0 alone measures, writes and speaks.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.errors import Fp8ServeError, MachineError

T = TypeVar("T")
Tensors = Mapping[str, Tensor]
PATIENCE = timedelta(days=7)  # the others wait while rank 0 measures and writes; torchrun ends them when it fails


@dataclass(frozen=True)
class Ranks:
    """The processes of the default group that calibrate together, or this one alone."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def own(self, items: Sequence[T]) -> list[T]:
        return list(items[self.rank :: self.size])

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error in the block on one rank is that error on all. No collective may be in it."""
        error: Fp8ServeError | None = None
        try:
            yield
        except Fp8ServeError as e:
            error = e
        if found := next((e for e in self.gather(error) if e is not None), None):
            raise found

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, any object."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def in_turn(self, count: int, make: Callable[[int], Tensors], empty: Callable[[int], Tensors]) -> Iterator[Tensors]:
        """make(0) ... make(count - 1) on every rank, each made by one; `empty` gives the tensors to receive it in."""
        for start in range(0, count, self.size):
            mine = start + self.rank
            made = make(mine) if mine < count else {}
            for index in range(start, min(start + self.size, count)):
                yield self._sent(made if index == mine else empty(index), index - start)

    def _sent(self, tensors: Tensors, source: int) -> Tensors:
        if self.size > 1:
            for tensor in tensors.values():
                plain = tensor.contiguous()
                dist.broadcast(plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain, source)
        return tensors

    def tell(self, value: T) -> T:
        """Rank 0's `value` reaches the others, who wait in `hear`."""
        if self.size > 1:
            dist.broadcast_object_list([value], 0)
        return value

    def hear(self) -> Any:
        """What rank 0 tells. MachineError: it has ended without."""
        value = [None]
        try:
            dist.broadcast_object_list(value, 0)
        except RuntimeError:
            raise MachineError("Rank 0 failed; see its message.") from None
        return value[0]


ALONE = Ranks()


@contextmanager
def torchrun() -> Iterator[Ranks]:
    """The processes that torchrun has started, joined over gloo inside; this one alone where it has not.

    An error of the input is rank 0's to tell; the others end in silence.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    ranks = _joined()
    try:
        yield ranks
    except Fp8ServeError:
        if ranks.first:
            raise
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()


def _joined() -> Ranks:
    """This process among all that torchrun has started, once each has a connection to every other.

    Without the barrier a rank that refuses its input at once would close connections that another still makes.
    """
    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
        dist.barrier()
    except RuntimeError as error:
        raise MachineError(f"The processes that torchrun started could not connect: {error}") from error
    return Ranks(dist.get_rank(), dist.get_world_size())
