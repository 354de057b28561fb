"""Memory: what the machine has free, freed blocks returned to the operating system, and a bound for one step.

glibc keeps a freed block that lies below one in use. A calibration frees matrices of all sizes between small tensors
that stay, so with every layer its heap would grow by about the size of the layer's weights. Stacking experts' weights
would leave as much unused memory behind as the stacks take.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

RETAINED = (
    256 << 20
)  # bytes, about the temporaries of a small model; faulting them in again would cost a tenth of the time


_USAGE = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`; `fordblks` are the free bytes of its heaps."""

    _fields_ = [(name, ctypes.c_size_t) for name in _USAGE.split()]


def trim(retained: int | None = None) -> None:
    """Return the unused memory that glibc's malloc holds, if it is more than `retained` bytes, or `RETAINED`.

    Nothing happens with another C library; a glibc older than 2.33, which cannot count, returns everything.
    """
    if (libc := _glibc()) and held(libc) > (RETAINED if retained is None else retained):
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


def free_memory() -> int:
    """Bytes that the machine has free, or that the container (control group version 2) still may take, if fewer.

    macOS has no name for its free pages: there it is all memory that the machine has.
    """
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
