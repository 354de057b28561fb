"""Distributed calibration and training: each rank processes every n-th batch, and the results have the same bits as
with one process.

The order matters for amax histories and for sums of FP32 numbers. Therefore the ranks exchange the results of batches
and accumulate them in the order of the batches (for gradients, see `train.train_step`). All ranks run the same code.
Only rank 0 writes files and prints messages.
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
import torch.distributed.nn  # before a group exists, because its functions bind the default group as a default argument
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fp8serve.errors import Fp8ServeError, GroupError, MachineError, one_line
from fp8serve.fp8.torch_private import clear_dtensor_caches

T = TypeVar("T")
R = TypeVar("R")
Tensors = Mapping[str, Tensor]
_PEER_LOST_MESSAGES = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
TIMEOUT = timedelta(days=7)  # ranks wait while rank 0 measures and writes; torchrun ends them if rank 0 fails


@dataclass(frozen=True)
class Ranks:
    """The processes of the default group, or this process alone. If `is_sharded`, each rank holds a shard of the
    weights, so that all ranks must run the model together."""

    rank: int = 0
    size: int = 1
    is_sharded: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def shard(self, items: Sequence[T]) -> list[T]:
        return list(items[self.rank :: self.size])

    def map(self, items: Sequence[T], function: Callable[[T], R]) -> list[R]:
        """Returns the results of `function` for all items, on every rank. Each rank computes every n-th item.

        If the weights are sharded, ranks without an item in the last round compute rank 0's item, too, because all
        ranks must run the model together.
        """
        shard = self.shard(items)
        if self.is_sharded and len(shard) < len(items[:: self.size]):
            shard.append(items[:: self.size][-1])
        results = self.gather([function(item) for item in shard])
        return [results[i % self.size][i // self.size] for i in range(len(items))]

    def any(self, value: bool) -> bool:
        """Returns whether `value` is true on any rank."""
        if self.size == 1:
            return value
        result = torch.tensor(int(value))
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return bool(result)

    def run_on_first(self, function: Callable[[], T]) -> T:
        """Runs `function` on rank 0 and returns its result on every rank. If `function` raises an Fp8ServeError, every
        rank raises it. `function` must not use collectives."""
        with self.shared_errors():
            result = function() if self.is_first else None
        return self.gather(result)[0]  # type: ignore[return-value]

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """If the block raises an Fp8ServeError on one rank, every rank raises it. The block must use no collectives."""
        error: Fp8ServeError | None = None
        try:
            yield
        except Fp8ServeError as e:
            error = e
        if first_error := next((e for e in self.gather(error) if e is not None), None):
            raise first_error

    def gather(self, value: T) -> list[T]:
        """Returns the `value` of every rank. It may be any picklable object."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def compute_in_turn(
        self, count: int, make: Callable[[int], Tensors], empty: Callable[[int], Tensors]
    ) -> Iterator[Tensors]:
        """Yields make(0) to make(count - 1) on every rank. Each call of `make` runs on one rank. The other ranks
        receive its tensors in the tensors that `empty` returns."""
        for start in range(0, count, self.size):
            own_index = start + self.rank
            created = make(own_index) if own_index < count else {}
            for index in range(start, min(start + self.size, count)):
                yield self._broadcast_tensors(created if index == own_index else empty(index), index - start)

    def _broadcast_tensors(self, tensors: Tensors, source: int) -> Tensors:
        if self.size > 1:
            for tensor in tensors.values():
                plain = tensor.contiguous()
                dist.broadcast(plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain, source)
        return tensors

    def broadcast(self, value: T) -> T:
        """Sends `value` from rank 0 to the other ranks, which call `receive_broadcast`."""
        if self.size > 1:
            dist.broadcast_object_list([value], 0)
        return value

    def receive_broadcast(self) -> Any:
        """Returns the value that rank 0 broadcasts. Raises MachineError if rank 0 has ended."""
        value = [None]
        try:
            dist.broadcast_object_list(value, 0)
        except RuntimeError:
            raise MachineError("Rank 0 failed; see its message.") from None
        return value[0]


ALONE = Ranks()


def is_peer_lost(error: Exception) -> bool:
    """Returns whether a collective has failed because another process has ended."""
    return any(message in str(error) for message in _PEER_LOST_MESSAGES)


def is_rank() -> bool:
    """Returns whether torchrun has started this process together with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def torchrun(device: str = "cpu") -> Iterator[Ranks]:
    """Joins the processes that torchrun has started. Yields `ALONE` if it has started only one.

    The backend is gloo for tensors on the CPU and NCCL for tensors on GPUs. Each rank has one GPU. Only rank 0 reports
    an Fp8ServeError; the other ranks exit silently.

    At the end no object may refer to the process group, so that the group's threads end. A thread that releases its
    last tensor during the shutdown of the interpreter would abort the process.
    """
    if not is_rank():
        yield ALONE
        return
    ranks = join_torchrun(device)
    try:
        yield ranks
    except Fp8ServeError:
        if ranks.is_first:
            raise
        raise SystemExit(1) from None
    finally:
        leave_group()


def join_torchrun(device: str) -> Ranks:
    """Joins the default group of the processes that torchrun has started. Raises GroupError if they cannot connect."""
    on_gpu = device.startswith("cuda")
    try:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            # a single launcher reuses its store after a restart, so the store holds addresses of dead processes
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)  # type: ignore[attr-defined]
        return join_group(store, rank, size, on_gpu=on_gpu)
    except RuntimeError as error:
        raise GroupError(
            f"The processes that torchrun started could not connect; torch says: {one_line(error)}."
        ) from error


def join_group(store: Any, rank: int, size: int, *, on_gpu: bool) -> Ranks:
    """Initializes the default group and returns when every rank is connected to all others.

    Without this barrier, a rank that exits early would close connections that another rank is still opening. Raises
    RuntimeError if the processes cannot connect.
    """
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    dist.all_reduce(torch.zeros(()))
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave_group() -> None:
    """Destroys the default group and releases it, so that its threads end."""
    dist.destroy_process_group()
    clear_dtensor_caches()
    gc.collect()  # reference cycles of FSDP contain the group
