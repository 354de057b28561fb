"""The memory of this process: freed blocks returned to the operating system, and a bound on what a step may take.

glibc keeps a freed block that lies below one in use. A calibration frees matrices of all sizes between small tensors
that stay, so with every layer its heap would grow by about the size of the layer's weights. Stacking experts' weights
would leave as much unused memory behind as the stacks take.
"""

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

KEPT = 256 << 20  # bytes, about the temporaries of a small model; faulting them in again would cost a tenth of the time


_USAGE = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`; `fordblks` are the free bytes of its heaps."""

    _fields_ = [(name, ctypes.c_size_t) for name in _USAGE.split()]


def trim(kept: int | None = None) -> None:
    """Return the unused memory that glibc's malloc holds, if it is more than `kept` bytes, or `KEPT`.

    Nothing happens with another C library; a glibc older than 2.33, which cannot count, returns everything.
    """
    if (libc := _glibc()) and held(libc) > (KEPT if kept is None else kept):
        libc.malloc_trim(0)


def held(libc: Any) -> float:
    """The unused bytes that malloc holds; infinite where glibc cannot tell."""
    return float(libc.mallinfo2().fordblks) if hasattr(libc, "mallinfo2") else float("inf")


@cache
def _glibc() -> Any:
    """The C library if it is glibc, else None."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "malloc_trim"):
        return None
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Usage  # type: ignore[union-attr]
    return libc


def address_space() -> int | None:
    """Bytes of address space that this process uses; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


@contextmanager
def limited_memory(most: int) -> Iterator[None]:
    """Inside the block this process, all its threads included, may map at most `most` further bytes; beyond that
    allocations fail, in Python with MemoryError. Without /proc (macOS) nothing is limited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if (used := address_space()) is None:
        yield
        return
    bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([used + most, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
