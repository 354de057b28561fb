"""Which rows of every parameter each process holds: FSDP2 cuts the first dimension into parts of equal length, of which
the last may be shorter, or empty.

What belongs to a parameter and has another first dimension, as the scales of 8-bit moments have, is cut at the same
places. Parameters that are not trained are whole on every process.
"""

import math
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8serve.errors import JobError
from fp8serve.fp8.fsdp import local_rows
from fp8serve.ranks import Ranks
from fp8serve.train.eight_bit import BLOCK, SMALLEST, has_blocks


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
