"""What the FP8 GEMM of a device can read.

Ada and Hopper multiply FP8 only with the contracted dimension contiguous in both operands ("tn"), and our CPU kernels
are written for that layout, too: the backward pass needs transposed data, made when the tensor is cast. Blackwell
reads any layout: a transposed view of the same data is enough, and no copy is made. The layout is a property of the
device; `operand_layout` overrides it, so that both paths can be tested on any machine.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, get_args

import torch

from fp8serve.fp8.torch_private import constant_in_graphs

Layout = Literal["tn", "any"]


class _Forced(threading.local):
    layout: Layout | None = None


_FORCED = _Forced()


@cache
def _is_blackwell(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (10, 0)


@constant_in_graphs
def _native(device: torch.device) -> Layout:
    return "any" if device.type == "cuda" and _is_blackwell(device) else "tn"


def layout_of(device: torch.device) -> Layout:
    """ "tn": both operands need the contracted dimension contiguous; "any": they may be transposed views."""
    return _FORCED.layout or _native(device)


@contextmanager
def operand_layout(layout: Layout) -> Iterator[None]:
    """Treat every device, in this thread, as one whose GEMM reads this layout ("tn" or "any")."""
    if layout not in get_args(Layout):
        raise ValueError(f'The layout must be "tn" or "any", found {layout!r}.')
    before, _FORCED.layout = _FORCED.layout, layout
    try:
        yield
    finally:
        _FORCED.layout = before
