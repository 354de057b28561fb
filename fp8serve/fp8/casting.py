"""How a tensor's spec (spec.py) turns an operand into FP8 codes for the GEMMs that read it.

A matrix x [M, K] is read in two ways: by rows, contracting K, and by columns, contracting M (as x^T [K, M]). A scale
per tensor, and the 128x128 blocks of a weight, suit both: the codes are cast once and the columns are their transpose,
copied where the device's GEMM needs it (devices.py). A scale per row or per 1x128 block holds along one dimension only:
there the columns are cast from x^T on their own.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.fp8 import reference
from fp8serve.fp8.devices import layout_of
from fp8serve.fp8.ops import DTYPES
from fp8serve.fp8.reference import FP8_MAX, scale_from_amax
from fp8serve.fp8.spec import Granularity, QuantSpec, ScaleFormat

# The op that casts a tensor by its own content, and what follows (x, dtype) among its arguments.
_OPS: dict[tuple[Granularity, ScaleFormat], tuple[str, tuple[Any, ...]]] = {
    ("tensor", "fp32"): ("quantize_current", (False,)),
    ("tensor", "power_of_2"): ("quantize_current", (True,)),
    ("row", "fp32"): ("quantize_rowwise", (False,)),
    ("row", "power_of_2"): ("quantize_rowwise", (True,)),
    ("block1x128", "fp32"): ("quantize_block", (1, False)),
    ("block1x128", "power_of_2"): ("quantize_block", (1, True)),
    ("block128x128", "fp32"): ("quantize_block", (128, False)),
    ("block128x128", "power_of_2"): ("quantize_block", (128, True)),
}


class Codes(NamedTuple):
    """FP8 codes [rows, K] quantized for contraction along K, and the scale_inv that goes with them."""

    q: Tensor
    scale_inv: Tensor


class Pair(NamedTuple):
    """One operand for both directions: `rows` of x [M, K], `cols` of x^T [K, M]; None where no GEMM reads it."""

    rows: Codes | None
    cols: Codes | None


def _turned(codes: Codes) -> Codes:
    """The codes of the transposed matrix: a view where the device reads any layout, else a copy."""
    scale_inv = codes.scale_inv.t()
    if layout_of(codes.q.device) == "any":
        return Codes(codes.q.t(), scale_inv)
    return Codes(torch.ops.fp8serve.transpose_codes(codes.q), scale_inv.contiguous())


def _both(codes: Codes, cols: bool) -> Pair:
    return Pair(codes, _turned(codes) if cols else None)


def from_codes(q: Tensor, scale: Tensor, cols: bool) -> Pair:
    """Codes that another op has cast by this scale, for both directions."""
    return _both(Codes(q, scale.reciprocal()), cols)


def content_cast(spec: QuantSpec) -> tuple[Any, tuple[Any, ...]]:
    """(op, arguments): `op(x, *arguments)` casts x [M, K] by its own content to (q, scale_inv)."""
    name, more = _OPS[spec.granularity, spec.scale_format]
    return getattr(torch.ops.fp8serve, name), (DTYPES[spec.element], *more)


def cast_by_content(x: Tensor, spec: QuantSpec) -> Codes:
    """Cast x [M, K] by its own content, for contraction along K."""
    op, arguments = content_cast(spec)
    return Codes(*op(x, *arguments))


def cast_delayed(x: Tensor, spec: QuantSpec, scale: Tensor, cols: bool) -> tuple[Pair, Tensor]:
    """Cast by a scale known beforehand: the codes, and amax of x in the same read; cast and transpose are one op."""
    dtype, scale_inv = DTYPES[spec.element], scale.reciprocal()
    if cols and layout_of(x.device) == "tn":
        q, q_t, amax = torch.ops.fp8serve.quantize_transpose(x, scale, dtype)
        return Pair(Codes(q, scale_inv), Codes(q_t, scale_inv)), cast(Tensor, amax)
    q, amax = torch.ops.fp8serve.quantize(x, scale, dtype)
    return _both(Codes(q, scale_inv), cols), cast(Tensor, amax)


def cast_by_amax(x: Tensor, amax: Tensor, spec: QuantSpec) -> Codes:
    """Cast by an amax [] found elsewhere: of a tensor of which x is one rank's part (distributed.py)."""
    dtype = DTYPES[spec.element]
    scale = scale_from_amax(amax, FP8_MAX[dtype], spec.scale_format == "power_of_2")
    q, _ = torch.ops.fp8serve.quantize(x, scale, dtype)
    return Codes(q, scale.reciprocal())


def has_infinity(x: Tensor, pair: Pair) -> Tensor:
    """Whether x, cast by its own content into `pair`, holds an infinity, bool []; NaN beside it may hide it.

    An infinite amax makes the scale 1. So a CPU, which can look at a scale without waiting for it, reads x once more
    only where some scale is 1.
    """
    codes = pair.rows or pair.cols
    looks = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if codes is None or x.numel() == 0 or (looks and not (codes.scale_inv == 1).any()):
        return x.new_zeros((), dtype=torch.bool)
    low, high = x.aminmax()
    return low.isinf() | high.isinf()


def unhidden(pair: Pair, overflowed: Tensor) -> Pair:
    """The codes of a gradient; with NaN for their scale_inv if it `overflowed`, bool [].

    A cast saturates infinities, and yet a loss scaler or a finite-norm check must see them. NaN has a code of its own.
    """

    def marked(codes: Codes | None) -> Codes | None:
        return codes and Codes(codes.q, torch.where(overflowed, torch.nan, codes.scale_inv))

    return Pair(marked(pair.rows), marked(pair.cols))


def cast_current(x: Tensor, spec: QuantSpec, rows: bool, cols: bool, sharers: Any = None) -> Pair:
    """Cast x [M, K] by its own content, for the asked directions.

    A scale for the whole tensor is found together with the `sharers`, the ranks that hold its other parts.
    """
    if spec.granularity == "tensor" and sharers is not None:
        amax = reference.amax(x)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=sharers)
        return _both(cast_by_amax(x, amax, spec), cols)
    if spec.serves_both_directions:
        return _both(cast_by_content(x, spec), cols)
    return Pair(
        cast_by_content(x, spec) if rows else None,
        cast_by_content(x.t().contiguous(), spec) if cols else None,
    )
