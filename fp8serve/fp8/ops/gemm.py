"""Products of two matrices [M, K] and [N, K] with FP32 accumulation: scaled FP8, BF16, fused with other ops, and the
gradient of a small weight."""

from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX, blocks, dequantize
from fp8serve.fp8.ops.inputs import fake_like_last, grid_cases, random_fp8, random_normal, row_cases
from fp8serve.fp8.ops.registry import Case, declare, define, define_composed, implement


def _is_block(scale_inv: Tensor, rows: int, cols: int) -> bool:
    return scale_inv.dim() == 2 and tuple(scale_inv.shape) not in {(rows, 1), (1, 1)}


TILE_ROWS = 32


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns a [M, K] @ b [N, K]^T in FP32. On a CPU a row of the result does not depend on other rows of a.

    A BLAS chooses the order of its sums by the shape of the product. So a CPU multiplies TILE_ROWS rows at a time, and
    the last tile is padded with zeros: all products have one shape.
    """
    if a.device.type != "cpu" or len(a) == 0:
        return a @ b.t()
    tiles = torch.split(F.pad(a, (0, 0, 0, -a.shape[0] % TILE_ROWS)), TILE_ROWS)
    return torch.cat([tile @ b.t() for tile in tiles])[: a.shape[0]]


def _apply_scales(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Returns sums * a * b, rounded after each product.

    If a is very large and b below 1, or the reverse, sums * a may leave the range of FP32 although the result is in
    range. In this case a factor of 2^64 moves from one scale to the other, which changes no bit of the result.
    """
    one = torch.ones((), device=sums.device)
    large, small = 2.0**64 * one, 2.0**-64 * one
    is_large, is_small = (a > large) & (b < 1), (a < small) & (b > 1)
    factor = torch.where(is_large, small, torch.where(is_small, large, one))
    return sums * (a * factor) * (b / factor)


def scaled_mm(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Multiplies FP8 [M, K] by [N, K]; returns [M, N]. Scales multiply FP32 sums, and bias is added before rounding.

    With block scales the operands are dequantized first, with one FP32 rounding per element. This is as accurate as
    scaling the partial sum of every block, and needs one matmul instead of K/128.
    """
    with torch.autocast(a.device.type, enabled=False):  # under torch.autocast the matmul would be BF16
        if _is_block(a_scale_inv, *a.shape) or _is_block(b_scale_inv, *b.shape):
            out = _multiply(dequantize(a, a_scale_inv), dequantize(b, b_scale_inv))
        else:
            out = _apply_scales(_multiply(a.float(), b.float()), a_scale_inv, b_scale_inv.t())
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _fake_product(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """Returns the shape of a product; the last argument is the dtype of the result."""
    return a.new_empty((a.shape[0], b.shape[0]), dtype=rest[-1])


def _fake_stored_product(*arguments: Any) -> Tensor:
    return _fake_product(*arguments[:6])


def _scales(rows: int, cols: int, seed: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shapes = {"tensor": (), "row": (rows, 1), "1x128": (rows, blocks(cols)), "128x128": (blocks(rows), blocks(cols))}
    return {name: torch.exp2(torch.randn(shape, generator=noise)) for name, shape in shapes.items()}


def mm_case(
    m: int, n: int, k: int, a: torch.dtype, b: torch.dtype, kinds: tuple[str, str], out: torch.dtype
) -> tuple[Any, ...]:
    """Returns arguments of scaled_mm, with a bias if n is odd."""
    bias = torch.linspace(-2, 2, n).to(out) if n % 2 else None
    scales = _scales(m, k, 3)[kinds[0]], _scales(n, k, 4)[kinds[1]]
    return random_fp8(m, k, a, 1), random_fp8(n, k, b, 2), *scales, bias, out


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


def cast_norm(ops: Any, x: Tensor, *norm: Any) -> Any:
    """Returns the first operand of a product: x in FP8, or with the arguments of a norm the cast of the norm of x.

    The arguments are weight [K], eps, and of quantize_watched the scale and counters.
    """
    return ops.quantize_watched(x, *norm) if norm else x


def stored_mm(ops: Any, a: Tensor, *arguments: Any) -> Any:
    """Returns scaled_mm for a weight b that the preceding kernel on the stream does not write.

    So a GPU may read the weight while that kernel still runs. scaled_mm_add and watched_mm_add expect such a weight,
    too. With the arguments of a norm, a is cast by `cast_norm`.
    """
    return ops.scaled_mm(cast_norm(ops, a, *arguments[5:]), *arguments[:5])


def normed_case(case: Case) -> Case:
    """Returns a case of an op for stored weights whose first operand is the cast of a norm, without counted padding."""

    def make() -> tuple[Any, ...]:
        a, *arguments = case.make()
        x, weight = (random_normal(rows, a.shape[1], torch.bfloat16, seed) for rows, seed in ((len(a), 5), (1, 6)))
        counters = torch.tensor(0.5), torch.tensor(3), torch.tensor(max(len(a) - 1, 1))
        return x, *arguments, weight[0], 1e-5, torch.tensor(230.0), *counters

    return Case(f"{case.name} norm", make)


def _stored_mm_cases() -> list[Case]:
    def make(shape: tuple[int, int, int], kinds: tuple[str, str]) -> tuple[Any, ...]:
        return mm_case(*shape, torch.float8_e4m3fn, torch.float8_e4m3fn, kinds, torch.bfloat16)

    shapes = [(1, 48, 400), (5, 130, 2064), (17, 16, 144), (3, 24, 200), (64, 40, 272)]
    kinds = [("tensor", "tensor"), ("tensor", "row"), ("1x128", "128x128")]
    return grid_cases("{} {}", make, shapes, kinds)


define_composed(
    "stored_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype,"
    " Tensor? norm_weight=None, float? eps=None,"
    " Tensor? norm_scale=None, Tensor(a!)? norm_amax=None, Tensor(b!)? norm_saturated=None,"
    " Tensor? norm_rows=None) -> Tensor",
    stored_mm,
    fake=_fake_stored_product,
    cases=_stored_mm_cases,
    kernel_devices=("cuda",),
)
# scaled_mm by the kernel that the caller names, to measure kernels.
declare(
    "scaled_mm_by(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype,"
    " str kernel, int swizzle) -> Tensor",
    kernel_devices=("cuda",),
)
# Disables the named GEMM kernels on a GPU (csrc/cuda/gemm_switches.h). If all are disabled, products call
# scaled_mm_by_reference.
declare("gemm_kernels(Tensor tensor, str disabled) -> str", kernel_devices=("cuda",))
declare(
    "scaled_mm_by_reference(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    fake=_fake_product,
)
implement("scaled_mm_by_reference", scaled_mm)


def scaled_mm_quantize(
    ops: Any,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_scale: Tensor,
    out_dtype: torch.dtype,
) -> Any:
    """Quantizes the unrounded FP32 result of scaled_mm by `out_scale` []; returns (q [M, N], amax before scaling)."""
    y = ops.scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, torch.float32)
    return ops.quantize(y, out_scale, out_dtype)


def _fake_mm_quantize(a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_product(a, b, *rest), a.new_empty((), dtype=torch.float32)


def _mm_quantize_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    """Arguments with a row of zeros, and with results below and above the largest value of FP8."""
    *args, _ = mm_case(rows, 11, cols, torch.float8_e4m3fn, torch.float8_e4m3fn, ("row", "tensor"), dtype)
    args[0][:1] = 0
    return *args, torch.tensor(0.03), torch.float8_e4m3fn


define_composed(
    "scaled_mm_quantize(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor out_scale,"
    " ScalarType out_dtype) -> (Tensor q, Tensor amax)",
    scaled_mm_quantize,
    fake=_fake_mm_quantize,
    cases=partial(row_cases, _mm_quantize_case),
    kernel_devices=("cuda",),
)


def scaled_mm_add(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, bias: Tensor | None, residual: Tensor
) -> Tensor:
    """Returns residual [M, N] + scaled_mm(...); the product is rounded to the residual's dtype before the addition."""
    return residual + scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, residual.dtype)


def _add_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    args = mm_case(rows, 11, cols, torch.float8_e4m3fn, torch.float8_e4m3fn, ("row", "tensor"), dtype)
    return *args[:5], random_normal(rows, 11, dtype)


define(
    "scaled_mm_add(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, Tensor residual)"
    " -> Tensor",
    scaled_mm_add,
    fake=fake_like_last,
    cases=partial(row_cases, _add_case),
)


def mm(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Multiplies BF16 [M, K] by [N, K] and returns [M, N]. As in scaled_mm, a row does not depend on other rows."""
    one = torch.ones((), device=a.device)
    return scaled_mm(a, b, one, one, bias, out_dtype)


def _mm_bf16_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    a, b = random_normal(rows, cols, torch.bfloat16), random_normal(9, cols, torch.bfloat16, 1)
    return a, b, random_normal(1, 9, dtype)[0], dtype


define(
    "mm(Tensor a, Tensor b, Tensor? bias, ScalarType out_dtype) -> Tensor",
    mm,
    fake=_fake_product,
    cases=partial(row_cases, _mm_bf16_case),
)


def wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """Returns dy^T x, FP32 [N, K], for BF16 dy [T, N] and x [T, K].

    The op is for adapter weights, for which N or K is the rank. For such sizes a kernel is faster than this reference,
    which spends more time on FP32 copies than on the product.
    """
    with torch.autocast(dy.device.type, enabled=False):
        return dy.float().t() @ x.float()


def _fake_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    return dy.new_empty((dy.shape[1], x.shape[1]), dtype=torch.float32)


def _wgrad_case(tokens: int, columns: tuple[int, int]) -> tuple[Any, ...]:
    return tuple(random_normal(tokens, n, torch.bfloat16, seed) for seed, n in enumerate(columns))


define(
    "wgrad(Tensor dy, Tensor x) -> Tensor",
    wgrad,
    fake=_fake_wgrad,
    cases=partial(
        grid_cases, "{0} x {1[0]} x {1[1]}", _wgrad_case, (0, 1, 37, 600), ((8, 130), (3, 64), (16, 1), (0, 5))
    ),
    kernel_devices=("cpu",),
)
