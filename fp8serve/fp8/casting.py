"""The casts that quantize a tensor by its spec (spec.py) into operands of FP8 GEMMs.

GEMMs read a matrix x [M, K] in two directions: rowwise, contracting K, and columnwise, contracting M (as x^T [K, M]).
A scale per tensor, or per 128x128 block of a weight, suits both directions: the matrix is cast once, and the columnwise
data are its transpose, copied if the device's GEMM needs a copy. A scale per row or per 1x128 block is valid along one
dimension only, so the columnwise data are cast from x^T separately. The same holds for MX blocks of 1x32, and for
blocks of 1x16 in NVFP4, whose columnwise data may be rotated before (ops/nvfp4.py).

Ada and Hopper multiply FP8 only if the contracted dimension is contiguous in both operands (layout "tn"). Our CPU
kernels need the same layout. On these devices a cast also produces the transposed data for the backward pass. Blackwell
reads any layout, so a transposed view of the same data suffices. The layout is a property of the device.

A cast saturates infinities, but a loss scaler or a finite-norm check must see an infinite gradient. So the scale_inv of
a gradient with an infinity is NaN (`infinity_is_nan`). A NaN value stays NaN in any case.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.fp8.ops import DTYPES, arithmetic, e2m1
from fp8serve.fp8.ops.arithmetic import BLOCK, E8M0, FP8_MAX, scale_from_amax
from fp8serve.fp8.ops.microscaling import NAN
from fp8serve.fp8.spec import Granularity, QuantSpec, ScaleFormat
from fp8serve.fp8.torch_private import constant_in_graphs

Layout = Literal["tn", "any"]


@cache
def _is_blackwell(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (10, 0)


@constant_in_graphs
def layout_of(device: torch.device) -> Layout:
    """Returns "tn" if the device's GEMM needs the contracted dimension contiguous, "any" if it reads transposed
    views."""
    return "any" if device.type == "cuda" and _is_blackwell(device) else "tn"


Cast = Callable[..., tuple[Tensor, Tensor]]
_CURRENT: Cast = torch.ops.fp8serve.quantize_current.default
_ROWWISE: Cast = torch.ops.fp8serve.quantize_rowwise.default
_BLOCK: Cast = torch.ops.fp8serve.quantize_block.default
_MX: Cast = torch.ops.fp8serve.quantize_mx.default
_cast_nvfp4 = torch.ops.fp8serve.cast_nvfp4.default
_rotate = torch.ops.fp8serve.rotate.default
# The op of current scaling for each granularity and scale format, and its arguments after (x, dtype).
_CURRENT_OPS: dict[tuple[Granularity, ScaleFormat], tuple[Cast, tuple[Any, ...]]] = {
    ("tensor", "fp32"): (_CURRENT, (False,)),
    ("tensor", "power_of_2"): (_CURRENT, (True,)),
    ("row", "fp32"): (_ROWWISE, (False,)),
    ("row", "power_of_2"): (_ROWWISE, (True,)),
    ("block1x128", "fp32"): (_BLOCK, (1, False)),
    ("block1x128", "power_of_2"): (_BLOCK, (1, True)),
    ("block128x128", "fp32"): (_BLOCK, (128, False)),
    ("block128x128", "power_of_2"): (_BLOCK, (128, True)),
    ("block1x32", "e8m0"): (_MX, ()),
}
_COLUMNS_PER_SCALE: dict[Granularity, int] = {"row": 0, "block1x128": BLOCK}  # 0: all columns
_quantize = torch.ops.fp8serve.quantize.default
_quantize_transpose = torch.ops.fp8serve.quantize_transpose.default
_quantize_delayed = torch.ops.fp8serve.quantize_delayed.default
_transpose_fp8 = torch.ops.fp8serve.transpose_fp8.default
_transpose_half = torch.ops.fp8serve.transpose_half.default
SCALE_DTYPES: dict[ScaleFormat, torch.dtype] = {
    "fp32": torch.float32,
    "power_of_2": torch.float32,
    "e8m0": E8M0,
    "e4m3": torch.float8_e4m3fn,
}


class Quantized(NamedTuple):
    """FP8 data [rows, K], quantized for contraction along K, and their scale_inv. Of NVFP4 the data are BF16."""

    q: Tensor
    scale_inv: Tensor

    @property
    def is_nvfp4(self) -> bool:
        return self.q.dtype is torch.bfloat16


class QuantizedWeight(NamedTuple):
    """A quantized weight [N, K], which is q * scale_inv * global_scale.

    `q` is FP8 [N, K], or uint8 [N, K/2] with two E2M1 codes in a byte. Only NVFP4 has a `global_scale`, FP32 [].
    """

    q: Tensor
    scale_inv: Tensor
    global_scale: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Returns the weight in FP32 [N, K]."""
        if self.q.dtype is torch.uint8:
            return e2m1.dequantize(*self)
        return arithmetic.dequantize(self.q, self.scale_inv)

    def full_scale(self) -> Tensor:
        """Returns the product of both scales, FP32 in the shape of `scale_inv`."""
        scale = self.scale_inv.float()
        return scale if self.global_scale is None else scale * self.global_scale.reshape(-1, 1)


class Operand(NamedTuple):
    """A quantized matrix: `rowwise` is x [M, K], `columnwise` is x^T [K, M]; None if no GEMM reads that direction."""

    rowwise: Quantized | None
    columnwise: Quantized | None

    def only(self, rowwise: bool, columnwise: bool) -> "Operand":
        """Returns the operand with only the requested directions."""
        return Operand(self.rowwise if rowwise else None, self.columnwise if columnwise else None)

    def map(self, function: Callable[[Quantized], Quantized]) -> "Operand":
        """Returns the operand with `function` applied to each direction that is not None."""
        return Operand(self.rowwise and function(self.rowwise), self.columnwise and function(self.columnwise))


def _transposed_data(data: Quantized) -> Quantized:
    """Returns the data of the transposed matrix: a view if the device reads any layout, else a copy."""
    scale_inv = data.scale_inv if data.scale_inv.dim() == 0 else data.scale_inv.t()
    if data.is_nvfp4:
        return Quantized(_contiguous_transpose(data.q), scale_inv)
    if layout_of(data.q.device) == "any":
        return Quantized(data.q.t(), scale_inv)
    return Quantized(_transpose_fp8(data.q), scale_inv.contiguous())


def _with_columnwise(data: Quantized, columnwise: bool) -> Operand:
    return Operand(data, _transposed_data(data) if columnwise else None)


def operand_from_data(q: Tensor, scale: Tensor, columnwise: bool) -> Operand:
    """Returns the operand of data that another op has quantized with this scale."""
    return _with_columnwise(Quantized(q, scale.reciprocal()), columnwise)


@cache
def _one(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones((), device=device)


def _cast_to_bf16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x in BF16 and the scale 1."""
    return x.to(torch.bfloat16), _one(x.device)


def current_cast_op(spec: QuantSpec) -> tuple[Cast, tuple[Any, ...]]:
    """Returns (op, arguments) of current scaling: `op(x, *arguments)` casts x [M, K] to (q, scale_inv)."""
    if spec.is_nvfp4:
        return cast_nvfp4, (spec,)
    if not spec.is_fp8:
        return _cast_to_bf16, ()
    op, arguments = _CURRENT_OPS[spec.granularity, spec.scale_format]
    return op, (DTYPES[spec.element], *arguments)


def cast_nvfp4(x: Tensor, spec: QuantSpec, columnwise: bool = False, seed: Tensor | None = None) -> Quantized:
    """Casts x [M, K] for contraction along K, or with `columnwise` for contraction along M.

    `seed`, int64 [], is that of the random numbers if the cast rounds stochastically. Without one it rounds to nearest.
    """
    if columnwise:
        x = _contiguous_transpose(_rotate(x) if spec.rotated else x)
    by_row = spec.row_scaled and not columnwise  # the columns of x have one scale, as in Transformer Engine
    return Quantized(*_cast_nvfp4(x, by_row, spec.block[0], seed, int(columnwise)))


def draw_seed() -> Tensor:
    """Returns a seed for stochastic rounding, int64 [] on the CPU, from torch's random numbers.

    A trainer seeds these for every microbatch, so a run that resumes draws the same seeds.
    """
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


def rowwise_scale_options(spec: QuantSpec) -> tuple[int, bool] | None:
    """Returns (columns, power_2) for current scaling by row or by 1x128 blocks, or None for other specs.

    `columns` is the number of columns that share a scale, 0 for all columns. If `power_2` is True, scales are rounded
    down to powers of two.
    """
    if not spec.is_fp8 or spec.source != "current" or spec.granularity not in _COLUMNS_PER_SCALE:
        return None
    return _COLUMNS_PER_SCALE[spec.granularity], spec.scale_format == "power_of_2"


def cast_current_rowwise(x: Tensor, spec: QuantSpec, infinity_is_nan: bool = False) -> Quantized:
    """Casts x [M, K] with current scaling, for contraction along K.

    If `infinity_is_nan` is True, the scale_inv of an infinite amax is NaN; this requires an FP8 format.
    """
    op, arguments = current_cast_op(spec)
    return Quantized(*(op(x, *arguments, True) if infinity_is_nan else op(x, *arguments)))


def cast_weight(weight: Tensor, spec: QuantSpec) -> QuantizedWeight:
    """Casts a weight [N, K] with current scaling, or to 4 bits."""
    if spec.is_4bit and spec.is_mx:
        return QuantizedWeight(*e2m1.quantize_mxfp4(weight))
    if spec.is_4bit:
        return QuantizedWeight(*e2m1.quantize_nvfp4(weight, spec.four_over_six, spec.block[0] or 1))
    return QuantizedWeight(*cast_current_rowwise(weight, spec))


def cast_delayed(x: Tensor, spec: QuantSpec, scale: Tensor, columnwise: bool) -> tuple[Operand, Tensor]:
    """Casts x with a known scale and returns the operand and the amax of x, in one read of x."""
    dtype, scale_inv = DTYPES[spec.element], scale.reciprocal()
    if columnwise and layout_of(x.device) == "tn":
        q, q_t, amax = _quantize_transpose(x, scale, dtype)
        return Operand(Quantized(q, scale_inv), Quantized(q_t, scale_inv)), cast(Tensor, amax)
    q, amax = _quantize(x, scale, dtype)
    return _with_columnwise(Quantized(q, scale_inv), columnwise), cast(Tensor, amax)


def cast_recording(
    x: Tensor, spec: QuantSpec, scale: Tensor, history: Tensor | None, columnwise: bool, infinity_is_nan: bool
) -> Operand:
    """Casts x with a known scale and raises the staging slot of `history`, if it is not None, to the amax of x.

    If `infinity_is_nan` is True and x has an infinity, the scale_inv is NaN.
    """
    transposes = transposes_data(x.device, columnwise)
    q, q_t, scale_inv = _quantize_delayed(x, scale, history, DTYPES[spec.element], transposes, infinity_is_nan)
    return operand_of_cast(q, q_t, scale_inv, columnwise)


def transposes_data(device: torch.device, columnwise: bool) -> bool:
    """Returns whether a cast must also write the transposed data, because a GEMM of the device reads no view."""
    return columnwise and layout_of(device) == "tn"


def operand_of_cast(q: Tensor, q_t: Tensor, scale_inv: Tensor, columnwise: bool) -> Operand:
    """Returns the operand of a cast under delayed scaling. q_t is empty if the cast wrote no transposed data."""
    data = Quantized(q, scale_inv)
    return Operand(data, Quantized(q_t, scale_inv)) if q_t.shape[0] or not columnwise else _with_columnwise(data, True)


def cast_with_amax(x: Tensor, amax: Tensor, spec: QuantSpec) -> Quantized:
    """Casts x with the scale of a given amax [], for example the amax of a tensor of which x is one rank's shard."""
    dtype = DTYPES[spec.element]
    scale = scale_from_amax(amax, FP8_MAX[dtype], spec.scale_format == "power_of_2")
    q, _ = _quantize(x, scale, dtype)
    return Quantized(q, scale.reciprocal())


def with_nan_scale(data: Quantized, has_overflowed: Tensor) -> Quantized:
    """Returns the data with NaN as scale_inv if `has_overflowed`, bool [], is True."""
    return Quantized(data.q, torch.where(has_overflowed, torch.nan, data.scale_inv))


def _spread_nan(operand: Operand) -> Operand:
    """Sets every scale_inv of a direction to NaN if one of them is NaN."""

    def spread(data: Quantized) -> Quantized:
        if data.scale_inv.numel() == 0:
            return data
        if data.scale_inv.dtype == E8M0:
            codes = data.scale_inv.view(torch.uint8)
            return Quantized(data.q, torch.where(codes.amax() == NAN, NAN, codes).view(E8M0))
        # amax() is NaN if any number is. Adding 0 * NaN makes a number NaN; adding 0 * a number does not change it.
        return Quantized(data.q, torch.add(data.scale_inv, data.scale_inv.amax(), alpha=0))

    return operand.map(spread)


def _contiguous_transpose(x: Tensor) -> Tensor:
    """Returns x^T, contiguous. torch's copy is slow, so a kernel of ours transposes elements of two bytes."""
    x_t = x.t()
    return x_t.contiguous() if x.itemsize != 2 or x_t.is_contiguous() else cast(Tensor, _transpose_half(x))


def cast_current(
    x: Tensor,
    spec: QuantSpec,
    rowwise: bool,
    columnwise: bool,
    shard_group: Any = None,
    infinity_is_nan: bool = False,
    seed: Tensor | None = None,
) -> Operand:
    """Casts x [M, K] with current scaling, for the requested directions.

    If `shard_group` is given, x is one shard of a tensor over its ranks, and a scale per tensor is computed from the
    amaxes of all shards. If `infinity_is_nan` is True and x has an infinity, every scale_inv is NaN. `seed` is for
    stochastic rounding.
    """
    if spec.is_nvfp4 and not spec.serves_both_directions:
        return Operand(
            cast_nvfp4(x, spec, False, seed) if rowwise else None,
            cast_nvfp4(x, spec, True, seed) if columnwise else None,
        )
    if spec.is_nvfp4:
        return _with_columnwise(cast_nvfp4(x, spec), columnwise)
    if spec.granularity == "tensor" and shard_group is not None:
        return _with_columnwise(_cast_shard(x, spec, shard_group, infinity_is_nan), columnwise)
    if spec.granularity == "tensor":
        return _with_columnwise(cast_current_rowwise(x, spec, infinity_is_nan), columnwise)
    if spec.serves_both_directions:
        operand = _with_columnwise(cast_current_rowwise(x, spec, infinity_is_nan), columnwise)
    else:
        operand = Operand(
            cast_current_rowwise(x, spec, infinity_is_nan) if rowwise else None,
            cast_current_rowwise(_contiguous_transpose(x), spec, infinity_is_nan) if columnwise else None,
        )
    return _spread_nan(operand) if infinity_is_nan else operand


def _cast_shard(x: Tensor, spec: QuantSpec, shard_group: Any, infinity_is_nan: bool) -> Quantized:
    amax = arithmetic.amax(x)
    has_overflowed = amax.isinf()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=shard_group)
    data = cast_with_amax(x, amax, spec)
    return with_nan_scale(data, has_overflowed) if infinity_is_nan else data
