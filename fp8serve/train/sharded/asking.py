"""Rank 0 writes checkpoints, and asks the others for their parts of a tensor when it is about to write them: it holds
one part of one tensor at a time beside its own.

The others answer until they are told that it is done, whether it has succeeded or not.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from fp8serve.model.storage.shards import Parts
from fp8serve.train.sharded.rows import Shards

T = TypeVar("T")


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
        made = None
        with ranks.together():
            if ranks.first:
                try:
                    made = make()
                finally:
                    ranks.tell(None)
            else:
                self._answer()
        return ranks.gather(made)[0]  # type: ignore[return-value]

    def _answer(self) -> None:
        while (name := _heard()) is not None:
            part = self._tensors[name].detach().contiguous()
            if part.numel():
                dist.send(part, 0)


def _heard() -> Any:
    """What rank 0 tells. A rank 0 that has ended is no mistake of this one, so the error stays what it is."""
    value = [None]
    dist.broadcast_object_list(value, 0)
    return value[0]
