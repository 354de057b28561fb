"""Files as tensors: mapped, read when touched, and released again.

A page that was read stays in this process's memory as long as the mapping lives, that is, until the last tensor of the
file is gone. After copying a tensor elsewhere, call `release_pages`.
"""

import mmap
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.model.storage.opening import open_member

_FILES: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by the address at which each begins


def map_file(path: Path) -> Tensor:
    """The bytes of a file, uint8; writing to them changes this process's memory only. ModelError: `path` is no file of
    its directory (`opening.open_member`), or is empty."""
    with open_member(path, error=ModelError) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    _FILES[whole.data_ptr()] = mapped
    return whole


def release_pages(tensor: Tensor) -> None:
    """Release the pages that only `tensor` covers from this process's memory, if it is a view of a mapped file.

    Its values do not change: they are read from the file again when touched.
    """
    base = tensor.untyped_storage().data_ptr()
    mapped = _FILES.get(base)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = tensor.data_ptr() - base
    first, end = -(-start // mmap.PAGESIZE), (start + tensor.nbytes) // mmap.PAGESIZE
    if end > first:
        mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)
