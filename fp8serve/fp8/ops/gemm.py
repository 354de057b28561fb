"""Products of two matrices with K contiguous, accumulated in FP32: scaled FP8, BF16, and ops fused after them;
and the gradient of a weight with few rows or columns, whose sum is over tokens."""

from functools import partial
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import BLOCK, FP8_MAX, dequantize
from fp8serve.fp8.ops.casts import quantize
from fp8serve.fp8.ops.inputs import dense_like, normal, quantized, row_cases
from fp8serve.fp8.ops.registry import Case, declare, define, implement


def _is_block(scale_inv: Tensor, rows: int, cols: int) -> bool:
    return scale_inv.dim() == 2 and tuple(scale_inv.shape) not in {(rows, 1), (1, 1)}


TILE = 32  # rows


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K]^T in FP32. On a CPU no row depends on those beside it.

    A BLAS chooses the order of its sums by the shape of the product. A CPU therefore multiplies TILE rows at a time,
    the last of them padded with zeros: all products have one shape.
    """
    if a.device.type != "cpu" or len(a) == 0:
        return a @ b.t()
    tiles = torch.split(F.pad(a, (0, 0, 0, -a.shape[0] % TILE)), TILE)
    return torch.cat([tile @ b.t() for tile in tiles])[: a.shape[0]]


def _scaled_by(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """sums * a * b, rounded after each product. Where a is far from 1 and b lies on the other side of 1, the first
    product may leave the range of FP32 though the second would bring it back: then a factor of 2^64 is moved from one
    to the other, which changes no bit of a result that stays in range."""
    one = torch.ones((), device=sums.device)
    far_up, far_down = 2.0**64 * one, 2.0**-64 * one
    up, down = (a > far_up) & (b < 1), (a < far_down) & (b > 1)
    of_a = torch.where(up, far_down, torch.where(down, far_up, one))
    return sums * (a * of_a) * (b / of_a)


def scaled_mm(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """[M, K] x [N, K] -> [M, N], accumulated in FP32; the scales multiply the FP32 sums, bias is added before rounding.

    With block scales the operands are dequantized first, one FP32 rounding per element: as accurate as scaling the
    partial sum of every block, and one matmul instead of K/128.
    """
    with torch.autocast(a.device.type, enabled=False):  # a surrounding torch.autocast would make the matmul BF16
        if _is_block(a_scale_inv, *a.shape) or _is_block(b_scale_inv, *b.shape):
            out = _multiply(dequantize(a, a_scale_inv), dequantize(b, b_scale_inv))
        else:
            out = _scaled_by(_multiply(a.float(), b.float()), a_scale_inv, b_scale_inv.t())
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _fake_product(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """The last argument is the dtype of the result."""
    return a.new_empty((a.shape[0], b.shape[0]), dtype=rest[-1])


def _scales(rows: int, cols: int, seed: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shapes = {"tensor": (), "row": (rows, 1), "1x128": (rows, -(-cols // BLOCK))}
    shapes["128x128"] = (-(-rows // BLOCK), -(-cols // BLOCK))
    return {name: torch.exp2(torch.randn(shape, generator=noise)) for name, shape in shapes.items()}


def mm_case(
    m: int, n: int, k: int, a: torch.dtype, b: torch.dtype, kinds: tuple[str, str], out: torch.dtype
) -> tuple[Any, ...]:
    """The arguments of scaled_mm; a bias where n is odd."""
    bias = torch.linspace(-2, 2, n).to(out) if n % 2 else None
    scales = _scales(m, k, 3)[kinds[0]], _scales(n, k, 4)[kinds[1]]
    return quantized(m, k, a, 1), quantized(n, k, b, 2), *scales, bias, out


def _mm_cases() -> list[Case]:
    e4m3, e5m2 = FP8_MAX
    shapes = [(1, 5, 16), (3, 130, 200), (65, 33, 129), (128, 128, 256), (17, 1, 1), (0, 8, 16), (4, 0, 16), (5, 6, 0)]
    formats = [(e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2), (e5m2, e5m2)]
    kinds = [
        ("tensor", "tensor"),
        ("row", "row"),
        ("1x128", "128x128"),
        ("1x128", "1x128"),
        ("tensor", "row"),
        ("row", "128x128"),
    ]
    grid = [
        (s, f, kind, torch.float32) for s, (f, kind) in product(shapes, zip(formats + formats[:2], kinds, strict=True))
    ]
    grid += [((9, 31, 77), formats[0], kinds[0], out) for out in (torch.bfloat16, torch.float16)]
    return [Case(f"{s} {f} {kind} {out}", partial(mm_case, *s, *f, kind, out)) for s, f, kind, out in grid]


define(
    "scaled_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    scaled_mm,
    fake=_fake_product,
    cases=_mm_cases,
    recipes=("delayed", "current", "rowwise", "block"),
)
# The same product by a kernel that the caller names, to find out which is fastest.
declare(
    "scaled_mm_by(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype,"
    " str kernel, int swizzle) -> Tensor",
    kernels=("cuda",),
)
# Disables the named GEMM kernels on a GPU (csrc/cuda/gemm_switches.h). If all are disabled, products call the next op.
declare("gemm_kernels(Tensor here, str off) -> str", kernels=("cuda",))
declare(
    "scaled_mm_by_reference(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    fake=_fake_product,
)
implement("scaled_mm_by_reference", scaled_mm)


def scaled_mm_quantize(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_scale: Tensor,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`scaled_mm` in FP32, quantized by a given scale []: (q [M, N], amax before the scale). No rounding between."""
    return quantize(scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, torch.float32), out_scale, out_dtype)


def _composed_mm_quantize(
    a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, bias: Tensor | None, out_scale: Tensor, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    y = torch.ops.fp8serve.scaled_mm(a, b, a_s, b_s, bias, torch.float32)
    return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize(y, out_scale, out))


def _fake_mm_quantize(a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_product(a, b, *rest), a.new_empty((), dtype=torch.float32)


def _mm_quantize_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    """A row of zeros, and sums on both sides of the largest value of FP8."""
    *args, _ = mm_case(rows, 11, cols, torch.float8_e4m3fn, torch.float8_e4m3fn, ("row", "tensor"), dtype)
    args[0][:1] = 0
    return *args, torch.tensor(0.03), torch.float8_e4m3fn


define(
    "scaled_mm_quantize(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor out_scale,"
    " ScalarType out_dtype) -> (Tensor q, Tensor amax)",
    scaled_mm_quantize,
    composition=_composed_mm_quantize,
    fake=_fake_mm_quantize,
    cases=partial(row_cases, _mm_quantize_case),
    kernels=("cuda",),
)


def scaled_mm_add(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, bias: Tensor | None, residual: Tensor
) -> Tensor:
    """residual [M, N] + scaled_mm(...), whose result is rounded to the residual's dtype before it is added."""
    return residual + scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, residual.dtype)


def _fake_mm_add(a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return dense_like(residual)


def _add_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    args = mm_case(rows, 11, cols, torch.float8_e4m3fn, torch.float8_e4m3fn, ("row", "tensor"), dtype)
    return *args[:5], normal(rows, 11, dtype)


define(
    "scaled_mm_add(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor residual)"
    " -> Tensor",
    scaled_mm_add,
    fake=_fake_mm_add,
    cases=partial(row_cases, _add_case),
)


def mm(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """BF16 [M, K] x BF16 [N, K] -> [M, N], accumulated in FP32: like scaled_mm, a row does not depend on its batch."""
    one = torch.ones((), device=a.device)
    return scaled_mm(a, b, one, one, bias, out_dtype)


def _mm_bf16_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    return normal(rows, cols, torch.bfloat16), normal(9, cols, torch.bfloat16, 1), normal(1, 9, dtype)[0], dtype


define(
    "mm(Tensor a, Tensor b, Tensor? bias, ScalarType out_dtype) -> Tensor",
    mm,
    fake=_fake_product,
    cases=partial(row_cases, _mm_bf16_case),
)


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x: BF16 [T, N] and [T, K] -> FP32 [N, K], accumulated in FP32.

    For an adapter, whose N or K is its rank. A matrix product of FP32 copies takes longer to make these than to
    multiply.
    """
    with torch.autocast(dy.device.type, enabled=False):
        return dy.float().t() @ x.float()


def _fake(dy: Tensor, x: Tensor) -> Tensor:
    return dy.new_empty((dy.shape[1], x.shape[1]), dtype=torch.float32)


def _case(tokens: int, n: int, k: int) -> tuple[Any, ...]:
    return normal(tokens, n, torch.bfloat16), normal(tokens, k, torch.bfloat16, 1)


def _cases() -> list[Case]:
    grid = product((0, 1, 37, 600), ((8, 130), (3, 64), (16, 1), (0, 5)))
    return [Case(f"{t} x {n} x {k}", partial(_case, t, n, k)) for t, (n, k) in grid]


define("wgrad(Tensor dy, Tensor x) -> Tensor", wgrad, fake=_fake, cases=_cases, kernels=("cpu",))
