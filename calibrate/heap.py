"""Freed memory returned to the operating system.

glibc keeps a freed block that lies below one in use. A calibration frees matrices of all sizes between small tensors
that stay, so layer after layer its heap would grow by about what a layer's weights take.
"""

import ctypes
import sys
from functools import cache
from typing import Any


def trim() -> None:
    """Return what glibc's malloc holds and nobody uses; nothing happens with another C library."""
    if malloc_trim := _malloc_trim():
        malloc_trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
