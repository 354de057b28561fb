"""What the references of all ops share: the formats, scales and casts.

All arithmetic on values is FP32 unless a comment says otherwise. Rules that hold everywhere (docs/numerics.md has the
table with the test of each row):

* A cast rounds to nearest even and saturates: beyond the maximum, infinities included, it gives +-max; NaN stays NaN.
  torch's own cast to E5M2 does not saturate, so values are clamped first (clamp keeps NaN).
* `scale` multiplies to quantize, `scale_inv = 1 / scale` multiplies to dequantize. Both FP32.
* `amax` is the largest magnitude, NaN elements ignored; of nothing it is 0. It may be infinite.
* `a / b` is always a true division: `float / tensor` in torch is a reciprocal and a product, one rounding too many.

Shapes: `scale_inv` is [] per tensor, [rows, 1] per row, [rows, ceil(cols/128)] for 1x128 blocks and
[ceil(rows/128), ceil(cols/128)] for 128x128 blocks.
"""

import torch
from torch import Tensor

BLOCK = 128
FLT_MAX = torch.finfo(torch.float32).max
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# An element is cut off when |x * scale| is above this: the maximum and four steps of FP32, the most that the roundings
# of a scale made for x, of its inverse and of the product can add (docs/numerics.md).
CUT_OFF = {torch.float8_e4m3fn: 448.0 + 4 * 2.0**-15, torch.float8_e5m2: 57344.0 + 4 * 2.0**-8}


def blocks(size: int) -> int:
    """The number of blocks of 128 that cover `size`."""
    return -(-size // BLOCK)


def amax(x: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
    """Largest |x| in FP32 over `dims` (default all), ignoring NaN; 0 where there is nothing."""
    magnitude = x.abs().float().nan_to_num(nan=0.0, posinf=torch.inf)
    if x.numel() == 0:
        return magnitude.sum(dims) if dims else magnitude.sum()  # zeros of the reduced shape
    return magnitude.amax(dims)


def amax_now(x: Tensor) -> Tensor:
    """`amax` of everything, in one pass over x in its own type where x is on the CPU, has no NaN and is not traced."""
    if x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling():
        low, high = x.detach().aminmax()
        largest = torch.maximum(low.abs(), high.abs()).float()
        if not largest.isnan():
            return largest
    return amax(x)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast FP32 to FP8, contiguous: nearest even, +-max beyond the range, NaN stays NaN."""
    limit = FP8_MAX[dtype]
    return x.clamp(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def floor_to_power_2(x: Tensor) -> Tensor:
    """The power of two at or below each x, FP32, positive and normal: exponent kept, mantissa cleared."""
    return (x.view(torch.int32) & -(2**23)).view(torch.float32)


def scale_from_amax(amax: Tensor, fp8_max: float, power_2: bool) -> Tensor:
    """Current scaling: `fp8_max / amax`, at most FLT_MAX; 1 where amax is 0, infinite or NaN; power_2 rounds down."""
    scale = (torch.full_like(amax, fp8_max) / amax).clamp(max=FLT_MAX)
    scale = floor_to_power_2(scale) if power_2 else scale
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def inverse_of(scale: Tensor, amax: Tensor, infinity_is_nan: bool) -> Tensor:
    """1 / scale; with `infinity_is_nan` NaN where the amax that the scale was made of, of its shape, is infinite."""
    inverse = scale.reciprocal()
    return torch.where(amax.isinf(), torch.nan, inverse) if infinity_is_nan else inverse


def expand(scale: Tensor, rows: int, cols: int) -> Tensor:
    """A scale of any granularity in a shape that broadcasts over [rows, cols]."""
    if scale.dim() == 0:
        return scale
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(BLOCK, 0)[:rows]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(BLOCK, 1)[:, :cols]


def dequantize(q: Tensor, scale_inv: Tensor) -> Tensor:
    """q [..., K] times its scale_inv, in FP32."""
    if scale_inv.dim() == 0:
        return q.float() * scale_inv
    return q.float() * expand(scale_inv, q.shape[0], q.shape[1])
