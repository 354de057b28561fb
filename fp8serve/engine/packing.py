"""Packs weights into the order in which CPU kernels read them during decoding (csrc/cpu/gemm_packed.h).

With few sequences, a step's time is the time to read the weights. In a checkpoint's layout, a kernel reads sixteen rows
in parallel. A packed weight is one contiguous stream, which memory delivers faster and which needs fewer loads and
shuffles. Each weight is copied to huge pages, because prefetching restarts at every page. Then the pages of the mapped
file are released, so that no weight is in memory twice.

Packing takes a second or two for each gigabyte. Results have the same bits with packed and unpacked weights, so a
weight can be packed between any two steps, and the first token does not wait for it. An idle engine packs continuously.
A busy engine packs before each step, for as long as its last step took, until all weights are packed. With
`tensor_parallel`, every rank packs a weight when rank 0 does (leader.py).
"""

import math
import mmap
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8serve.fp8 import ops
from fp8serve.fp8.batch_invariant import BatchInvariantLinear
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.ops.packing import is_packable
from fp8serve.fp8.stacked import StackedExperts
from fp8serve.model.building import Model
from fp8serve.model.network.fusion import Projections
from fp8serve.model.storage.mapping import release_pages
from fp8serve.model.storage.memory import free_memory, trim

Packable = FrozenLinear | BatchInvariantLinear | Projections | StackedExperts
"""The modules whose weight [N, K] can be packed. The weight is None if it was replaced."""
MAX_MEMORY_FRACTION = 0.6  # of free memory, for packed weights; the KV cache may take a quarter


def worth_packing() -> bool:
    """Returns whether this machine's kernels read packed weights. Other kernels would unpack them at every call."""
    return ops.reads_packed()


class Packer:
    """Packs weights one by one, in the order in which a step reads them."""

    def __init__(self, modules: Sequence[Packable]) -> None:
        weights = [module.weight for module in modules]
        packable = [m for m, weight in zip(modules, weights, strict=True) if weight is not None and is_packable(weight)]
        size = sum(weight.nbytes for weight in weights if weight is not None and is_packable(weight))
        if size > MAX_MEMORY_FRACTION * free_memory():
            packable, size = [], 0  # a large model is read from the mapped file instead
        self._pending, self._memory = deque(packable), huge_pages(size)

    @property
    def has_pending(self) -> bool:
        """Whether weights remain to be packed."""
        return bool(self._pending)

    def pack(self, seconds: float = math.inf) -> None:
        """Packs weights until `seconds` have passed or all are packed. A weight is always packed to its end."""
        end = time.perf_counter() + seconds
        while self._pending and time.perf_counter() < end:
            self.pack_next()

    def pack_next(self) -> None:
        """Packs a weight, if one remains."""
        if not self._pending:
            return
        module = self._pending.popleft()
        weight = module.weight
        if weight is not None and is_packable(weight):  # else the weight was replaced in the meantime
            packed, self._memory = self._memory[: weight.nbytes], self._memory[weight.nbytes :]
            module.pack(packed.view(weight.dtype))
            release_pages(weight)
        trim(None if self._pending else 0)  # returns freed copies of weights from malloc to the system


def modules_to_pack(*models: Model) -> list[Packable]:
    """Returns all linear layers of the models, except a head that shares the embedding's weight. Returns none if this
    machine's kernels do not read packed weights."""
    return [module for model in models for module in _packable_modules(model)] if worth_packing() else []


def _packable_modules(model: Model) -> list[Packable]:
    embedding = model.embedding.weight.data_ptr()
    modules = [module for module in model.matrices() if isinstance(module, Packable)]
    return [module for module in modules if module.weight is None or module.weight.data_ptr() != embedding]


def huge_pages(size: int) -> Tensor:
    """Returns zeroed memory, uint8 [size], in huge pages if the system supports them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)
