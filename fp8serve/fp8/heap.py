"""Keep freed memory in the process: a large temporary then costs no page faults.

glibc serves blocks above a threshold (at most 32 MB) by `mmap` and gives them back when they are freed; it also gives
back the top of its heap. PyTorch allocates activations so, and frees them an op later: every op then writes to pages
that the kernel must first find and clear, 4 KiB at a time, which costs more than an elementwise op itself. With no
`mmap` and no trimming the same pages are used again.

For processes that are ours alone and do the same work again and again (the engine's worker, a trainer). Their resident
memory stays at its peak, which they would reach again in the next step. Not done on import: a library has no business
with its host's heap. Other C libraries than glibc are left as they are.
"""

import ctypes

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = 2**31 - 1
_STEP = 64 * 2**20  # bytes the heap grows by


def keep_freed_memory() -> bool:
    """Tells the allocator, once for the process; False where it cannot be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER, _M_TOP_PAD: _STEP}
    told = [mallopt(name, value) for name, value in wanted.items()]
    return all(told)
