"""Weights in the order in which decoding reads them (csrc/cpu/gemm_packed.h): packed once, beside the first requests.

A step of a few sequences waits for weights. In a checkpoint's order sixteen rows are read side by side; packed, they
are one stream, which memory delivers faster, and need fewer loads and shuffles before they are multiplied. So each
weight is copied into memory of the process, in huge pages, because a stream begins anew with every page; and the
pages of the mapped file are released, so that nothing is in memory twice.

Packing a gigabyte takes a second or two, and the first token does not wait for it. Sums, and with them tokens, are the
same to the last bit packed or not, so a matrix can be packed at any time between two steps: an idle engine does it at
once, a busy one for as long as its last step took, until all is done.
"""

import math
import mmap
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fp8serve.fp8 import ops
from fp8serve.fp8.batch_invariant_linear import BatchInvariantLinear
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.packing import is_packable
from fp8serve.fp8.stacked import Stacked
from fp8serve.model.building import Model
from fp8serve.model.network.fusing import Projections
from fp8serve.model.storage.memory import free_memory, trim
from fp8serve.model.storage.shards import release_pages

MEMORY_SHARE = 0.6  # the share of free memory that packed weights may take; up to a quarter belongs to the cache


def worth_packing() -> bool:
    """Whether this machine's kernels read packed weights directly; others would unpack them into rows again."""
    return ops.reads_packed()


class Packable(Protocol):
    """A weight [N, K] that can be read packed instead; None when that matrix no longer exists."""

    @property
    def weight(self) -> Tensor | None: ...
    def pack(self, out: Tensor) -> None: ...


class Packer:
    """Packs matrices one by one, in the order in which a step reads them."""

    def __init__(self, matrices: Sequence[Packable]) -> None:
        weights = [matrix.weight for matrix in matrices]
        chosen = [m for m, weight in zip(matrices, weights, strict=True) if weight is not None and is_packable(weight)]
        size = sum(weight.nbytes for weight in weights if weight is not None and is_packable(weight))
        if size > MEMORY_SHARE * free_memory():
            chosen, size = [], 0  # mapped weights of a model that is too large can be read again and again
        self._left, self._memory = deque(chosen), huge_pages(size)

    @property
    def pending(self) -> bool:
        return bool(self._left)

    def pack(self, seconds: float = math.inf) -> None:
        """Packs until `seconds` have passed or nothing is left; a matrix that was begun is finished."""
        end = time.perf_counter() + seconds
        while self._left and time.perf_counter() < end:
            self._pack_next(self._left.popleft())
            trim(None if self._left else 0)  # weights that were cast when they were loaded lay in malloc's memory

    def _pack_next(self, matrix: Packable) -> None:
        weight = matrix.weight
        if weight is None or not is_packable(weight):  # replaced since
            return
        own, self._memory = self._memory[: weight.nbytes], self._memory[weight.nbytes :]
        matrix.pack(own.view(weight.dtype))
        release_pages(weight)


def packer_of(*models: Model) -> Packer:
    """A packer for every linear that runs, model by model, except a head that is also the embedding. None where packing
    has no use."""
    return Packer([matrix for model in models for matrix in _packable(model)] if worth_packing() else [])


def _packable(model: Model) -> list[Packable]:
    shared = model.embedding.weight.data_ptr()
    kinds = FrozenLinear | BatchInvariantLinear | Projections | Stacked
    known = [matrix for matrix in model.matrices() if isinstance(matrix, kinds)]
    return [matrix for matrix in known if matrix.weight is None or matrix.weight.data_ptr() != shared]


def huge_pages(size: int) -> Tensor:
    """Zeroed memory, uint8 [size], in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)
