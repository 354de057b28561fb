"""How each recipe turns an operand into FP8 codes for the GEMMs that read it.

A matrix x [M, K] is read in two ways: by rows, contracting K, and by columns, contracting M (as x^T [K, M]). A scale
per tensor, and the 128x128 blocks of a weight, suit both: the codes are cast once and the columns are their transpose,
copied where the device's GEMM needs it (devices.py). A scale per row or per 1x128 block holds along one dimension only:
there the columns are cast from x^T on their own.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.fp8.devices import layout_of
from fp8serve.fp8.ops import arithmetic
from fp8serve.fp8.ops.arithmetic import BLOCK, FP8_MAX, scale_from_amax
from fp8serve.fp8.recipe import DelayedScaling, Float8BlockScaling, Recipe


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


def cast_delayed(x: Tensor, dtype: torch.dtype, scale: Tensor, cols: bool) -> tuple[Pair, Tensor]:
    """Cast by a scale known beforehand: the codes, and amax of x in the same read; cast and transpose are one op."""
    scale_inv = scale.reciprocal()
    if cols and layout_of(x.device) == "tn":
        q, q_t, amax = torch.ops.fp8serve.quantize_transpose(x, scale, dtype)
        return Pair(Codes(q, scale_inv), Codes(q_t, scale_inv)), cast(Tensor, amax)
    q, amax = torch.ops.fp8serve.quantize(x, scale, dtype)
    return _both(Codes(q, scale_inv), cols), cast(Tensor, amax)


def _cast_along_rows(x: Tensor, dtype: torch.dtype, recipe: Recipe) -> Codes:
    if isinstance(recipe, Float8BlockScaling):
        return Codes(*torch.ops.fp8serve.quantize_block(x, dtype, 1, recipe.power_2_scale))
    return Codes(*torch.ops.fp8serve.quantize_rowwise(x, dtype, _power_2(recipe)))


def _power_2(recipe: Recipe) -> bool:
    return not isinstance(recipe, DelayedScaling) and recipe.power_2_scale


def cast_by_amax(x: Tensor, amax: Tensor, dtype: torch.dtype, power_2: bool) -> Codes:
    """Cast by an amax [] found elsewhere: of a tensor of which x is one rank's part (distributed.py)."""
    scale = scale_from_amax(amax, FP8_MAX[dtype], power_2)
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


def cast_by_content(
    x: Tensor, dtype: torch.dtype, recipe: Recipe, weight: bool, rows: bool, cols: bool, sharers: Any = None
) -> Pair:
    """Cast x [M, K] by its own amax, at the granularity of a recipe without state, for the asked directions.

    A scale for the whole tensor is found together with the `sharers`, the ranks that hold its other parts.
    """
    if isinstance(recipe, Float8BlockScaling) and weight:
        return _both(Codes(*torch.ops.fp8serve.quantize_block(x, dtype, BLOCK, recipe.power_2_scale)), cols)
    if not isinstance(recipe, Float8BlockScaling) and getattr(recipe, "granularity", "tensor") == "tensor":
        if sharers is not None:
            amax = arithmetic.amax(x)
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=sharers)
            return _both(cast_by_amax(x, amax, dtype, _power_2(recipe)), cols)
        return _both(Codes(*torch.ops.fp8serve.quantize_current(x, dtype, _power_2(recipe))), cols)
    return Pair(
        _cast_along_rows(x, dtype, recipe) if rows else None,
        _cast_along_rows(x.t().contiguous(), dtype, recipe) if cols else None,
    )
