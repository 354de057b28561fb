"""The ops of fp8serve. A module defines a family of ops, each with its schema, reference, fake kernel and test inputs.

`registry.py` registers ops with torch. `libraries.py` loads the compiled kernels and reports which kernel runs each op.
To add an op, call `define` in the module of its family, and write kernels of the same name in csrc/cpu and csrc/cuda.
The benchmark, doctor and the tests that apply to every op read the registry.

Importing this package registers all ops as `torch.ops.fp8serve`. The public functions `quantize`, `dequantize` and
`scaled_mm` check their arguments.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fp8serve.errors import RecipeError

# ruff: isort: off
# Families in the order in which backends() lists their ops. The libraries come last, because ops must be defined first.
from fp8serve.fp8.ops import casts, gemm, packing, microscaling, grouped, four_bit, nvfp4, delayed  # noqa: F401
from fp8serve.fp8.ops import elementwise, fused_casts, mixture, attention, sampling, monitored_casts  # noqa: F401
from fp8serve.fp8.ops.libraries import (
    LEVELS,
    LIBRARIES,
    backends,
    cpu_isa,
    cpu_kernels,
    reads_packed,
)

# ruff: isort: on
from fp8serve.fp8.ops import arithmetic
from fp8serve.fp8.ops.arithmetic import BLOCK, DTYPES, E8M0, FP8_MAX, MX_BLOCK, blocks
from fp8serve.fp8.ops.registry import OPS, Case, cases, compiled_for, implement, recipe_ops, reference
from fp8serve.fp8.spec import Granularity

__all__ = [
    "DTYPES",
    "LEVELS",
    "LIBRARIES",
    "OPS",
    "Case",
    "backends",
    "blocks",
    "cases",
    "compiled_for",
    "cpu_isa",
    "cpu_kernels",
    "dequantize",
    "implement",
    "quantize",
    "reads_packed",
    "recipe_ops",
    "reference",
    "scaled_mm",
]


def _dtype(fmt: str) -> torch.dtype:
    if fmt not in DTYPES:
        raise RecipeError(f"There is no FP8 format {fmt!r}; use 'e4m3' or 'e5m2'.")
    return DTYPES[fmt]


def _quantize_with_scale(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    if scale.dim() != 0:
        raise ValueError(f"scale must be one number (shape []), found shape {list(scale.shape)}.")
    if not 0 < float(scale) < math.inf:  # also False for NaN; this waits for the device
        raise ValueError(f"scale must be positive and finite, found {float(scale)}.")
    q, _ = torch.ops.fp8serve.quantize(x, scale, dtype)
    return q, scale.reciprocal()


def _fold_rows(x: Tensor, op: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor]:
    """Applies a two-dimensional op to [..., K] by folding the leading dimensions."""
    q, scale_inv = op(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), *args)  # not -1, which is ambiguous for K = 0
    return q.view(x.shape), scale_inv.view(*x.shape[:-1], scale_inv.shape[-1])


def quantize(
    x: Tensor,
    fmt: str = "e4m3",
    granularity: Granularity = "tensor",
    scale: Tensor | float | None = None,
    power_2_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantizes x [..., K] of FP32, BF16 or FP16 to FP8; returns (q of x's shape, scale_inv FP32).

    `scale`, FP32 [], multiplies the whole tensor; if it is None, scales are computed from x. scale_inv is [] per
    tensor, [..., 1] per row, [..., ceil(K/128)] for "block1x128" and [ceil(M/128), ceil(K/128)] for "block128x128", for
    which x must be [M, K]. For "block1x32" (MXFP8) it is E8M0 [..., ceil(K/32)], which is always a power of two. Raises
    RecipeError for an unknown format or granularity, ValueError for a wrong shape.
    """
    dtype = _dtype(fmt)
    if scale is not None:
        if granularity != "tensor" or power_2_scale:
            raise ValueError(
                "scale applies to the whole tensor; leave granularity and power_2_scale at their defaults."
            )
        return _quantize_with_scale(x, scale, dtype)
    if granularity == "tensor":
        return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize_current(x, dtype, power_2_scale))
    if granularity == "row":
        return _fold_rows(x, torch.ops.fp8serve.quantize_rowwise, dtype, power_2_scale)
    if granularity == "block1x128":
        return _fold_rows(x, torch.ops.fp8serve.quantize_block, dtype, 1, power_2_scale)
    if granularity == "block128x128":
        if x.dim() != 2:
            raise ValueError(f"128x128 blocks need a matrix [M, K], found shape {list(x.shape)}.")
        return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize_block(x, dtype, BLOCK, power_2_scale))
    if granularity == "block1x32":
        return _fold_rows(x, torch.ops.fp8serve.quantize_mx, dtype)
    raise RecipeError(
        f"There is no granularity {granularity!r}; use tensor, row, block1x128, block128x128 or block1x32."
    )


def _check_scale(name: str, scale_inv: Tensor, rows: int, cols: int) -> None:
    allowed = [(), (rows, 1), (rows, blocks(cols)), (blocks(rows), blocks(cols))]
    if scale_inv.dtype == E8M0:
        allowed = [(rows, blocks(cols, MX_BLOCK))]
    if tuple(scale_inv.shape) not in allowed:
        shapes = ", ".join(str(list(s)) for s in allowed)
        raise ValueError(
            f"{name} of a [{rows}, {cols}] matrix must have one of the shapes {shapes}, found {list(scale_inv.shape)}."
        )


def dequantize(q: Tensor, scale_inv: Tensor) -> Tensor:
    """Converts FP8 q [..., K] to FP32; scale_inv has any granularity of `quantize`."""
    if scale_inv.dim() == 0:
        return arithmetic.dequantize(q, scale_inv)
    flat = q.reshape(math.prod(q.shape[:-1]), q.shape[-1])
    folded = scale_inv.reshape(math.prod(scale_inv.shape[:-1]), scale_inv.shape[-1])
    _check_scale("scale_inv", folded, *flat.shape)
    return arithmetic.dequantize(flat, folded).view(q.shape)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiplies FP8 a [M, K] by b [N, K], adds bias [N], and returns [M, N] in out_dtype; sums are FP32.

    The operands may be E4M3 or E5M2 of any size, with scales of any granularity of `quantize`. Raises ValueError for
    shapes that do not match.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"scaled_mm needs a [M, K] and b [N, K], found {list(a.shape)} and {list(b.shape)}.")
    if a.dtype not in FP8_MAX or b.dtype not in FP8_MAX:
        raise ValueError(f"scaled_mm needs FP8 operands, found {a.dtype} and {b.dtype}; quantize them first.")
    if bias is not None and tuple(bias.shape) != (b.shape[0],):
        raise ValueError(f"bias must have shape [{b.shape[0]}], found {list(bias.shape)}.")
    _check_scale("a_scale_inv", a_scale_inv, *a.shape)
    _check_scale("b_scale_inv", b_scale_inv, *b.shape)
    if E8M0 in (a_scale_inv.dtype, b_scale_inv.dtype):
        return cast(Tensor, torch.ops.fp8serve.mx_mm(a, b, a_scale_inv, b_scale_inv, bias, None, out_dtype))
    return cast(Tensor, torch.ops.fp8serve.scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, out_dtype))
