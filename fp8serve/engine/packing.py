"""Weights in the order in which decoding reads them (csrc/cpu/gemm_packed.h): packed once, when a model is loaded.

A step of a few sequences waits for weights. In a checkpoint's order sixteen rows are read side by side; packed, they
are one stream, which memory delivers faster, and need fewer loads and shuffles to become what is multiplied. So each
weight is copied into memory of our own, in huge pages, because a stream begins anew with every page; and what was
mapped of the file is let go, so that nothing is in memory twice. The sums, and with them the tokens, are the same to
the last bit.
"""

import mmap

import torch
from torch import Tensor

from fp8serve.engine.invariant import OwnLinear
from fp8serve.fp8 import ops
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.reference_packed import is_packable
from fp8serve.model.decoder import Decoder
from fp8serve.model.mapped import let_go


def worth_packing() -> bool:
    """Whether this machine's kernels read packed weights as they are; others would make rows of them again."""
    return ops.cpu_isa() == "avx512bf16" and "cpu kernel" in ops.backends()["packed_mm"]


def pack(model: Decoder) -> None:
    """Packs every linear of `model`, in place; a head that is the embedding too stays as it is."""
    layers = [module for module in model.modules() if isinstance(module, FrozenLinear | OwnLinear)]
    shared = model.model.embed_tokens.weight.data_ptr()
    chosen = [m for m in layers if m.weight.data_ptr() != shared and is_packable(m.weight)]
    memory = _huge_pages(sum(layer.weight.nbytes for layer in chosen))
    for layer in chosen:  # in the order of the model: projections that are read together lie side by side
        weight = layer.weight
        own, memory = memory[: weight.nbytes], memory[weight.nbytes :]
        layer.pack(own.view(weight.dtype))
        let_go(weight)


def _huge_pages(size: int) -> Tensor:
    """Zeroed memory, uint8 [size], in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)
