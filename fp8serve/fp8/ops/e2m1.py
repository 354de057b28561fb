"""E2M1, a format of 4 bits, and the casts of weights to NVFP4 and MXFP4. Two codes share a byte.

    code    0    1    2    3    4    5    6    7    8 to 15
    value   0  0.5    1  1.5    2    3    4    6    the same values, negative

    codes         uint8 [N, K/2]: the lower half of a byte is the even column
    scale_inv     NVFP4: E4M3 [N, K/16]; MXFP4: E8M0 [N, K/32]
    global_scale  NVFP4: FP32 [], or [N] with one for each row; MXFP4: None

A weight is code * scale_inv * global_scale. All scales dequantize. A code times an E4M3 scale has at most 6 significant
bits, and a code times an E8M0 scale 2, so BF16 holds both exactly. The global scale multiplies finished sums
(four_bit.py).

NVFP4 follows Transformer Engine's order of operations, with blocks of 1x16. One rule differs: a block's scale is at
least 2^-9, the smallest E4M3 number, where Transformer Engine rounds it to zero and with it the whole block. So every
stored scale is positive, as readers expect. With `four_over_six`, a block may have a scale that is 1.5 times as large:
its largest element becomes 4 instead of 6, and 4 has closer neighbours than 6. The scale with the smaller squared error
is chosen, and on a tie the one for 6. The larger scale must be an E4M3 number, so the tensor's scale then maps its amax
to 256 * 6 instead of 448 * 6.

MXFP4 takes the smallest power of two with which no element exceeds 6, so nothing is clipped. (compressed-tensors rounds
the amax to 2 bits of mantissa first, and clips elements between 1.5 and 1.75 times a power of two.) The scale is at
most 2^125, with which every weight is finite in BF16.

A cast needs finite elements: the scale of a block with NaN or an infinity is NaN.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import E8M0, FLT_MAX, FP8_MAX, MX_BLOCK, amax
from fp8serve.fp8.ops.four_bit import BLOCK_OF, NVFP4_BLOCK, code_values, pack_codes, unpack_codes, widen
from fp8serve.fp8.ops.microscaling import NAN, ONE, smallest_power

E2M1_MAX = 6.0
MAX_SCALE_CODE = ONE + 125  # E8M0, 2^125: 6 * 2^125 is the largest multiple of 6 that is finite in BF16
MIN_NV_SCALE = 2.0**-9
_BELOW = 1 - 2.0**-24  # times a number: the FP32 number just below it
# A magnitude has the code c if it is above c of these limits, which are the means of neighbours. A mean goes to the
# even code, so those above an odd code are one step of FP32 lower.
_LIMITS = (0.25, 0.75 * _BELOW, 1.25, 1.75 * _BELOW, 2.5, 3.5 * _BELOW, 5.0)
_NV_LARGEST = {False: FP8_MAX[torch.float8_e4m3fn], True: 256.0}  # the largest scale of a block; True: four over six


def to_codes(x: Tensor) -> Tensor:
    """Returns the E2M1 codes of x, FP32: uint8 of the same shape. Rounds to nearest even and saturates."""
    limits = torch.tensor(_LIMITS, device=x.device)
    return torch.bucketize(x.abs(), limits, out_int32=True).to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)


def round_e2m1(x: Tensor) -> Tensor:
    """Rounds x, FP32, to the nearest value of E2M1."""
    return code_values(to_codes(x))


def expand_scale(scale_inv: Tensor) -> Tensor:
    """Returns the scale of each element, FP32 [N, K]."""
    return scale_inv.float().repeat_interleave(BLOCK_OF[scale_inv.dtype], 1)


def dequantize(codes: Tensor, scale_inv: Tensor, global_scale: Tensor | None) -> Tensor:
    """Returns a weight, packed or not, in FP32 [N, K]. Only the product with the global scale is rounded."""
    if codes.dim() == 3:
        wide, row_scales = widen(codes, scale_inv)
        values = wide.float() if row_scales is None else wide.float() * row_scales.unsqueeze(1)
    else:
        values = code_values(unpack_codes(codes)) * expand_scale(scale_inv)
    return values if global_scale is None else values * global_scale.reshape(-1, 1)


def quantize_nvfp4(x: Tensor, four_over_six: bool = False, block_rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes x [N, K], K a multiple of 16; returns (codes, scale_inv E4M3, global_scale).

    `block_rows` rows share the scale of a block, which is repeated in each of them.
    """
    tiled = _tile(x, NVFP4_BLOCK)
    largest = block_amaxes(tiled, block_rows)
    is_finite = largest.isfinite()
    scale = tensor_scale(amax(torch.where(is_finite, largest, 0)), four_over_six)
    global_scale = scale.reciprocal()
    ideal = largest * (scale * (1 / E2M1_MAX))
    codes, scale_inv = _nv_codes(tiled, ideal, global_scale)
    if four_over_six:
        other_codes, other_scale = _nv_codes(tiled, ideal * 1.5, global_scale)
        is_better = _errors(tiled, other_codes, other_scale, global_scale) < _errors(
            tiled, codes, scale_inv, global_scale
        )
        codes = torch.where(is_better.unsqueeze(2), other_codes, codes)
        scale_inv = torch.where(is_better, other_scale, scale_inv)
    scale_inv = torch.where(is_finite, scale_inv, torch.nan).to(torch.float8_e4m3fn)
    return pack_codes(codes.flatten(1)), scale_inv, global_scale


def _tile(x: Tensor, block: int) -> Tensor:
    if x.dim() != 2 or x.shape[1] % block:
        raise ValueError(f"A weight in blocks of {block} must be [N, K], K a multiple of it, found {list(x.shape)}.")
    return x.float().reshape(len(x), -1, block)


def block_amaxes(tiled: Tensor, block_rows: int) -> Tensor:
    """Returns the amax of the block of each row, FP32 [M, B], of x [M, B, columns of a block]. NaN is not ignored."""
    largest = tiled.abs().amax(2)
    if block_rows == 1:
        return largest
    padded = F.pad(largest, (0, 0, 0, -len(largest) % block_rows))
    tall = padded.view(len(padded) // block_rows, block_rows, largest.shape[1])
    return tall.amax(1).repeat_interleave(block_rows, 0)[: len(largest)]


def tensor_scale(largest: Tensor, four_over_six: bool = False) -> Tensor:
    """Returns the scale, FP32, that quantizes a tensor with this amax before its blocks are scaled."""
    scale = (torch.full_like(largest, _NV_LARGEST[four_over_six] * E2M1_MAX) / largest).clamp(max=FLT_MAX)
    return torch.where((largest > 0) & largest.isfinite(), scale, 1.0)


def block_scales(ideal: Tensor) -> Tensor:
    """Returns the numbers of E4M3, in FP32, that are nearest to the `ideal` scales of blocks."""
    return ideal.clamp(MIN_NV_SCALE, FP8_MAX[torch.float8_e4m3fn]).to(torch.float8_e4m3fn).float()


def block_factor(scales: Tensor, global_scale: Tensor) -> Tensor:
    """Returns what multiplies the elements of a block before they are rounded."""
    return (scales * global_scale).reciprocal().clamp(max=FLT_MAX)


def _nv_codes(tiled: Tensor, ideal: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes [N, K/16, 16] and the scales [N, K/16], FP32 numbers that E4M3 has, for `ideal` scales."""
    scale_inv = block_scales(ideal)
    return to_codes(tiled * block_factor(scale_inv, global_scale).unsqueeze(2)), scale_inv


def _errors(tiled: Tensor, codes: Tensor, scale_inv: Tensor, global_scale: Tensor) -> Tensor:
    """Returns the squared error of each block, FP32 [N, K/16]."""
    return (tiled - code_values(codes) * scale_inv.unsqueeze(2) * global_scale).square().sum(2)


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes x [N, K], K a multiple of 32; returns (codes, scale_inv E8M0)."""
    tiled = _tile(x, MX_BLOCK)
    largest = tiled.abs().amax(2)
    exponents = smallest_power(largest, 0x400000, 2).clamp(max=MAX_SCALE_CODE)  # 6 is 1.5 times 2^2
    factor = (2 * ONE - exponents).to(torch.uint8).view(E8M0).float()
    codes = to_codes(tiled * factor.unsqueeze(2))
    scale_inv = torch.where(largest.isfinite(), exponents, NAN).to(torch.uint8).view(E8M0)
    return pack_codes(codes.flatten(1)), scale_inv
