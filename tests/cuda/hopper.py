"""A bit-exact model, on a CPU, of the products of Hopper's FP8 tensor cores.

One instruction (wgmma) adds 32 products to a sum. Each of these 33 numbers has a power of two: a product has the
product of its factors' powers (so 1.5 times 1.5 has 1), the sum its own. Bits below 2^-13 of the largest power are
truncated, first in each of the 33 numbers and then in the new sum. After every 128 elements of K, the sum is added to
an FP32 sum and starts at 0 again. CUTLASS does this for its finer scales, and CUTLASS and cuBLASLt if fast accumulation
is off. This model gives all recorded digits of an H200's errors (tests/cuda/test_hopper.py).
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops import arithmetic, grouped, reference

FRACTION = 2.0**-13
INSTRUCTION, PROMOTED = 32, 128
TILE = 8  # rows
_SMALLEST_NORMAL = {torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14}


def _power(x: Tensor) -> Tensor:
    """Returns the largest power of two not above |x|, in FP32; 0 for 0."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _power_of_factor(x: Tensor) -> Tensor:
    """Returns the power of two of FP8 values; subnormal values have the exponent of the smallest normal one."""
    smallest = torch.tensor(_SMALLEST_NORMAL[x.dtype])
    return torch.where(x.float() == 0, 0.0, torch.maximum(_power(x.float()), smallest))


def _cut(x: Tensor, power: Tensor) -> Tensor:
    """Truncates the bits of x below 2^-13 of a power of two."""
    unit = (power * FRACTION).clamp(min=2.0**-100)
    return (x / unit).trunc() * unit


def sums(a: Tensor, b: Tensor) -> list[Tensor]:
    """Returns the FP32 sums [M, N] of a [M, K] times the transpose of b [N, K], one for every 128 elements of K. a and
    b are finite FP8."""
    tiles = [list(_sums(rows, b)) for rows in torch.split(a, TILE)]  # fits in the CPU's cache
    return [torch.cat(parts) for parts in zip(*tiles, strict=True)]


def _sums(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    factors = (a.float(), b.float(), _power_of_factor(a), _power_of_factor(b))
    for block in zip(*(torch.split(x, PROMOTED, 1) for x in factors), strict=True):
        total = torch.zeros(len(a), len(b))
        for x, y, x_power, y_power in zip(*(torch.split(t, INSTRUCTION, 1) for t in block), strict=True):
            powers = (x_power.unsqueeze(1) * y_power).amax(-1)
            largest = torch.maximum(powers, _power(total))
            products = _cut(x.unsqueeze(1) * y, largest.unsqueeze(-1)).sum(-1)  # exact: few bits are left
            total = products + _cut(total, largest)
            total = _cut(total, _power(total))
        yield total


def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """Computes the op with Hopper's sums."""
    by_block = any(scale.dim() == 2 and scale.shape[1] > 1 for scale in (a_scale, b_scale))
    scales = [arithmetic.expand(scale, *x.shape).expand(x.shape) for scale, x in ((a_scale, a), (b_scale, b))]
    columns = [scale[:, ::PROMOTED].t() for scale in scales]
    total = torch.zeros(len(a), len(b))
    for part, of_a, of_b in zip(sums(a, b), *columns, strict=True):
        total += part * of_a.unsqueeze(1) * of_b if by_block else part
    if not by_block:
        total = total * columns[0][0].unsqueeze(1) * columns[1][0]
    return (total if bias is None else total + bias.float()).to(out)


def scaled_mm_add(*arguments: Any) -> Tensor:
    """Computes the op with Hopper's sums."""
    *product, residual = arguments
    return residual + scaled_mm(*product, residual.dtype)  # type: ignore[no-any-return]


def scaled_mm_quantize(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Computes the op with Hopper's sums."""
    *product, scale, out = arguments
    return reference.quantize(scaled_mm(*product, torch.float32), scale, out)  # type: ignore[no-any-return]


_PRODUCTS = SimpleNamespace(scaled_mm=scaled_mm)
grouped_mm = partial(grouped.grouped_mm, _PRODUCTS)
grouped_wgrad = partial(grouped.grouped_wgrad, _PRODUCTS)
