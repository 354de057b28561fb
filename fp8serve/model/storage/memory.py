"""Measures free memory, returns freed memory to the operating system, and limits the memory of a block of code.

glibc's malloc retains a freed block that lies below one in use. Calibration frees matrices of all sizes between small
tensors that stay, so its heap would grow by about the size of a layer's weights with every layer. Stacking experts'
weights would retain as much unused memory as the stacks need.
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

# About the size of a small model's temporary tensors; if `trim` released them, page faults would cost 10 % of the time.
RETAINED_BYTES = 256 << 20


_USAGE = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Usage(ctypes.Structure):
    """glibc's `struct mallinfo2`; `fordblks` is the number of free bytes in its heaps."""

    _fields_ = [(name, ctypes.c_size_t) for name in _USAGE.split()]


def trim(retained: int | None = None) -> None:
    """Returns unused memory of glibc's malloc to the system if it exceeds `retained` bytes, by default RETAINED_BYTES.

    With another C library this does nothing. A glibc older than 2.33 cannot count its free bytes and returns all of
    them.
    """
    limit = RETAINED_BYTES if retained is None else retained
    if (libc := _glibc()) and (not hasattr(libc, "mallinfo2") or libc.mallinfo2().fordblks > limit):
        libc.malloc_trim(0)


@cache
def _glibc() -> Any:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "malloc_trim"):
        return None
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Usage  # type: ignore[union-attr]
    return libc


def address_space() -> int | None:
    """Returns the bytes of address space that this process uses, or None without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


@contextmanager
def limited_memory(max_bytes: int) -> Iterator[None]:
    """Inside the block, all threads of this process together may allocate at most `max_bytes` further bytes.

    Larger allocations fail, in Python with MemoryError. Without /proc (macOS) nothing is limited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if (used := address_space()) is None:
        yield
        return
    bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([used + max_bytes, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_num_sharers = 1


def share_memory(count: int) -> None:
    """Declares that `count` processes allocate memory like this one, at the same time: the ranks of an engine."""
    global _num_sharers
    _num_sharers = count


def free_memory() -> int:
    """Returns the free memory in bytes: of the machine, or of a control group of this process (a container, a service)
    that has less. Processes that share it (`share_memory`) get equal parts.

    Pages of files count as free, because the system drops them when it needs memory. macOS does not report free pages;
    there the result is all memory of the machine.
    """
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return max(0, min([free, *_free_in_groups(_lines("/proc/self/cgroup"))])) // _num_sharers


def _free_in_groups(groups: list[str], root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yields the free bytes of each control group with a limit, for the lines of /proc/self/cgroup. A container may see
    its own group as the root of the mounted tree."""
    limit_names: tuple[str, ...]
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, limit_names, usage_name, prefix = root, ("memory.max", "memory.high"), "memory.current", ""
        elif "memory" in controllers.split(","):
            top, prefix = root / "memory", "total_"
            limit_names, usage_name = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
            texts = [line for name in limit_names for line in _lines(folder / name)]
            limits, usage = [int(text) for text in texts if text.isdigit()], _lines(folder / usage_name)
            if limits and usage:
                sizes = dict(line.split() for line in _lines(folder / "memory.stat"))
                of_files = sum(int(sizes.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
                yield min(limits) - int(usage[0]) + of_files


def _lines(path: str | Path) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
