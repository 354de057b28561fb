"""Which rows of every parameter each process holds, the norm of divided gradients, and whole tensors for checkpoints.

FSDP2 cuts the first dimension into parts of equal length, of which the last may be shorter, or empty. What belongs to a
parameter and has another first dimension, as the scales of 8-bit moments have, is cut at the same places. Parameters
that are not trained are whole on every process.

The norm of gradients has the bits that one process computes (`optimizer.global_norm`): a sum over the norms of all
rows. Every process sends the norms of its rows, and all of what has one dimension only: a few numbers for each row.
Only of a gradient whose squares are beyond FP32 the parts' own norms are added instead; such a norm may differ in the
last bit of FP64.

Rank 0 writes checkpoints, and asks the others for their parts of a tensor when it is about to write them: it holds one
part of one tensor at a time beside its own. The others answer until rank 0 has succeeded or failed.
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
from fp8serve.model.storage.shards import Parts
from fp8serve.ranks import Ranks
from fp8serve.train.optimizer import BLOCK, SMALLEST, has_blocks, norm_of_rows, row_norms

T = TypeVar("T")


def rows_of(length: int, rank: int, size: int) -> tuple[int, int]:
    """(begin, end) of a rank's rows of so many."""
    width = -(-length // size)
    return min(rank * width, length), min((rank + 1) * width, length)


class Shards:
    """The parameters of a model that FSDP2 has divided, by name.

    masters: this process's rows, FP32, in the memory that FSDP2 gathers from. shapes: of the whole parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self.ranks = ranks
        self.parameters = dict(parameters)
        self.divided = {name for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.masters = {name: nn.Parameter(local_rows(p), p.requires_grad) for name, p in parameters.items()}

    def cut(self, name: str, length: int, rank: int) -> tuple[int, int]:
        """(begin, end) of a rank's part of a tensor with this first dimension that belongs to the parameter `name`."""
        rows = self.shapes[name][0]
        begin, end = rows_of(rows, rank, self.ranks.size)
        return begin * length // rows, end * length // rows

    def length(self, name: str, part: Tensor) -> int:
        """The first dimension of the whole tensor of which this is a part, of this process."""
        rows = self.shapes[name][0]
        begin, end = rows_of(rows, self.ranks.rank, self.ranks.size)
        return len(part) * rows // (end - begin)

    def is_divided(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor that belongs to the parameter `name` is: numbers of steps are not."""
        return name in self.divided and tensor.dim() > 0

    def own(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Mapping[str, Tensor]:
        """This process's parts of whole tensors, each cut when it is asked for; `names`: the parameters of them."""
        return _Own(self, tensors, names)


def check_blocks(shards: Shards) -> None:
    """JobError where moments of 8 bits would have other blocks than those of one process."""
    size = shards.ranks.size
    for name, shape in shards.shapes.items():
        elements = math.prod(shape)
        if len(shape) < 2 or not has_blocks(elements):
            continue
        cuts = [shards.cut(name, elements, rank) for rank in range(size)]
        if not all(begin % BLOCK == 0 and has_blocks(end - begin) for begin, end in cuts):
            raise JobError(
                f'optimizer_states="8bit" keeps moments in blocks of {BLOCK} numbers, at least {SMALLEST} of a matrix, '
                f"and {size} processes cut {name} elsewhere; use fp32, another number of processes, or no fsdp."
            )


class _Own(Mapping[str, Tensor]):
    def __init__(self, shards: Shards, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._shards, self._tensors, self._names = shards, tensors, names

    def __getitem__(self, key: str) -> Tensor:
        tensor, name = self._tensors[key], self._names.get(key)
        if name is None or not self._shards.is_divided(name, tensor):
            return tensor
        begin, end = self._shards.cut(name, len(tensor), self._shards.ranks.rank)
        return tensor[begin:end]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def sharded_norm(shards: Shards, grads: Mapping[str, Tensor]) -> float:
    """The norm of all gradients as one vector; every process calls it with its parts of the same ones."""
    mine = [grad if len(shards.shapes[name]) == 1 else row_norms(grad) for name, grad in grads.items()]
    wholes = _joined(shards, list(grads), mine)
    norm = norm_of_rows([row_norms(t) if len(shards.shapes[name]) == 1 else t for name, t in wholes.items()])
    return norm if math.isfinite(norm) else _in_fp64(list(grads.values()))


def _joined(shards: Shards, names: list[str], mine: list[Tensor]) -> dict[str, Tensor]:
    """The parts of all processes, put together: one exchange of parts that are padded to equal length."""
    lengths = {name: _lengths(shards, name) for name in names}
    widths = {name: max(result) for name, result in lengths.items()}
    sent = torch.cat([pad(part, (0, widths[name] - len(part))) for name, part in zip(names, mine, strict=True)])
    received = sent.new_empty(shards.ranks.size, len(sent))
    dist.all_gather(list(received.unbind()), sent)
    columns = zip(names, torch.split(received, list(widths.values()), 1), strict=True)
    return {name: torch.cat([p[:n] for p, n in zip(parts, lengths[name], strict=True)]) for name, parts in columns}


def _lengths(shards: Shards, name: str) -> list[int]:
    """How many numbers each process sends of a parameter."""
    shape = shards.shapes[name]
    whole = shape[0] if len(shape) == 1 else math.prod(shape[:-1])
    cuts = [shards.cut(name, whole, rank) for rank in range(shards.ranks.size)]
    return [end - begin for begin, end in cuts]


def _in_fp64(grads: list[Tensor]) -> float:
    squares = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]).square().sum()
    dist.all_reduce(squares)
    return float(squares.sqrt())


class Asking:
    """Some tensors that belong to the parameters of `shards`, of which each rank has its parts.

    tensors: by name, those of this rank; a name is on all ranks or on none. owners: the parameter of each.
    """

    def __init__(self, shards: Shards, tensors: Mapping[str, Tensor], owners: Mapping[str, str]) -> None:
        self._shards, self._tensors, self._owners = shards, tensors, owners

    def whole(self, name: str) -> Tensor | Parts:
        """A whole tensor for rank 0, which may read it inside of `by_first` only; undivided ones are as they are."""
        tensor, owner = self._tensors[name], self._owners[name]
        if not self._shards.is_divided(owner, tensor):
            return tensor
        shape = (self._shards.length(owner, tensor), *tensor.shape[1:])
        return Parts(tensor.dtype, shape, lambda: self._parts(name, shape))

    def _parts(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        self._shards.ranks.tell(name)
        yield self._tensors[name]
        for rank in range(1, self._shards.ranks.size):
            begin, end = self._shards.cut(self._owners[name], shape[0], rank)
            part = self._tensors[name].new_empty(end - begin, *shape[1:])
            if part.numel():
                dist.recv(part, rank)
            yield part

    def by_first(self, make: Callable[[], T]) -> T:
        """As `Ranks.by_first`; `make` may read whole tensors."""
        ranks = self._shards.ranks
        created = None
        with ranks.together():
            if ranks.first:
                try:
                    created = make()
                finally:
                    ranks.tell(None)
            else:
                self._answer()
        return ranks.gather(created)[0]  # type: ignore[return-value]

    def _answer(self) -> None:
        while (name := _receive()) is not None:
            part = self._tensors[name].detach().contiguous()
            if part.numel():
                dist.send(part, 0)


def _receive() -> Any:
    """What rank 0 tells. A rank 0 that has ended is no mistake of this one, so the error stays what it is."""
    value = [None]
    dist.broadcast_object_list(value, 0)
    return value[0]
