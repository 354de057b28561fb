"""How a tensor's spec (spec.py) quantizes an operand for the GEMMs that read it.

A matrix x [M, K] is read in two ways: by rows, contracting K, and by columns, contracting M (as x^T [K, M]). A scale
per tensor, and the 128x128 blocks of a weight, suit both: the matrix is cast once, and the columns are its transpose,
copied where the device's GEMM needs it. A scale per row or per 1x128 block holds along one dimension only: there the
columns are cast from x^T on their own.

Ada and Hopper multiply FP8 only with the contracted dimension contiguous in both operands ("tn"), and our CPU kernels
are written for that layout, too: the backward pass needs transposed data, made when the tensor is cast. Blackwell
reads any layout: a transposed view of the same data is enough, and no copy is made. The layout is a property of the
device; `operand_layout` overrides it, so that both paths can be tested on any machine.

A cast saturates infinities, and yet a loss scaler or a finite-norm check must see those of a gradient. So the scale_inv
of a gradient that holds one is NaN (`infinity_is_nan`); NaN stays NaN without that.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.fp8.ops import DTYPES, arithmetic
from fp8serve.fp8.ops.arithmetic import BLOCK, FP8_MAX, scale_from_amax
from fp8serve.fp8.spec import Granularity, QuantSpec, ScaleFormat
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


Cast = Callable[..., tuple[Tensor, Tensor]]
_CURRENT: Cast = torch.ops.fp8serve.quantize_current.default
_ROWWISE: Cast = torch.ops.fp8serve.quantize_rowwise.default
_BLOCK: Cast = torch.ops.fp8serve.quantize_block.default
# The op that casts a tensor by its own content, and its arguments after (x, dtype).
_OPS: dict[tuple[Granularity, ScaleFormat], tuple[Cast, tuple[Any, ...]]] = {
    ("tensor", "fp32"): (_CURRENT, (False,)),
    ("tensor", "power_of_2"): (_CURRENT, (True,)),
    ("row", "fp32"): (_ROWWISE, (False,)),
    ("row", "power_of_2"): (_ROWWISE, (True,)),
    ("block1x128", "fp32"): (_BLOCK, (1, False)),
    ("block1x128", "power_of_2"): (_BLOCK, (1, True)),
    ("block128x128", "fp32"): (_BLOCK, (128, False)),
    ("block128x128", "power_of_2"): (_BLOCK, (128, True)),
}
_WIDTHS: dict[Granularity, int] = {"row": 0, "block1x128": BLOCK}
_quantize = torch.ops.fp8serve.quantize.default
_quantize_transpose = torch.ops.fp8serve.quantize_transpose.default
_quantize_delayed = torch.ops.fp8serve.quantize_delayed.default
_transpose_fp8 = torch.ops.fp8serve.transpose_fp8.default
_transpose_half = torch.ops.fp8serve.transpose_half.default
SCALE_DTYPES: dict[ScaleFormat, torch.dtype] = {"fp32": torch.float32, "power_of_2": torch.float32}


class Quantized(NamedTuple):
    """FP8 data [rows, K] quantized for contraction along K, and the scale_inv that goes with them."""

    q: Tensor
    scale_inv: Tensor


class Operand(NamedTuple):
    """One operand for both directions: `rowwise` is x [M, K], `columnwise` x^T [K, M]; None where no GEMM reads it."""

    rowwise: Quantized | None
    columnwise: Quantized | None

    def only(self, rowwise: bool, columnwise: bool) -> "Operand":
        """The asked directions of it."""
        return Operand(self.rowwise if rowwise else None, self.columnwise if columnwise else None)

    def map(self, change: Callable[[Quantized], Quantized]) -> "Operand":
        """What `change` makes of each direction that there is."""
        return Operand(self.rowwise and change(self.rowwise), self.columnwise and change(self.columnwise))


def _turned(data: Quantized) -> Quantized:
    """The data of the transposed matrix: a view where the device reads any layout, else a copy."""
    scale_inv = data.scale_inv if data.scale_inv.dim() == 0 else data.scale_inv.t()
    if layout_of(data.q.device) == "any":
        return Quantized(data.q.t(), scale_inv)
    return Quantized(_transpose_fp8(data.q), scale_inv.contiguous())


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
    op, more = _OPS[spec.granularity, spec.scale_format]
    return op, (DTYPES[spec.element], *more)


def content_strips(spec: QuantSpec) -> tuple[int, bool] | None:
    """(width, power_2) where every row of x [M, K] is cast by its own content: `width` columns share a scale, 0 for all
    of them, rounded down to a power of two or not. None for other casts."""
    if not spec.is_fp8 or spec.source != "current" or spec.granularity not in _WIDTHS:
        return None
    return _WIDTHS[spec.granularity], spec.scale_format == "power_of_2"


def cast_by_content(x: Tensor, spec: QuantSpec, infinity_is_nan: bool = False) -> Quantized:
    """Cast x [M, K] by its own content, for contraction along K. infinity_is_nan, of FP8 data: a scale_inv is NaN where
    the amax is infinite."""
    op, arguments = content_cast(spec)
    return Quantized(*(op(x, *arguments, True) if infinity_is_nan else op(x, *arguments)))


def cast_delayed(x: Tensor, spec: QuantSpec, scale: Tensor, columnwise: bool) -> tuple[Operand, Tensor]:
    """Cast by a scale known beforehand: the operand, and amax of x in the same read; cast and transpose are one op."""
    dtype, scale_inv = DTYPES[spec.element], scale.reciprocal()
    if columnwise and layout_of(x.device) == "tn":
        q, q_t, amax = _quantize_transpose(x, scale, dtype)
        return Operand(Quantized(q, scale_inv), Quantized(q_t, scale_inv)), cast(Tensor, amax)
    q, amax = _quantize(x, scale, dtype)
    return _both(Quantized(q, scale_inv), columnwise), cast(Tensor, amax)


def cast_recording(
    x: Tensor, spec: QuantSpec, scale: Tensor, history: Tensor | None, columnwise: bool, infinity_is_nan: bool
) -> Operand:
    """`cast_delayed` in one op, which also raises the staging slot of `history`, if there is one, to the amax.

    infinity_is_nan: the scale_inv of a tensor that holds an infinity is NaN.
    """
    turned = columnwise and layout_of(x.device) == "tn"
    q, q_t, scale_inv = _quantize_delayed(x, scale, history, DTYPES[spec.element], turned, infinity_is_nan)
    data = Quantized(q, scale_inv)
    return Operand(data, Quantized(q_t, scale_inv)) if turned else _both(data, columnwise)


def cast_by_amax(x: Tensor, amax: Tensor, spec: QuantSpec) -> Quantized:
    """Cast by an amax [] found elsewhere, such as that of a tensor of which x is one rank's part (distributed.py)."""
    dtype = DTYPES[spec.element]
    scale = scale_from_amax(amax, FP8_MAX[dtype], spec.scale_format == "power_of_2")
    q, _ = _quantize(x, scale, dtype)
    return Quantized(q, scale.reciprocal())


def unhidden(data: Quantized, overflowed: Tensor) -> Quantized:
    """A quantized gradient; with NaN for its scale_inv if it `overflowed`, bool []."""
    return Quantized(data.q, torch.where(overflowed, torch.nan, data.scale_inv))


def _nan_in_all(operand: Operand) -> Operand:
    """A NaN in one scale_inv of a direction becomes a NaN in all of them."""

    def spread(data: Quantized) -> Quantized:
        if data.scale_inv.numel() == 0:
            return data
        # Added zero times, a number changes nothing, and NaN all; a maximum is NaN if one of its numbers is.
        return Quantized(data.q, torch.add(data.scale_inv, data.scale_inv.amax(), alpha=0))

    return operand.map(spread)


def _transposed(x: Tensor) -> Tensor:
    """x^T, contiguous: torch's copy of a transposed matrix is slow, and a kernel turns elements of two bytes."""
    turned = x.t()
    return turned.contiguous() if x.itemsize != 2 or turned.is_contiguous() else cast(Tensor, _transpose_half(x))


def cast_current(
    x: Tensor, spec: QuantSpec, rowwise: bool, columnwise: bool, sharers: Any = None, infinity_is_nan: bool = False
) -> Operand:
    """Cast x [M, K] by its own content, for the asked directions.

    A scale for the whole tensor is found together with the `sharers`, the ranks that hold its other parts.
    infinity_is_nan: every scale_inv is NaN if x holds an infinity.
    """
    if spec.granularity == "tensor" and sharers is not None:
        return _both(_cast_with_sharers(x, spec, sharers, infinity_is_nan), columnwise)
    if spec.granularity == "tensor":
        return _both(cast_by_content(x, spec, infinity_is_nan), columnwise)
    if spec.serves_both_directions:
        operand = _both(cast_by_content(x, spec, infinity_is_nan), columnwise)
    else:
        operand = Operand(
            cast_by_content(x, spec, infinity_is_nan) if rowwise else None,
            cast_by_content(_transposed(x), spec, infinity_is_nan) if columnwise else None,
        )
    return _nan_in_all(operand) if infinity_is_nan else operand


def _cast_with_sharers(x: Tensor, spec: QuantSpec, sharers: Any, infinity_is_nan: bool) -> Quantized:
    amax = arithmetic.amax(x)
    overflowed = amax.isinf()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=sharers)
    data = cast_by_amax(x, amax, spec)
    return unhidden(data, overflowed) if infinity_is_nan else data
