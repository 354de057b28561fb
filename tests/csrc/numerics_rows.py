"""Which row of the table of numerics classes (fp8serve/fp8/numerics_classes.py) a test input belongs to, and inputs at
the edges of a row: subnormal values, infinities, NaN, and several blocks of K.

tests/csrc/test_numerics.py runs them at every level of this machine, tests/arm at those of ARM.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.numerics_classes import AMX, ROWS, Row
from fp8serve.fp8.ops import LEVELS, Case, cases, four_bit
from fp8serve.fp8.ops.arithmetic import E8M0, FP8_MAX
from fp8serve.fp8.ops.attention import prompt_case
from fp8serve.fp8.ops.gemm import mm_case
from fp8serve.fp8.ops.inputs import random_normal
from tests.csrc.conftest import SLOW_DOT, is_present

BF16, (E4M3, E5M2) = torch.bfloat16, FP8_MAX
PRODUCTS = (
    "scaled_mm",
    "scaled_mm_add",
    "packed_mm",
    "joined_mm",
    "mx_mm",
    "mm_4bit",
    "mm",
    "grouped_mm",
    "grouped_mm_4bit",
)
PRESENT = {level: level for level in LEVELS if is_present(level)}
"""The caps that this machine can run, and their columns in the table."""
PRESENT |= dict.fromkeys(SLOW_DOT, "avx512bf16")
PRESENT |= {cap: AMX for cap in ("amx", "emulated_amx") if is_present(cap)}
_ZERO = {
    "bias": lambda bias: None,
    "residual": lambda residual: None if residual is None else torch.zeros_like(residual),
}


def row_of(op: str, arguments: tuple[Any, ...]) -> Row:
    """Returns the row of an op on these arguments."""
    rows = [row for row in ROWS if op in row.ops]
    if len(rows) == 1:
        return rows[0]
    name = _attention_format(*arguments) if op == "paged_attention" else _product_format(op, *arguments)
    return next(row for row in rows if row.format == name)


def _attention_format(q: Tensor, k_cache: Tensor, *rest: Any) -> str:
    if q.dtype != BF16 or k_cache.dtype not in (BF16, *FP8_MAX):
        return "FP32 or FP16"
    return f"BF16 queries, {'BF16' if k_cache.dtype == BF16 else 'FP8'} keys"


def _product_format(op: str, a: Tensor, b: Tensor, a_scale: Any = None, b_scale: Any = None, *rest: Any) -> str:
    if op == "mm_4bit":  # whose third argument is the scale of b
        return "BF16 x MXFP4" if a_scale.dtype == E8M0 else "BF16 x NVFP4"
    is_mx = any(isinstance(scale, Tensor) and scale.dtype == E8M0 for scale in (a_scale, b_scale))
    if op == "grouped_mm":
        return "BF16 x FP8, MXFP8 or BF16" if a.dtype == BF16 else "MXFP8 x MXFP8" if is_mx else "FP8 x FP8"
    if is_mx:
        return "MXFP8 x BF16" if BF16 in (a.dtype, b.dtype) else "MXFP8 x MXFP8"
    if BF16 in (a.dtype, b.dtype):
        return "BF16 x BF16" if a.dtype == b.dtype else "BF16 x FP8 (w8a16)"
    has_blocks = op == "joined_mm" or any(scale.numel() > 1 and scale.shape[1] > 1 for scale in (a_scale, b_scale))
    return f"FP8 x FP8, scales by {'block' if has_blocks else 'tensor or row'}"


def edge_cases(op: str) -> list[Case]:
    """Returns further cases of an op: its rows without a case, and the edges of every row of products."""
    extra = list(_further_cases(op))
    if op not in PRODUCTS:
        return extra
    firsts: dict[Row, Case] = {}
    for case in [*cases(op), *extra]:
        arguments = case.make()
        if len(arguments[0]) >= 3 and arguments[0].numel() >= 128:
            firsts.setdefault(row_of(op, arguments), case)
    return [*extra, *(Case(f"{case.name}, edges", partial(_with_edges, op, case)) for case in firsts.values())]


def _further_cases(op: str) -> Iterator[Case]:
    """Yields cases with three blocks of K, with BF16 inputs beside FP8 weights, and with subnormal gradients."""
    if op == "scaled_mm":
        for kinds in (("row", "tensor"), ("1x128", "128x128")):
            yield Case(f"K = 2100, {kinds}", partial(mm_case, 9, 33, 2100, E4M3, E5M2, kinds, torch.float32))
    if op == "mm":
        yield Case("K = 2100", partial(_long_bf16_case, 9, 33, 2100))
    if op in {"scaled_mm", "scaled_mm_add", "packed_mm"}:
        narrow = [case for case in cases(op) if case.make()[0].dtype != BF16]
        first = max(narrow, key=lambda case: (case.make()[0].numel(), "float32" in case.name))
        yield Case(f"{first.name}, BF16 inputs", partial(_with_bf16_inputs, first))
    if op == "mm_4bit":
        for dtype in four_bit.BLOCK_OF:
            yield Case(f"{dtype}, sums that cancel", partial(_cancelling_case, dtype))
    if op == "nvfp4_mm":
        yield Case("K = 2112, blocks of many sizes", partial(_uneven_nvfp4_case, 9, 33, 2112))
    if op == "paged_attention":
        yield Case("BF16 over FP8", partial(prompt_case, E4M3, 4, 2, 16, [(90, 1), (70, 40)]))
        yield Case("BF16 over BF16", partial(prompt_case, BF16, 4, 2, 16, [(90, 1), (70, 40)]))
    if op in {"wgrad", "attention_backward"}:
        first = max(cases(op), key=lambda case: case.make()[0].numel())
        yield Case(f"{first.name}, subnormal", partial(_with_subnormals, first))


def _long_bf16_case(m: int, n: int, k: int) -> tuple[Any, ...]:
    return random_normal(m, k, BF16, 1), random_normal(n, k, BF16, 2), None, torch.float32


def _cancelling_case(dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns arguments of mm_4bit whose products with one weight row each nearly cancel, so that what remains shows
    the roundings of the sum in BF16, too."""
    codes, scales = four_bit.random_4bit(16, 1056, dtype, 3)
    x, weight = random_normal(16, 1056, BF16), four_bit.widen(codes, scales)[0].double()
    for row, column in product(range(16), range(4)):
        x[row, column] = 0
        weight_there = weight[row, column]
        x[row, column] = -(x[row].double() @ weight[row]) / weight_there if weight_there else 0
    return x, codes, scales, None if dtype == E8M0 else torch.tensor(1.0), None


def _uneven_nvfp4_case(m: int, n: int, k: int) -> tuple[Any, ...]:
    """Returns arguments of nvfp4_mm whose blocks differ by up to 2^16, so that FP32 rounds their sums."""
    sizes = torch.exp2(torch.arange(k) // 16 * 5 % 17 - 8.0)
    a = torch.ops.fp8serve.cast_nvfp4(random_normal(m, k, torch.float32, 1) * sizes, True, 1, None, 0)
    b = torch.ops.fp8serve.cast_nvfp4(random_normal(n, k, torch.float32, 2) * sizes, False, 1, None, 0)
    return a[0], b[0], a[1], b[1], None, torch.float32


def _with_bf16_inputs(case: Case) -> tuple[Any, ...]:
    a, b, _, *rest = case.make()
    return a.float().to(BF16), b, torch.tensor(1.0), *rest


def _subnormals(shape: torch.Size) -> Tensor:
    """Returns random BF16 values, all of them subnormal."""
    codes = torch.randint(1, 128, shape, generator=torch.Generator().manual_seed(1))
    signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(2))
    return (codes + (signs << 15)).to(torch.uint16).view(BF16)


def _with_subnormals(case: Case) -> tuple[Any, ...]:
    """Returns the arguments with subnormal values in the first one, the gradient."""
    first, *rest = case.make()
    return _subnormals(first.shape), *rest


def _with_edges(op: str, case: Case) -> tuple[Any, ...]:
    """Returns the arguments of a product with edges in the first operand: a row of the smallest values, one with an
    infinity, and one with NaN. There is no bias, and the residual is zero: others would hide them."""
    schema = getattr(torch.ops.fp8serve, op).default._schema
    values = zip(schema.arguments, case.make(), strict=False)
    a, *rest = (_ZERO[argument.name](value) if argument.name in _ZERO else value for argument, value in values)
    a = a.clone()
    if a.dtype == BF16:
        a[0] = _subnormals(a[0].shape)
        a[1, 0], a[2, 0] = torch.inf, torch.nan
    else:
        bits = a.view(torch.uint8)
        bits[0] = torch.arange(a.shape[1]) % 8 + 128 * (torch.arange(a.shape[1]) % 3 == 0)
        bits[1, 0], bits[2, 0] = (0x7E if a.dtype == E4M3 else 0x7C), 0x7F
    return a, *rest
