"""Maps files into memory, and controls which parts of them are in memory.

A page of a mapped file is read when it is first used, with a few of its neighbours, and the system drops pages when it
needs memory. This is slow for files larger than memory: a fault reads no more than the disk's read-ahead, often 128
KiB, and the pages that were not used for the longest time, which are dropped first, are those that a repeated pass over
the file needs next. A `Span` is read ahead in order and dropped after its use instead (engine/streaming.py).

A tensor of a mapped file may be written to. The pages that it changes become memory of this process, which no file
backs. The system does not reserve memory for them (MAP_NORESERVE); otherwise it would refuse to map a file that is
larger than its memory.
"""

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8serve.errors import MachineError, ModelError
from fp8serve.model.storage.opening import open_member

ADVISED_BYTES = 128 << 10  # Linux reads no more for one call than a disk's read-ahead, which is at least this
CAN_READ_AHEAD = sys.platform == "linux"  # elsewhere `Span.read` reads nothing
MADV_POPULATE_READ = 22  # of Linux 5.14
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python has a name for it from 3.13 on


class MappedFile(mmap.mmap):
    """A mapped file with its path, its address, its size and time when it was mapped, and a descriptor that is open as
    long as the mapping exists."""

    path: Path
    address: int
    descriptor: int
    version: tuple[int, int]


_MAPPED_FILES: WeakValueDictionary[int, MappedFile] = WeakValueDictionary()  # by start address


def map_file(path: Path) -> Tensor:
    """Maps a file and returns its bytes as a uint8 tensor; writing to it does not change the file. Raises ModelError
    if `open_member` refuses the file, or if it is empty."""
    with open_member(path, error=ModelError) as file:
        version = _version(file.fileno())
        if version[0] == 0:
            raise ModelError(f"{path} is empty; copy or download it again.")
        mapped = MappedFile(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        mapped.path, mapped.descriptor, mapped.version = path, os.dup(file.fileno()), version
    weakref.finalize(mapped, os.close, mapped.descriptor)
    content = torch.frombuffer(mapped, dtype=torch.uint8)
    mapped.address = content.data_ptr()
    _MAPPED_FILES[mapped.address] = mapped
    return content


class Span(NamedTuple):
    """The bytes of a mapped file from `start` to `end`."""

    file: MappedFile
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def is_inside(self, other: "Span") -> bool:
        return self.file is other.file and other.start <= self.start and self.end <= other.end

    def read_exactly(self) -> None:
        """Makes faults in these bytes read single pages from now on, and not their neighbours: for bytes that `read` or
        `advise` reads before every use, and for tables of which few rows are used."""
        if hasattr(mmap, "MADV_RANDOM"):
            first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
            self.file.madvise(mmap.MADV_RANDOM, first, self.end - first)

    def advise(self) -> None:
        """Tells the system that the bytes will be used soon, and does not wait until they are in memory."""
        if hasattr(os, "posix_fadvise"):
            for start in range(self.start, self.end, ADVISED_BYTES):
                size = min(ADVISED_BYTES, self.end - start)
                os.posix_fadvise(self.file.descriptor, start, size, os.POSIX_FADV_WILLNEED)

    def read(self) -> None:
        """Reads the bytes from the disk, in order, and maps them. Other threads run meanwhile. Raises MachineError if
        the file was written to or its disk fails."""
        self.advise()
        first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        result = _madvise(self.file.address + first, self.end - first, MADV_POPULATE_READ)
        if result == errno.EFAULT or _version(self.file.descriptor) != self.file.version:
            raise MachineError(
                f"{self.file.path} cannot be read: it was written to while it was in use, or its disk failed; start "
                "again with whole files."
            )

    def release(self) -> None:
        """Frees this process's whole pages, which discards what was written to them. The page cache may keep them."""
        first, end = -(-self.start // mmap.PAGESIZE), self.end // mmap.PAGESIZE
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self.file.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)

    def drop(self) -> None:
        """Frees the whole pages like `release`, in the page cache, too, unless another process has mapped them."""
        self.release()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.descriptor, self.start, self.size, os.POSIX_FADV_DONTNEED)


def _version(descriptor: int) -> tuple[int, int]:
    """Returns the size of a file and when it was last written to."""
    stat = os.fstat(descriptor)
    return stat.st_size, stat.st_mtime_ns


def _madvise(address: int, size: int, advice: int) -> int:
    """Calls madvise, with other threads running, which Python's own method does not allow. Returns the error number;
    a system without this advice is no error, because pages are then read when they are used."""
    if sys.platform != "linux":
        return 0
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)
    return ctypes.get_errno() if _libc().madvise(*arguments) else 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def span_of(tensor: Tensor) -> Span | None:
    """Returns the bytes from the first to the last element of a view of a mapped file, or None for another tensor."""
    base = tensor.untyped_storage().data_ptr()
    mapped = _MAPPED_FILES.get(base)
    if mapped is None:
        return None
    start = tensor.data_ptr() - base
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(mapped, start, start + (elements * tensor.itemsize if tensor.numel() else 0))


def join_spans(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans in the order of their files and offsets; adjacent and overlapping ones are joined."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.file.path, id(span.file), span.start)):
        last = joined[-1] if joined else None
        if last is not None and last.file is span.file and span.start <= last.end:
            joined[-1] = last._replace(end=max(last.end, span.end))
        else:
            joined.append(span)
    return joined


def release_pages(tensor: Tensor) -> None:
    """Frees the memory of a view of a mapped file, except pages that it shares with other tensors. The values do not
    change: the next access reads them from the file again."""
    span = span_of(tensor)
    if span is not None:
        span.release()
