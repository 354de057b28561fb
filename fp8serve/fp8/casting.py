"""How a tensor's spec (spec.py) quantizes an operand for the GEMMs that read it.

A matrix x [M, K] is read in two ways: by rows, contracting K, and by columns, contracting M (as x^T [K, M]). A scale
per tensor, and the 128x128 blocks of a weight, suit both: the matrix is cast once, and the columns are its transpose,
copied where the device's GEMM needs it (devices.py). A scale per row or per 1x128 block holds along one dimension only:
there the columns are cast from x^T on their own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.fp8.devices import layout_of
from fp8serve.fp8.ops import DTYPES, arithmetic
from fp8serve.fp8.ops.arithmetic import BLOCK, FP8_MAX, scale_from_amax
from fp8serve.fp8.spec import Granularity, QuantSpec, ScaleFormat

# The op that casts a tensor by its own content, and its arguments after (x, dtype).
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
_WIDTHS: dict[Granularity, int] = {"row": 0, "block1x128": BLOCK}
Cast = Callable[..., tuple[Tensor, Tensor]]
SCALE_DTYPES: dict[ScaleFormat, torch.dtype] = {"fp32": torch.float32, "power_of_2": torch.float32}


class Quantized(NamedTuple):
    """FP8 data [rows, K] quantized for contraction along K, and the scale_inv that goes with them."""

    q: Tensor
    scale_inv: Tensor


class Operand(NamedTuple):
    """One operand for both directions: `rowwise` is x [M, K], `columnwise` x^T [K, M]; None where no GEMM reads it."""

    rowwise: Quantized | None
    columnwise: Quantized | None


def _turned(data: Quantized) -> Quantized:
    """The data of the transposed matrix: a view where the device reads any layout, else a copy."""
    scale_inv = data.scale_inv.t()
    if layout_of(data.q.device) == "any":
        return Quantized(data.q.t(), scale_inv)
    return Quantized(torch.ops.fp8serve.transpose_fp8(data.q), scale_inv.contiguous())


def _both(data: Quantized, columnwise: bool) -> Operand:
    return Operand(data, _turned(data) if columnwise else None)


def from_quantized(q: Tensor, scale: Tensor, columnwise: bool) -> Operand:
    """Data that another op has quantized by this scale, for both directions."""
    return _both(Quantized(q, scale.reciprocal()), columnwise)


@cache
def _one(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones((), device=device)


def _unquantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in BF16, with a scale that changes nothing."""
    return x.to(torch.bfloat16), _one(x.device)


def content_cast(spec: QuantSpec) -> tuple[Cast, tuple[Any, ...]]:
    """(op, arguments): `op(x, *arguments)` casts x [M, K] by its own content to (q, scale_inv)."""
    if not spec.is_fp8:
        return _unquantized, ()
    name, more = _OPS[spec.granularity, spec.scale_format]
    return getattr(torch.ops.fp8serve, name).default, (DTYPES[spec.element], *more)


def content_strips(spec: QuantSpec) -> tuple[int, bool] | None:
    """(width, power_2) where every row of x [M, K] is cast by its own content: `width` columns share a scale, 0 for all
    of them, rounded down to a power of two or not. None for other casts."""
    if not spec.is_fp8 or spec.source != "current" or spec.granularity not in _WIDTHS:
        return None
    return _WIDTHS[spec.granularity], spec.scale_format == "power_of_2"


def cast_by_content(x: Tensor, spec: QuantSpec) -> Quantized:
    """Cast x [M, K] by its own content, for contraction along K."""
    op, arguments = content_cast(spec)
    return Quantized(*op(x, *arguments))


def cast_delayed(x: Tensor, spec: QuantSpec, scale: Tensor, columnwise: bool) -> tuple[Operand, Tensor]:
    """Cast by a scale known beforehand: the operand, and amax of x in the same read; cast and transpose are one op."""
    dtype, scale_inv = DTYPES[spec.element], scale.reciprocal()
    if columnwise and layout_of(x.device) == "tn":
        q, q_t, amax = torch.ops.fp8serve.quantize_transpose(x, scale, dtype)
        return Operand(Quantized(q, scale_inv), Quantized(q_t, scale_inv)), cast(Tensor, amax)
    q, amax = torch.ops.fp8serve.quantize(x, scale, dtype)
    return _both(Quantized(q, scale_inv), columnwise), cast(Tensor, amax)


def cast_by_amax(x: Tensor, amax: Tensor, spec: QuantSpec) -> Quantized:
    """Cast by an amax [] found elsewhere, such as that of a tensor of which x is one rank's part (distributed.py)."""
    dtype = DTYPES[spec.element]
    scale = scale_from_amax(amax, FP8_MAX[dtype], spec.scale_format == "power_of_2")
    q, _ = torch.ops.fp8serve.quantize(x, scale, dtype)
    return Quantized(q, scale.reciprocal())


def has_infinity(x: Tensor, operand: Operand) -> Tensor:
    """Whether x, cast by its own content into `operand`, holds an infinity, bool []; NaN beside it may hide it.

    An infinite amax makes the scale 1. A CPU can look at a scale without waiting, so there x is read once more only
    where some scale is 1.
    """
    data = operand.rowwise or operand.columnwise
    looks = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if data is None or x.numel() == 0 or (looks and not (data.scale_inv == 1).any()):
        return x.new_zeros((), dtype=torch.bool)
    low, high = x.aminmax()
    return low.isinf() | high.isinf()


def unhidden(operand: Operand, overflowed: Tensor) -> Operand:
    """A quantized gradient; with NaN for its scale_inv if it `overflowed`, bool [].

    A cast saturates infinities, and yet a loss scaler or a finite-norm check must see them. NaN stays NaN.
    """

    def marked(data: Quantized | None) -> Quantized | None:
        return data and Quantized(data.q, torch.where(overflowed, torch.nan, data.scale_inv))

    return Operand(marked(operand.rowwise), marked(operand.columnwise))


def cast_current(x: Tensor, spec: QuantSpec, rowwise: bool, columnwise: bool, sharers: Any = None) -> Operand:
    """Cast x [M, K] by its own content, for the asked directions.

    A scale for the whole tensor is found together with the `sharers`, the ranks that hold its other parts.
    """
    if spec.granularity == "tensor" and sharers is not None:
        amax = arithmetic.amax(x)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=sharers)
        return _both(cast_by_amax(x, amax, spec), columnwise)
    if spec.serves_both_directions:
        return _both(cast_by_content(x, spec), columnwise)
    return Operand(
        cast_by_content(x, spec) if rowwise else None,
        cast_by_content(x.t().contiguous(), spec) if columnwise else None,
    )
