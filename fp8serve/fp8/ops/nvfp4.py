"""NVFP4 for every operand of a product, as Transformer Engine trains with it: casts, rotation and product.

    values      BF16 [M, K]: E2M1 codes times the E4M3 scales of their blocks, which BF16 holds exactly
    scale_inv   FP32 [], or [M, 1] with one for each row; multiplies the finished sum

A cast keeps values and not codes (e2m1.py), because the product reads BF16 operands: processors without FP4 multiply
nothing narrower exactly. So training stores two bytes an element and not half of one.

`cast_nvfp4` has the order of operations of e2m1.py. A block has 1 or 16 rows, and 16 columns. With a seed it rounds
stochastically: up with the probability of the distance from the code below, by 24 random bits. The bits come from
Philox4x32-10, whose key is the seed. Its counter is the position of the element, so they depend neither on the
number of threads nor on the processor:

    row r, column c of n, a multiple of 16:   word c / (n/4) of the counter (r n/4 + c % (n/4), 0, stream, 0)

`rotate` multiplies every 16 elements of a column by the random Hadamard transform diag(s) H / 4, which spreads outliers
over their block. It is orthogonal: a product is unchanged if both operands are rotated along the dimension that it
contracts. s are Transformer Engine's signs, and H is in Sylvester's order. Sums are taken in four steps of a butterfly,
in FP32.
"""

from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import amax, blocks
from fp8serve.fp8.ops.e2m1 import E2M1_MAX, block_amaxes, block_factor, block_scales, tensor_scale, to_codes
from fp8serve.fp8.ops.four_bit import E2M1_VALUES, NVFP4_BLOCK, code_values
from fp8serve.fp8.ops.gemm import _apply_scales
from fp8serve.fp8.ops.inputs import random_normal, tiled_noise
from fp8serve.fp8.ops.registry import Case, define, define_composed

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # of Transformer Engine's transform
_PHILOX = 0xD2511F53, 0xCD9E8D57  # the factors, and what a round adds to the key
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def philox(seed: Tensor, counters: Tensor, stream: int) -> Tensor:
    """Returns four numbers of 32 bits for each counter (low half, high half, stream, 0), int64 [4, counters]."""
    keys = [seed & _WORD, seed >> 32 & _WORD]
    words = [counters & _WORD, counters >> 32, torch.full_like(counters, stream), torch.zeros_like(counters)]
    for _ in range(10):
        first, second = _PHILOX[0] * words[0], _PHILOX[1] * words[2]  # mod 2^64, which is all that is read
        high = [second >> 32 & _WORD ^ words[1] ^ keys[0], first >> 32 & _WORD ^ words[3] ^ keys[1]]
        words = [high[0], second & _WORD, high[1], first & _WORD]
        keys = [key + step & _WORD for key, step in zip(keys, _WEYL, strict=True)]
    return torch.stack(words)


def uniform(seed: Tensor, rows: int, columns: int, stream: int) -> Tensor:
    """Returns a number from [0, 1) for each element of a matrix whose number of columns is a multiple of 4, FP32."""
    counters = torch.arange(rows * columns // 4, device=seed.device)
    words = philox(seed, counters, stream).view(4, rows, columns // 4)
    return (words.transpose(0, 1).reshape(rows, columns) >> 8).float() * 2.0**-24


def stochastic_codes(x: Tensor, random: Tensor) -> Tensor:
    """Returns the E2M1 codes of x, FP32, rounded up in magnitude where `random` is below the distance from the code
    below."""
    values = torch.tensor(E2M1_VALUES, device=x.device)
    magnitude = x.abs().clamp(max=E2M1_MAX)
    below = torch.bucketize(magnitude, values[1:], right=True)
    low, high = values[below], values[(below + 1).clamp(max=7)]
    fraction = (magnitude - low) / torch.where(below == 7, 1.0, high - low)
    return (below + (random < fraction)).to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)


def cast_nvfp4(x: Tensor, by_row: bool, block_rows: int, seed: Tensor | None, stream: int) -> tuple[Tensor, Tensor]:
    """Casts x [M, K]; returns (values BF16 [M, K], scale_inv).

    The FP32 scale follows from the amax of x. With `by_row` it follows from the amax of each row, and scale_inv is
    [M, 1]. With `seed`, int64 [], the cast rounds stochastically. A NaN makes its block NaN,
    and an infinity makes scale_inv NaN.
    """
    rows, columns = x.shape
    x = x.float()
    tensor_amax = amax(x, (1,)).unsqueeze(1) if by_row else amax(x)
    scale = tensor_scale(tensor_amax)
    tiled = F.pad(x, (0, -columns % NVFP4_BLOCK)).view(rows, blocks(columns, NVFP4_BLOCK), NVFP4_BLOCK)
    scales = block_scales(block_amaxes(tiled, block_rows) * (scale * (1 / E2M1_MAX)))
    scaled = tiled * block_factor(scales, scale.reciprocal()).unsqueeze(2)
    if seed is None:
        codes = to_codes(scaled)
    else:
        codes = stochastic_codes(
            scaled, uniform(seed.to(x.device), rows, tiled.shape[1] * NVFP4_BLOCK, stream).view_as(scaled)
        )
    values = torch.where(scales.isnan().unsqueeze(2), torch.nan, code_values(codes) * scales.unsqueeze(2))
    scale_inv = torch.where(tensor_amax.isinf(), torch.nan, scale.reciprocal())
    return values.flatten(1)[:, :columns].to(torch.bfloat16, memory_format=torch.contiguous_format), scale_inv


def _fake_cast(x: Tensor, by_row: bool, *rest: Any) -> tuple[Tensor, Tensor]:
    scale_inv = torch.empty((x.shape[0], 1) if by_row else (), device=x.device)
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device), scale_inv


def _edges(dtype: torch.dtype) -> Tensor:
    """Returns rows of blocks on and beside every border of the rounding, with zeros, subnormals, infinities and NaN."""
    middles = [(a + b) / 2 for a, b in pairwise(E2M1_VALUES)]
    values = torch.tensor([*E2M1_VALUES, *middles])
    neighbors = [values, -values.flip(0), values * (1 + 2**-20), values * (1 - 2**-20)]
    row = torch.cat([F.pad(part, (0, -len(part) % NVFP4_BLOCK), value=6.0) for part in neighbors])
    rows = [row, row * 1e-30, row * 1e-42, row * 1e30, row.roll(5), torch.where(row == 6, torch.nan, row), 0 * row]
    rows += [torch.where(torch.arange(len(row)) == 3, value, row) for value in (torch.inf, -torch.inf, torch.nan)]
    return torch.stack(rows).to(dtype)


def _finite_edges(dtype: torch.dtype) -> Tensor:
    """Returns the same rows with zeros for infinities and NaN, so that the scale of the tensor is not 1."""
    x = _edges(dtype)
    return torch.where(x.isfinite(), x, 0)


def _cast_case(make: Any, dtype: torch.dtype, by_row: bool, block_rows: int, seed: int | None) -> tuple[Any, ...]:
    return make(dtype=dtype), by_row, block_rows, None if seed is None else torch.tensor(seed), 1


def _cast_cases() -> list[Case]:
    inputs = {
        "tiles 40x256": partial(tiled_noise, 40, 256),
        "edges": _edges,
        "finite edges": _finite_edges,
        "ragged 21x70": partial(tiled_noise, 21, 70),
    }
    inputs |= {"one element": partial(tiled_noise, 1, 1), "no rows": partial(tiled_noise, 0, 64)}
    grid = product(
        inputs.items(), (torch.float32, torch.bfloat16, torch.float16), (False, True), (1, 16), (None, 2**61 + 5)
    )
    return [
        Case(f"{name} {dtype} row {r} block {b} seed {s}", partial(_cast_case, make, dtype, r, b, s))
        for (name, make), dtype, r, b, s in grid
    ]  # fmt: skip


define(
    "cast_nvfp4(Tensor x, bool by_row, int block_rows, Tensor? seed, int stream) -> (Tensor q, Tensor scale_inv)",
    cast_nvfp4,
    fake=_fake_cast,
    cases=_cast_cases,
    kernel_devices=("cpu",),
    recipes=("nvfp4",),
)


def rotate(x: Tensor) -> Tensor:
    """Returns x [M, K] in BF16, padded with rows of zeros to a multiple of 16, and each 16 elements of a column
    rotated."""
    padded = F.pad(x.float(), (0, 0, 0, -len(x) % NVFP4_BLOCK))
    groups, columns = len(padded) // NVFP4_BLOCK, x.shape[1]
    signs = torch.tensor(SIGNS, device=x.device, dtype=torch.float32)
    parts = padded.view(groups, NVFP4_BLOCK, columns) * signs.unsqueeze(1)
    for stride in (1, 2, 4, 8):
        first, second = parts.view(groups, NVFP4_BLOCK // (2 * stride), 2, stride, columns).unbind(2)
        parts = torch.stack([first + second, first - second], 2)
    return (parts.view(padded.shape) * 0.25).to(torch.bfloat16)


def _fake_rotate(x: Tensor) -> Tensor:
    return x.new_empty((blocks(x.shape[0], NVFP4_BLOCK) * NVFP4_BLOCK, x.shape[1]), dtype=torch.bfloat16)


def _rotate_cases() -> list[Case]:
    shapes = ((64, 5), (37, 50), (1, 1), (0, 32), (32, 0), (40, 512))
    types = torch.float32, torch.bfloat16, torch.float16
    return [Case(f"{s} {d}", lambda s=s, d=d: (tiled_noise(*s, dtype=d),)) for s, d in product(shapes, types)]  # type: ignore[misc]


define(
    "rotate(Tensor x) -> Tensor",
    rotate,
    fake=_fake_rotate,
    cases=_rotate_cases,
    kernel_devices=("cpu",),
    recipes=("nvfp4",),
)


def nvfp4_mm(
    ops: Any,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies a [M, K] by b [N, K], both BF16 values of `cast_nvfp4`; returns [M, N].

    The sums are those of `mm`; scales [] or [rows, 1] multiply them, and the bias is added before rounding.
    """
    sums = _apply_scales(ops.mm(a, b, None, torch.float32), a_scale_inv, b_scale_inv.t())
    return (sums if bias is None else sums + bias.float()).to(out_dtype)


def _fake_mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=rest[-1])


def _mm_case(shape: tuple[int, int, int], by_row: bool, size: float, out: torch.dtype) -> tuple[Any, ...]:
    """Returns arguments with a bias if N is odd; `size` multiplies a."""
    m, n, k = shape
    a = cast_nvfp4(random_normal(m, k, torch.float32) * size, by_row, 1, None, 0)
    b = cast_nvfp4(random_normal(n, k, torch.float32, 1), False, 16, None, 0)
    return a[0], b[0], a[1], b[1], torch.linspace(-2, 2, n).to(out) if n % 2 else None, out


def _mm_cases() -> list[Case]:
    shapes = ((1, 5, 64), (3, 130, 200), (65, 33, 129), (0, 8, 32), (5, 6, 0), (9, 40, 1056))
    grid = product(shapes, (False, True), (1.0, 1e-32), (torch.float32, torch.bfloat16))
    return [Case(f"{s} row {r} size {z} {o}", partial(_mm_case, s, r, z, o)) for s, r, z, o in grid]


define_composed(
    "nvfp4_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    nvfp4_mm,
    fake=_fake_mm,
    cases=_mm_cases,
    kernel_devices=("cpu",),
    recipes=("nvfp4",),
)
