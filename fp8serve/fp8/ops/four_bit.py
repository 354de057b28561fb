"""Weights in 4 bits: E2M1 codes in blocks along K, each with a scale (NVFP4 and MXFP4).

    codes   uint8 [N, K/2], two codes a byte; the lower half of a byte is the even column
    scales  NVFP4: E4M3 [N, K/16], beside an FP32 global scale, [] or [N]
            MXFP4: E8M0 [N, K/32]

A code is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and bit 3 is the sign. A code times an E4M3 scale has at most 6 significant
bits, so BF16 represents it exactly. The product is that of `mm` with these BF16 weights; the global scale multiplies
the finished sum. MXFP4 is multiplied like MXFP8 with the same values (microscaling.py): a row is divided by its largest
scale, which multiplies the finished sum.

Packed weights have the order in which csrc/cpu/gemm_4bit_avx512bf16.cpp reads them, as one stream:

    codes   uint8 [N/16, K/8, 64]: of every 8 columns those of 16 rows; a row's 8 codes are k = 0, 2, 4, 6, 1, 3, 5, 7
    scales  NVFP4: [N/16, K/16, 16], MXFP4: [N/16, 1 + K/32, 16], one byte for each of 16 rows, of the same dtype

`grouped_mm_4bit` multiplies rows that are sorted by expert, as `grouped_mm` does (grouped.py), by the weights of their
experts: codes, scales, a global scale and a bias with a first dimension E. It is a loop of `mm_4bit` over the experts.

The bytes of packed scales are distances, so that a kernel finds the bits of a BF16 by a subtraction: of NVFP4 the
distance in eighths of an exponent from 2^9, of MXFP4 the exponent below that of the row, which comes first. Packing
keeps every product, but not every code: a block whose scale is zero has zeros, one whose scale is negative has the
codes of the other sign, and one whose scale is NaN has ones.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import E8M0, MX_BLOCK
from fp8serve.fp8.ops.gemm import _apply_scales
from fp8serve.fp8.ops.grouped import OFFSETS, expert_row_ranges
from fp8serve.fp8.ops.inputs import fake_nothing, grid_cases, random_mx_scales, random_normal
from fp8serve.fp8.ops.microscaling import MAX_SHIFT, MIN_ROW_CODE
from fp8serve.fp8.ops.microscaling import widen as widen_mx
from fp8serve.fp8.ops.packing import GROUP, RUN
from fp8serve.fp8.ops.registry import define, define_composed

E4M3 = torch.float8_e4m3fn
NVFP4_BLOCK = 16
BLOCK_OF = {E4M3: NVFP4_BLOCK, E8M0: MX_BLOCK}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PACKED_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a run: one nibble of each half of 32 bits is a pair of columns
_FARTHEST, _NAN, _ONE_CODE = 254, 255, 2


def unpack_codes(codes: Tensor) -> Tensor:
    """Returns the codes of bytes [..., K/2] as uint8 [..., K]."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """Returns codes uint8 [..., K] as bytes [..., K/2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def code_values(codes: Tensor) -> Tensor:
    """Returns the values of codes [..., K], in FP32."""
    return _values_by_code(codes.device)[codes.long()]


@cache
def _values_by_code(device: torch.device) -> Tensor:
    """Cached, because a CUDA graph cannot capture a copy from the host."""
    return torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=device)


def is_packable(codes: Tensor, scales: Tensor) -> bool:
    """Returns whether pack_4bit accepts a weight."""
    return codes.dim() == 2 and codes.shape[0] % GROUP == 0 and codes.numel() > 0 and scales.dim() == 2


def packed_shapes(codes: Tensor, scales: Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the shapes of the packed codes and scales of a weight."""
    groups, extra = codes.shape[0] // GROUP, 1 if scales.dtype == E8M0 else 0
    return (groups, codes.shape[1] * 2 // RUN, GROUP * RUN // 2), (groups, extra + scales.shape[1], GROUP)


def pack_4bit(codes: Tensor, scales: Tensor, out_codes: Tensor, out_scales: Tensor) -> None:
    """Packs a weight into tensors of `packed_shapes`; they have the dtypes of `codes` and `scales`."""
    if not is_packable(codes, scales):
        raise ValueError(f"pack_4bit needs a multiple of {GROUP} rows, found codes of shape {list(codes.shape)}.")
    distances, signs = _mx_distances(scales) if scales.dtype == E8M0 else _nvfp4_distances(scales)
    blocks = unpack_codes(codes).view(*scales.shape, -1)
    sign = signs.unsqueeze(-1)
    blocks = torch.where(sign < 0, blocks ^ 8, blocks)
    blocks = torch.where(sign == 0, 0, torch.where(sign.isnan(), _ONE_CODE, blocks))
    rows = blocks.view(len(out_codes), GROUP, -1, RUN).transpose(1, 2)
    out_codes.copy_(pack_codes(rows[..., _PACKED_COLUMNS]).flatten(2))
    out_scales.view(torch.uint8).copy_(distances.view(len(out_codes), GROUP, -1).transpose(1, 2))


def pack_4bit_into(codes: Tensor, scales: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Packs a weight, its codes into the vector `out`; returns the packed codes and scales."""
    shapes = packed_shapes(codes, scales)
    out_codes, out_scales = out.view(shapes[0]), scales.new_empty(shapes[1])
    torch.ops.fp8serve.pack_4bit(codes.detach(), scales.detach(), out_codes, out_scales)
    return out_codes, out_scales


def _nvfp4_distances(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bytes of packed scales, and the scales as FP32."""
    values = scales.float()
    mantissa, exponent = torch.frexp(values.abs())  # in [0.5, 1)
    distance = (10 - exponent) * 8 - (mantissa * 16 - 8).int()
    distance = torch.where(values == 0, _FARTHEST, torch.where(values.isnan(), _NAN, distance))
    return distance.to(torch.uint8), values


def _mx_distances(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bytes of packed scales, and for each block 1, or 0 if the product takes it as zero."""
    codes = scales.view(torch.uint8).int()
    row = codes.amax(1, keepdim=True).clamp(min=MIN_ROW_CODE)
    distance = row - codes
    is_zero = distance > MAX_SHIFT[E4M3]
    return torch.cat([row, distance.masked_fill(is_zero, 0)], 1).to(torch.uint8), (~is_zero).float()


def widen(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns a weight as an operand of `mm`, BF16 [N, K], and the scale of each row, [N] or None.

    The weight may be packed.
    """
    if codes.dim() == 3:
        values, factors, row_scales = _unpack(codes, scales)
        return (values * factors).to(torch.bfloat16), row_scales
    values = code_values(unpack_codes(codes))
    if scales.dtype == E8M0:
        weight, row_scales = widen_mx(values.to(E4M3), scales)
        return weight.to(torch.bfloat16), row_scales.squeeze(1)
    return (values * scales.float().repeat_interleave(NVFP4_BLOCK, 1)).to(torch.bfloat16), None


def _unpack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the values of a packed weight [N, K], what they are multiplied by, and the scales of rows."""
    order = torch.tensor(_PACKED_COLUMNS, device=codes.device).argsort()
    runs = unpack_codes(codes.view(*codes.shape[:2], GROUP, RUN // 2))[..., order]
    values = code_values(runs.transpose(1, 2).reshape(len(codes) * GROUP, -1))
    distances = scales.view(torch.uint8).transpose(1, 2).reshape(len(values), -1).int()
    if scales.dtype == E8M0:
        row_scales = distances[:, 0].to(torch.uint8).view(E8M0).float()
        return values, torch.exp2(-distances[:, 1:].float()).repeat_interleave(MX_BLOCK, 1), row_scales
    eighths = 80 - distances  # (exponent + 1) * 8 + mantissa
    factors = torch.ldexp((8 + eighths % 8).float() / 8, eighths.div(8, rounding_mode="floor") - 1)
    factors = factors.masked_fill(distances == _NAN, torch.nan)
    return values, factors.repeat_interleave(NVFP4_BLOCK, 1), None


def mm_4bit(
    ops: Any,
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    x_scale_inv: Tensor | None = None,
) -> Tensor:
    """Multiplies x BF16 [M, K] by a weight in 4 bits [N, K], which may be packed on a CPU; returns BF16 [M, N].

    `global_scale` is FP32 [] or [N], and None for MXFP4; `bias` is [N]. Both are applied to FP32 sums. So is
    `x_scale_inv`, FP32 [] or [M, 1], if x has the values of `cast_nvfp4`.
    """
    weight, row_scales = widen(codes, scales)
    if row_scales is not None and global_scale is not None:
        raise ValueError("mm_4bit: global_scale is for E4M3 scales; pass None beside E8M0 scales.")
    sums: Tensor = ops.mm(x, weight, None, torch.float32)
    scale = row_scales if global_scale is None else global_scale
    if x_scale_inv is not None:
        scale = torch.ones((), device=x.device) if scale is None else scale
        out = _apply_scales(sums, x_scale_inv, scale)
    else:
        out = sums if scale is None else sums * scale
    return (out if bias is None else out + bias.float()).to(torch.bfloat16)


def _fake_mm(x: Tensor, codes: Tensor, *rest: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], _rows_of(codes)))


def grouped_mm_4bit(
    ops: Any,
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Multiplies x BF16 [T, K], sorted by expert, by weights in 4 bits [E, N, K], which may be packed on a CPU; returns
    BF16 [T, N].

    `offsets` int32 [E] are the ends of the experts' rows. `global_scale` is FP32 [E] or [E, N], and None for MXFP4;
    `bias` is [E, N].
    """
    out = x.new_empty((len(x), _rows_of(codes[0])))
    for expert, (begin, end) in enumerate(expert_row_ranges(offsets)):
        if begin < end:
            scale, expert_bias = (None if t is None else t[expert] for t in (global_scale, bias))
            out[begin:end] = ops.mm_4bit(x[begin:end], codes[expert], scales[expert], scale, expert_bias)
    return out


def _rows_of(codes: Tensor) -> int:
    return int(codes.shape[0]) * (GROUP if codes.dim() == 3 else 1)


def _fake_grouped(x: Tensor, codes: Tensor, *rest: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[1] * (GROUP if codes.dim() == 4 else 1)))


def random_4bit(rows: int, columns: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of this dtype of a weight [rows, columns], with scales of every size, 0 among them."""
    noise = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=noise, dtype=torch.uint8)
    if dtype == E8M0:
        return codes, random_mx_scales(rows, columns, seed + 1)
    scales = torch.randint(0, 127, (rows, columns // NVFP4_BLOCK), generator=noise, dtype=torch.uint8)
    return codes, scales.view(E4M3)


def packed_4bit(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weight packed by the reference."""
    shapes = packed_shapes(codes, scales)
    out = torch.empty(shapes[0], dtype=torch.uint8), torch.empty(shapes[1], dtype=torch.uint8).view(scales.dtype)
    pack_4bit(codes, scales, *out)
    return out


def _pack_case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    weight = random_4bit(*shape, dtype, 1)
    shapes = packed_shapes(*weight)
    out_scales = torch.zeros(shapes[1], dtype=torch.uint8).view(dtype)
    return *weight, torch.zeros(shapes[0], dtype=torch.uint8), out_scales


define(
    "pack_4bit(Tensor codes, Tensor scales, Tensor(a!) out_codes, Tensor(b!) out_scales) -> ()",
    pack_4bit,
    fake=fake_nothing,
    cases=partial(grid_cases, "{} {}", _pack_case, ((16, 32), (48, 96), (32, 1024), (16, 2080)), BLOCK_OF),
    kernel_devices=("cpu",),
)


def _mm_case(shape: tuple[int, int, int], dtype: torch.dtype, is_packed: bool) -> tuple[Any, ...]:
    """Returns arguments with a bias if M is odd. Of NVFP4 the global scale is one for each row if M is even, and x has
    small scales if K is a multiple of 64."""
    m, n, k = shape
    weight = random_4bit(n, k, dtype, 3)
    weight = packed_4bit(*weight) if is_packed else weight
    noise = torch.Generator().manual_seed(5)
    global_scale = None if dtype == E8M0 else torch.exp2(torch.randn(() if m % 2 else (n,), generator=noise))
    x_scale_inv = None if k % 64 or dtype == E8M0 else torch.exp2(torch.randn(m, 1, generator=noise) * 4 - 60)
    bias = torch.linspace(-2, 2, n) if m % 2 else None
    return random_normal(m, k, torch.bfloat16), *weight, global_scale, bias, x_scale_inv


_SHAPES = ((1, 48, 64), (2, 16, 1120), (7, 32, 2080), (70, 48, 96), (0, 16, 32))
define_composed(
    "mm_4bit(Tensor x, Tensor codes, Tensor scales, Tensor? global_scale, Tensor? bias, Tensor? x_scale_inv=None)"
    " -> Tensor",
    mm_4bit,
    fake=_fake_mm,
    cases=partial(grid_cases, "{} {} packed {}", _mm_case, _SHAPES, BLOCK_OF, (False, True)),
    kernel_devices=("cpu",),
)


def stacked_4bit(experts: int, rows: int, columns: int, dtype: torch.dtype, is_packed: bool) -> tuple[Tensor, Tensor]:
    """Returns `random_4bit` of every expert, stacked and perhaps packed."""
    weights = [random_4bit(rows, columns, dtype, 11 + 2 * expert) for expert in range(experts)]
    codes, scales = zip(*(packed_4bit(*weight) if is_packed else weight for weight in weights), strict=True)
    return torch.stack(codes), torch.stack([scale.view(torch.uint8) for scale in scales]).view(dtype)


def _grouped_case(where: str, shape: tuple[int, int], dtype: torch.dtype, is_packed: bool) -> tuple[Any, ...]:
    """Returns arguments with a bias and, of NVFP4, a global scale for each row if N is odd times 16."""
    (n, k), offsets = shape, torch.tensor(OFFSETS[where], dtype=torch.int32)
    rows, experts, has_bias = int(offsets[-1]), len(offsets), bool(n // GROUP % 2)
    noise = torch.Generator().manual_seed(5)
    scale_shape = (experts, n) if has_bias else (experts,)
    global_scale = None if dtype == E8M0 else torch.exp2(torch.randn(scale_shape, generator=noise))
    bias = torch.linspace(-2, 2, experts * n).view(experts, n) if has_bias else None
    weights = stacked_4bit(experts, n, k, dtype, is_packed)
    return random_normal(rows, k, torch.bfloat16), *weights, global_scale, offsets, bias


define_composed(
    "grouped_mm_4bit(Tensor x, Tensor codes, Tensor scales, Tensor? global_scale, Tensor offsets, Tensor? bias)"
    " -> Tensor",
    grouped_mm_4bit,
    fake=_fake_grouped,
    cases=partial(
        grid_cases, "{}, {} {} packed {}", _grouped_case, OFFSETS, ((48, 96), (32, 1120)), BLOCK_OF, (False, True)
    ),
    kernel_devices=("cpu",),
)
