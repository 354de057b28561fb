"""MXFP8: blocks of 32 consecutive elements of a row share an E8M0 scale, a power of two (OCP Microscaling Formats 1.0).

    scale_inv   E8M0 [M, ceil(K/32)]: a byte e is the dequantizing scale 2^(e - 127), 255 is NaN

The cast follows Transformer Engine's rule: the scale is the smallest power of two that is at least amax / 448 (57344 in
E5M2), so that no element saturates. The rule is integer arithmetic on the bits of the amax, because 448 and 57344 are
1.75 times a power of two: the exponent, raised by one if the mantissa is above 1.75.

The product widens both operands to BF16 and multiplies them like `mm`. A code times a power of two is exact in BF16,
but only in its normal range, and processors that multiply BF16 take subnormal operands and sums as zero. Therefore a
row is multiplied by a power of two such that its largest block has the scale 1; the row's scale multiplies the finished
sum. Every value is then a multiple of 2^-63, every sum is a multiple of 2^-126, and none is subnormal. Blocks that this
rule cannot represent are taken as zero: those whose scale is 2^54 times smaller than the largest of their row (2^47
times in E5M2). docs/numerics.md has the edge cases.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import E8M0, FP8_MAX, MX_BLOCK, amax, blocks, expand, saturating_cast
from fp8serve.fp8.ops.gemm import _apply_scales
from fp8serve.fp8.ops.inputs import random_fp8, random_mx_scales, random_normal, tiled_noise
from fp8serve.fp8.ops.packing import fake_packed_product, packed_weight, unpack_weight
from fp8serve.fp8.ops.registry import Case, define, define_composed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, ONE = 255, 127  # the E8M0 codes of NaN and of 1
_MANTISSA_OF_MAX = 0x600000  # 448 and 57344 are 1.75 times 2^8 and 2^15
_EXPONENT_OF_MAX = {E4M3: 8, E5M2: 15}
# A block is zero in a product if its scale is more than 2^this below its row's. Codes are multiples of 2^-9 and 2^-16.
MAX_SHIFT = {E4M3: 54, E5M2: 47}
MIN_ROW_CODE = 63  # of the scale of a row in a product, 2^-64: such a factor outside of the sum needs no care


def mx_codes(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the E8M0 code (uint8) of the smallest power of two that is at least amax / fp8_max.

    The code of a zero amax is 0. An infinite amax has the code of 1: its block saturates.
    """
    code = smallest_power(largest, _MANTISSA_OF_MAX, _EXPONENT_OF_MAX[dtype])
    return torch.where(largest.isinf(), ONE, code).to(torch.uint8)


def smallest_power(largest: Tensor, mantissa: int, exponent: int) -> Tensor:
    """Returns the E8M0 code (int32) of the smallest power of two that is at least amax / max, where `mantissa` has the
    bits of the format's maximum below its leading one, and `exponent` is its power of two. At least 0."""
    bits = largest.view(torch.int32)
    rounds_up = (bits & 0x7FFFFF) > mantissa
    return ((bits >> 23) - exponent + rounds_up).clamp(min=0)


def quantize_mx(x: Tensor, dtype: torch.dtype, infinity_is_nan: bool = False) -> tuple[Tensor, Tensor]:
    """Quantizes x [M, K] in blocks of 1x32; returns (q, scale_inv E8M0 [M, ceil(K/32)]).

    A partial block is padded with zeros. With `infinity_is_nan` the scale_inv of a block with an infinity is NaN.
    """
    rows, cols = x.shape
    tiled = F.pad(x, (0, -cols % MX_BLOCK)).view(rows, blocks(cols, MX_BLOCK), MX_BLOCK)
    largest = amax(tiled, (2,))
    codes = mx_codes(largest, dtype)
    scale = expand((2 * ONE - codes).view(E8M0), rows, cols)
    codes = codes.masked_fill(largest.isinf(), NAN) if infinity_is_nan else codes
    return saturating_cast(x.float() * scale, dtype), codes.view(E8M0)


def _fake_quantize(x: Tensor, dtype: torch.dtype, *rest: bool) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    return q, torch.empty((x.shape[0], blocks(x.shape[1], MX_BLOCK)), dtype=E8M0, device=x.device)


def mx_edge_values(dtype: torch.dtype) -> Tensor:
    """Returns rows of three blocks whose amaxes lie on both sides of every border of the rule.

    They are zero, subnormal, at both ends of the exponent's range, with mantissas at and beside 1.75, infinite and NaN.
    """
    mantissas = torch.tensor([1.0, 1.5, 1.75 - 2**-7, 1.75 - 2**-23, 1.75, 1.75 + 2**-23, 1.75 + 2**-7, 2 - 2**-23])
    exponents = torch.tensor([-126, -119, -118, -111, -110, -9, -1, 0, 8, 9, 15, 16, 100, 127], dtype=torch.float32)
    largest = [*(mantissas.unsqueeze(1) * torch.exp2(exponents)).flatten().tolist(), 0.0, 1e-45, 1e-40, 2.0**-127]
    largest += [torch.inf, -torch.inf, torch.nan]
    spread = torch.linspace(-1, 1, MX_BLOCK)
    rows = torch.tensor(largest).unsqueeze(1) * spread
    with_nan = torch.where(torch.arange(MX_BLOCK) == 5, torch.nan, rows)
    return torch.cat([rows, with_nan, rows.flip(0)], 1).to(dtype)


def _cast_cases() -> list[Case]:
    inputs = {
        "tiles 40x256": partial(tiled_noise, 40, 256),
        "edges": mx_edge_values,
        "ragged 5x70": partial(tiled_noise, 5, 70),
        "one element": partial(tiled_noise, 1, 1),
        "no rows": partial(tiled_noise, 0, 64),
        "no columns": partial(tiled_noise, 3, 0),
    }
    types = (torch.float32, torch.bfloat16, torch.float16)

    def make(x: Any, dtype: torch.dtype, fp8: torch.dtype, infinity_is_nan: bool) -> tuple[Any, ...]:
        return x(dtype=dtype), fp8, infinity_is_nan

    grid = product(inputs.items(), types, FP8_MAX, (False, True))
    return [Case(f"{n} {d} {f} nan {i}", partial(make, x, d, f, i)) for (n, x), d, f, i in grid]


define(
    "quantize_mx(Tensor x, ScalarType dtype, bool infinity_is_nan=False) -> (Tensor q, Tensor scale_inv)",
    quantize_mx,
    fake=_fake_quantize,
    cases=_cast_cases,
    kernel_devices=("cpu",),
    recipes=("mxfp8",),
)


def widen(q: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q [M, K] as an operand of `mm`: values that are exact in BF16, in FP32, and the scale of each row.

    Data with FP32 scales [] or [M, 1] stay as they are.
    """
    if scale_inv.dtype != E8M0:
        return q.float(), scale_inv
    codes = scale_inv.view(torch.uint8).int()
    blocks = codes.shape[1]
    row = codes.amax(1, keepdim=True).clamp(min=MIN_ROW_CODE) if blocks else codes.new_full((len(codes), 1), ONE)
    shift = row - codes
    powers = (ONE - shift.clamp(max=ONE)).to(torch.uint8).view(E8M0).float()
    factor = torch.where(shift > MAX_SHIFT[q.dtype], 0.0, powers)
    values = q.float()
    scaled = values * factor.repeat_interleave(MX_BLOCK, 1)[:, : q.shape[1]]
    return torch.where(values.isfinite(), scaled, values), row.to(torch.uint8).view(E8M0).float()


def mx_mm(
    ops: Any,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies a [M, K] by b [N, K], of which at least one is in MX blocks; returns [M, N].

    The other has FP32 scales [] or [M, 1] and may be BF16. On a CPU b may be packed if K is a multiple of 32. The
    result is rounded to `out_dtype` before it is added to the optional residual.
    """
    weight = unpack_weight(b) if b.dim() == 3 else b
    (x, a_row), (y, b_row) = widen(a, a_scale_inv), widen(weight, b_scale_inv)
    sums = ops.mm(x.to(torch.bfloat16), y.to(torch.bfloat16), None, torch.float32)
    out = _apply_scales(sums, a_row, b_row.t())
    out = (out if bias is None else out + bias.float()).to(out_dtype)
    return out if residual is None else residual + out


def mx_case(
    shape: tuple[int, int, int], a: torch.dtype, b: torch.dtype, packed: bool, has_residual: bool, out: torch.dtype
) -> tuple[Any, ...]:
    """Returns arguments of mx_mm, with a bias if N is odd. The scale of a BF16 operand is 0.5 for all of it."""
    m, n, k = shape
    operands = []
    for rows, dtype, seed in ((m, a, 1), (n, b, 2)):
        is_wide = dtype == torch.bfloat16
        q = random_normal(rows, k, dtype, seed) if is_wide else random_fp8(rows, k, dtype, seed)
        operands.append((q, torch.tensor(0.5) if is_wide else random_mx_scales(rows, k, seed + 2)))
    (x, a_scale), (weight, b_scale) = operands
    weight = packed_weight(weight) if packed else weight
    bias = torch.linspace(-2, 2, n).to(out) if n % 2 else None
    residual = random_normal(m, n, out, 5) if has_residual else None
    return x, weight, a_scale, b_scale, bias, residual, out


def _mx_mm_cases() -> list[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    shapes = [(1, 5, 64), (3, 130, 200), (65, 33, 129), (17, 1, 1), (0, 8, 32), (4, 0, 32), (5, 6, 0), (9, 40, 1056)]
    grid = [
        *((s, E4M3, E4M3, False, False, fp32) for s in shapes),
        *(((7, 33, 1100), a, b, False, True, bf16) for a, b in ((E5M2, E4M3), (E4M3, E5M2), (bf16, E4M3))),
        *(((m, 48, k), E4M3, E4M3, True, m == 7, bf16) for m, k in product((1, 2, 7, 70), (96, 1152))),
        *(((m, 32, 1056), bf16, E4M3, True, False, torch.float16) for m in (1, 5)),
        ((3, 48, 64), E4M3, bf16, False, False, fp32),
    ]
    return [
        Case(f"{s} {a} {b} packed {p} residual {r} {o}", partial(mx_case, s, a, b, p, r, o))
        for s, a, b, p, r, o in grid
    ]


define_composed(
    "mx_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor? residual,"
    " ScalarType out_dtype) -> Tensor",
    mx_mm,
    fake=fake_packed_product,
    cases=_mx_mm_cases,
    kernel_devices=("cpu",),
    recipes=("mxfp8",),
)


def dequantize_to_bf16(q: Tensor, scale_inv: Tensor) -> Tensor:
    """Returns q [M, K] in MX blocks times its scales in BF16, exactly unless a value is subnormal in BF16."""
    return (q.float() * expand(scale_inv, *q.shape)).to(torch.bfloat16)
