"""Several processes calibrate or train together: each takes every n-th batch, and all end with the bits of one process.

A maximum does not care for order, but a history of amaxes and a sum of FP32 numbers do. So what batches give is
exchanged, and added up in the order of the batches (of gradients: `train.train_step`). The processes run the same code
at the same time; rank 0 alone writes and speaks.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: as a default argument, its functions keep the one that they find
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fp8serve.errors import Fp8ServeError, GroupError, MachineError, one_line
from fp8serve.fp8.torch_private import forget_shardings

T = TypeVar("T")
R = TypeVar("R")
Tensors = Mapping[str, Tensor]
PATIENCE = timedelta(days=7)  # the others wait while rank 0 measures and writes; torchrun ends them when it fails


@dataclass(frozen=True)
class Ranks:
    """The processes of the default group that work together, or this one alone.

    in_step: none can compute without the others, because each holds a part of the weights.
    """

    rank: int = 0
    size: int = 1
    in_step: bool = False

    @property
    def first(self) -> bool:
        return self.rank == 0

    def own(self, items: Sequence[T]) -> list[T]:
        return list(items[self.rank :: self.size])

    def each(self, items: Sequence[T], do: Callable[[T], R]) -> list[R]:
        """`do` of every item, in their order; each is done by one rank. The results reach all: any objects.

        Where the ranks are in step, those that the last round has no item for do rank 0's, too.
        """
        mine = self.own(items)
        if self.in_step and len(mine) < len(items[:: self.size]):
            mine.append(items[:: self.size][-1])
        shares = self.gather([do(item) for item in mine])
        return [shares[i % self.size][i // self.size] for i in range(len(items))]

    def any(self, yes: bool) -> bool:
        """Whether it is so on any rank."""
        if self.size == 1:
            return yes
        result = torch.tensor(int(yes))
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return bool(result)

    def by_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; its error is that error on all. No collective may be in it."""
        with self.together():
            created = make() if self.first else None
        return self.gather(created)[0]  # type: ignore[return-value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error in the block on one rank is that error on all. No collective may be in it."""
        error: Fp8ServeError | None = None
        try:
            yield
        except Fp8ServeError as e:
            error = e
        if result := next((e for e in self.gather(error) if e is not None), None):
            raise result

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, any object."""
        if self.size == 1:
            return [value]
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, value)
        return results

    def in_turn(self, count: int, make: Callable[[int], Tensors], empty: Callable[[int], Tensors]) -> Iterator[Tensors]:
        """make(0) ... make(count - 1) on every rank, each made by one; `empty` gives the tensors to receive it in."""
        for start in range(0, count, self.size):
            mine = start + self.rank
            created = make(mine) if mine < count else {}
            for index in range(start, min(start + self.size, count)):
                yield self._sent(created if index == mine else empty(index), index - start)

    def _sent(self, tensors: Tensors, source: int) -> Tensors:
        if self.size > 1:
            for tensor in tensors.values():
                plain = tensor.contiguous()
                dist.broadcast(plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain, source)
        return tensors

    def tell(self, value: T) -> T:
        """Send rank 0's `value` to the others, which wait in `hear`."""
        if self.size > 1:
            dist.broadcast_object_list([value], 0)
        return value

    def hear(self) -> Any:
        """Receive rank 0's value. MachineError: it ended without sending one."""
        value = [None]
        try:
            dist.broadcast_object_list(value, 0)
        except RuntimeError:
            raise MachineError("Rank 0 failed; see its message.") from None
        return value[0]


ALONE = Ranks()


def is_rank() -> bool:
    """Whether torchrun has started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def torchrun(device: str = "cpu") -> Iterator[Ranks]:
    """The processes that torchrun has started, joined inside; this one alone where it has not.

    They meet over gloo, and over NCCL for tensors on GPUs: then each has its own. An error of the input is rank 0's to
    tell; the others end in silence.

    At the end nothing may refer to the group, so that its threads end: one that lets go of its last tensor while the
    interpreter shuts down aborts the process.
    """
    if not is_rank():
        yield ALONE
        return
    ranks = _joined(device)
    try:
        yield ranks
    except Fp8ServeError:
        if ranks.first:
            raise
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()
        forget_shardings()
        gc.collect()  # FSDP refers to the group from cycles


def _joined(device: str) -> Ranks:
    """This process among all that torchrun has started, once each has a connection to every other.

    Without the barrier a rank that refuses its input at once would close connections that another is still making.
    """
    on_gpu = device.startswith("cuda")
    try:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            # one launcher keeps one store over its restarts, where the addresses of dead processes would be found
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
        dist.all_reduce(torch.zeros(()))
    except RuntimeError as error:
        raise GroupError(
            f"The processes that torchrun started could not connect; torch says: {one_line(error)}."
        ) from error
    return Ranks(dist.get_rank(), dist.get_world_size())
