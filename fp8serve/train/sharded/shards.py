"""Divides parameters into shards, computes the norm of sharded gradients, and gathers tensors for checkpoints.

FSDP2 divides the first dimension into shards of equal length; the last ones may be shorter or empty. Tensors of a
parameter with another first dimension, such as the scales of 8-bit moments, are divided at the corresponding positions.
Parameters that are not trained are replicated on every rank.

On a CPU the norm of gradients has the bits that one process computes (`optimizer.global_norm`): it is a sum over the
norms of rows. Each rank sends the norms of its rows, and one-dimensional gradients as a whole. If the square of a
gradient exceeds FP32, the norms of the shards are added in FP64 instead; such a norm may differ in its last bit.

Rank 0 writes checkpoints. It requests the other ranks' shards of a tensor just before it writes the tensor, so it holds
one foreign shard at a time. The other ranks answer requests until rank 0 has succeeded or failed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fp8serve.errors import JobError
from fp8serve.fp8.fsdp import local_rows
from fp8serve.model.storage.shards import LazyTensors, TensorParts
from fp8serve.ranks import Ranks
from fp8serve.train.optimizer import BLOCK, MIN_8BIT_ELEMENTS, has_blocks, norm_of_rows, row_norms

T = TypeVar("T")


def rows_of(length: int, rank: int, size: int) -> tuple[int, int]:
    """Returns (begin, end) of a rank's rows if `size` ranks share `length` rows."""
    width = -(-length // size)
    return min(rank * width, length), min((rank + 1) * width, length)


class Shards:
    """The parameters of a model that FSDP2 has sharded, by name.

    `masters` are this rank's rows in FP32, in the memory from which FSDP2 gathers. `shapes` are those of the full
    parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self.ranks = ranks
        self.parameters = dict(parameters)
        self.sharded = {name for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.masters = {name: nn.Parameter(local_rows(p), p.requires_grad) for name, p in parameters.items()}

    def shard_range(self, name: str, length: int, rank: int) -> tuple[int, int]:
        """Returns (begin, end) of a rank's shard of a tensor that belongs to the parameter `name` and has the first
        dimension `length`."""
        rows = self.shapes[name][0]
        begin, end = rows_of(rows, rank, self.ranks.size)
        return begin * length // rows, end * length // rows

    def full_length(self, name: str, shard: Tensor) -> int:
        """Returns the first dimension of the full tensor with this rank's shard `shard`."""
        rows = self.shapes[name][0]
        begin, end = rows_of(rows, self.ranks.rank, self.ranks.size)
        return len(shard) * rows // (end - begin)

    def is_sharded(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor of the parameter `name` is sharded. Scalars, such as step counters, are not."""
        return name in self.sharded and tensor.dim() > 0

    def local_shards(self, tensors: Mapping[str, Tensor], parameter_names: Mapping[str, str]) -> Mapping[str, Tensor]:
        """Returns this rank's shards of full tensors as a lazy mapping. `parameter_names` maps the tensors' names to
        the parameters that they belong to."""

        def read(key: str) -> Tensor:
            tensor, name = tensors[key], parameter_names.get(key)
            if name is None or not self.is_sharded(name, tensor):
                return tensor
            begin, end = self.shard_range(name, len(tensor), self.ranks.rank)
            return tensor[begin:end]

        return LazyTensors(tensors, read)


def check_blocks(shards: Shards) -> None:
    """Raises JobError if a shard's 8-bit moments would have other blocks than those of one process."""
    size = shards.ranks.size
    for name, shape in shards.shapes.items():
        elements = math.prod(shape)
        if len(shape) < 2 or not has_blocks(elements):
            continue
        ranges = [shards.shard_range(name, elements, rank) for rank in range(size)]
        if not all(begin % BLOCK == 0 and has_blocks(end - begin) for begin, end in ranges):
            raise JobError(
                f'optimizer_states="8bit" needs shards of at least {MIN_8BIT_ELEMENTS} elements in whole blocks of '
                f"{BLOCK}, and {size} processes divide {name} otherwise; use fp32, another number of processes, or no "
                "fsdp."
            )


def sharded_norm(shards: Shards, grads: Mapping[str, Tensor]) -> float:
    """Returns the norm of all gradients as one vector. Every rank must call this with its shards of the gradients."""
    local = [grad if len(shards.shapes[name]) == 1 else row_norms(grad) for name, grad in grads.items()]
    gathered = _all_gather(shards, list(grads), local)
    norm = norm_of_rows([row_norms(t) if len(shards.shapes[name]) == 1 else t for name, t in gathered.items()])
    return norm if math.isfinite(norm) else _norm_in_fp64(list(grads.values()))


def _all_gather(shards: Shards, names: list[str], local: list[Tensor]) -> dict[str, Tensor]:
    """Returns the concatenation of all ranks' parts of each tensor. One all-gather sends all of them, padded."""
    lengths = {name: _lengths(shards, name) for name in names}
    widths = {name: max(rank_lengths) for name, rank_lengths in lengths.items()}
    send_buffer = torch.cat([pad(part, (0, widths[name] - len(part))) for name, part in zip(names, local, strict=True)])
    received = send_buffer.new_empty(shards.ranks.size, len(send_buffer))
    dist.all_gather(list(received.unbind()), send_buffer)
    columns = zip(names, torch.split(received, list(widths.values()), 1), strict=True)
    return {name: torch.cat([p[:n] for p, n in zip(parts, lengths[name], strict=True)]) for name, parts in columns}


def _lengths(shards: Shards, name: str) -> list[int]:
    """Returns the number of elements that each rank sends for a parameter's norm."""
    shape = shards.shapes[name]
    length = shape[0] if len(shape) == 1 else math.prod(shape[:-1])
    ranges = [shards.shard_range(name, length, rank) for rank in range(shards.ranks.size)]
    return [end - begin for begin, end in ranges]


def _norm_in_fp64(grads: list[Tensor]) -> float:
    squares = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]).square().sum()
    dist.all_reduce(squares)
    return float(squares.sqrt())


class TensorGatherer:
    """Gathers full tensors on rank 0, one shard at a time.

    `tensors` are this rank's shards by name; all ranks must have the same names. `parameter_names` maps these names to
    the parameters that the tensors belong to.
    """

    def __init__(self, shards: Shards, tensors: Mapping[str, Tensor], parameter_names: Mapping[str, str]) -> None:
        self._shards, self._tensors, self._parameter_names = shards, tensors, parameter_names

    def full_tensor(self, name: str) -> Tensor | TensorParts:
        """Returns a full tensor, whose parts rank 0 may read within `run_on_first` only."""
        tensor, parameter_name = self._tensors[name], self._parameter_names[name]
        if not self._shards.is_sharded(parameter_name, tensor):
            return tensor
        shape = (self._shards.full_length(parameter_name, tensor), *tensor.shape[1:])
        return TensorParts(tensor.dtype, shape, lambda: self._request_shards(name, shape))

    def _request_shards(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        self._shards.ranks.broadcast(name)
        yield self._tensors[name]
        for rank in range(1, self._shards.ranks.size):
            begin, end = self._shards.shard_range(self._parameter_names[name], shape[0], rank)
            shard = self._tensors[name].new_empty(end - begin, *shape[1:])
            if shard.numel():
                dist.recv(shard, rank)
            yield shard

    def run_on_first(self, make: Callable[[], T]) -> T:
        """Calls `make`, which may read full tensors, on rank 0. Returns its result, or raises its error, on all
        ranks."""
        ranks = self._shards.ranks
        created = None
        with ranks.shared_errors():
            if ranks.is_first:
                try:
                    created = make()
                finally:
                    ranks.broadcast(None)
            else:
                self._serve_requests()
        return ranks.gather(created)[0]  # type: ignore[return-value]

    def _serve_requests(self) -> None:
        while (name := _receive_name()) is not None:
            shard = self._tensors[name].detach().contiguous()
            if shard.numel():
                dist.send(shard, 0)


def _receive_name() -> Any:
    """Returns the name that rank 0 sent. If rank 0 has ended, torch's error reaches `train.group`, which restarts the
    group (`Ranks.receive_broadcast` would turn it into an error of this rank)."""
    value = [None]
    dist.broadcast_object_list(value, 0)
    return value[0]
