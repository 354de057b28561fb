"""Counts of the values that a cast to FP8 could not represent; only this module tells the three kinds apart.

    cut off              beyond the format's range: |x * scale| above CUT_OFF, the maximum and FP32's own roundings
    rounded to the top   within it, and the largest FP8 value is the nearest
    underflowed          not zero, and zero in FP8

The FP8 value alone does not tell: the largest may be either of the first two, and a zero may have been zero before
(docs/numerics.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import CUT_OFF

TOP_BITS = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}


class Tally(NamedTuple):
    """Numbers of elements, int64 [] each; `zeros` are all that are zero in FP8, the underflowed included."""

    saturated: Tensor
    rounded_to_top: Tensor
    underflowed: Tensor
    zeros: Tensor


def tally(x: Tensor, q: Tensor, scale_inv: Tensor) -> Tally:
    """Of values x in high precision and their FP8 data q, of one shape; scale_inv broadcasts over them."""
    magnitude, bits = x.abs().float(), q.view(torch.uint8) & 0x7F
    top, zero = bits == TOP_BITS[q.dtype], bits == 0
    cut = top & (magnitude > CUT_OFF[q.dtype] * scale_inv)
    return Tally(cut.sum(), (top & ~cut).sum(), (zero & (magnitude > 0)).sum(), zero.sum())
