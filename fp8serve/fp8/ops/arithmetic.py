"""Formats, scales and casts that the references of all ops use.

All arithmetic on values is FP32 unless a comment says otherwise. These rules hold everywhere (docs/numerics.md lists
them with their tests):

* A cast rounds to nearest even and saturates: values beyond the maximum, including infinities, become +-max. NaN stays
  NaN. torch's own cast to E5M2 does not saturate, so values are clamped first (clamp keeps NaN).
* `scale` multiplies to quantize, `scale_inv = 1 / scale` multiplies to dequantize. Both FP32.
* `amax` is the largest magnitude without NaN elements, and 0 for an empty tensor. It may be infinite.
* `a / b` divides tensors. `float / tensor` in torch is a reciprocal and a product, which rounds twice.

Shapes: `scale_inv` is [] per tensor, [rows, 1] per row, [rows, ceil(cols/128)] for 1x128 blocks and
[ceil(rows/128), ceil(cols/128)] for 128x128 blocks. In MX blocks it is E8M0 [rows, ceil(cols/32)] (microscaling.py).
"""

import torch
from torch import Tensor

BLOCK, MX_BLOCK = 128, 32
E8M0 = torch.float8_e8m0fnu
FLT_MAX = torch.finfo(torch.float32).max
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# An element saturates if |x * scale| is above this limit: the maximum plus four steps of FP32, which the roundings of a
# scale, of its inverse and of the product can add (docs/numerics.md).
SATURATION_LIMIT = {torch.float8_e4m3fn: 448.0 + 4 * 2.0**-15, torch.float8_e5m2: 57344.0 + 4 * 2.0**-8}


def blocks(size: int, block: int = BLOCK) -> int:
    """Returns the number of blocks that cover `size`."""
    return -(-size // block)


def amax(x: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
    """Returns the largest |x| in FP32 over `dims` (default all), ignoring NaN; 0 without elements."""
    magnitude = x.abs().float().nan_to_num(nan=0.0, posinf=torch.inf)
    if x.numel() == 0:
        return magnitude.sum(dims) if dims else magnitude.sum()  # zeros of the reduced shape
    return magnitude.amax(dims)


def fast_amax(x: Tensor) -> Tensor:
    """Returns the amax of x like `amax`. On a CPU it reads x once, in the dtype of x, unless x has NaN elements or
    torch.compile traces the call."""
    if x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling():
        low, high = x.detach().aminmax()
        largest = torch.maximum(low.abs(), high.abs()).float()
        if not largest.isnan():
            return largest
    return amax(x)


def is_finite(x: Tensor) -> bool:
    """Whether no element of x is NaN or infinite. `aminmax`, which keeps NaN, reads x once, and takes a thirtieth of
    the time of `isfinite` for BF16 on a CPU. It does not take FP8."""
    x = x.detach() if x.element_size() > 1 else x.float()
    return x.numel() == 0 or bool(torch.stack(x.aminmax()).isfinite().all())


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts FP32 to contiguous FP8; rounds to nearest even, saturates to +-max, and keeps NaN."""
    limit = FP8_MAX[dtype]
    return x.clamp(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def floor_to_power_2(x: Tensor) -> Tensor:
    """Rounds each x, FP32, positive and normal, down to a power of two by clearing the mantissa."""
    return (x.view(torch.int32) & -(2**23)).view(torch.float32)


def scale_from_amax(amax: Tensor, fp8_max: float, power_2: bool) -> Tensor:
    """Returns `fp8_max / amax`, at most FLT_MAX, or 1 if amax is 0, infinite or NaN; `power_2` rounds down."""
    scale = (torch.full_like(amax, fp8_max) / amax).clamp(max=FLT_MAX)
    scale = floor_to_power_2(scale) if power_2 else scale
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def inverse_scale(scale: Tensor, amax: Tensor, infinity_is_nan: bool) -> Tensor:
    """Returns 1 / scale; with `infinity_is_nan`, NaN for each scale whose amax is infinite. `scale` and
    `amax` have the same shape."""
    inverse = scale.reciprocal()
    return torch.where(amax.isinf(), torch.nan, inverse) if infinity_is_nan else inverse


def expand(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Expands a scale of any granularity to a shape that broadcasts over [rows, cols], in FP32."""
    if scale.dim() == 0:
        return scale
    if scale.dtype == E8M0:
        return scale.float().repeat_interleave(MX_BLOCK, 1)[:, :cols]
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(BLOCK, 0)[:rows]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(BLOCK, 1)[:, :cols]


def dequantize(q: Tensor, scale_inv: Tensor) -> Tensor:
    """Returns q [..., K] times its scale_inv, in FP32."""
    if scale_inv.dim() == 0:
        return q.float() * scale_inv
    return q.float() * expand(scale_inv, q.shape[0], q.shape[1])
