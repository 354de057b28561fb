"""silu(gate) * up, its gradient, and the cast behind it; any function of a BF16 number as a table of all its values.

A fused op is by definition the composition of its parts, rounding where the parts round. Only the last bit of the
sigmoid is left open.
"""

from functools import partial
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.ops.casts import quantize
from fp8serve.fp8.ops.inputs import (
    dense_like,
    fake_cast,
    fake_like_first,
    gradient_cases,
    hostile,
    normal,
    row_cases,
    tiles,
)
from fp8serve.fp8.ops.registry import Case, define


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; silu is rounded to its dtype before the product."""
    return F.silu(gate) * up


def _silu_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    return normal(rows, cols, dtype), normal(rows, cols, dtype, 1)


define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    silu_mul,
    fake=fake_like_first,
    cases=partial(row_cases, _silu_case),
)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_mul` with respect to gate and up; FP32 inside, rounded once."""
    wide, upstream = gate.float(), grad.float()
    sigmoid = wide.sigmoid()
    d_gate = upstream * up * (sigmoid * (1 + wide * (1 - sigmoid)))
    return d_gate.to(gate.dtype), (upstream * (wide * sigmoid).to(gate.dtype)).to(up.dtype)


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return dense_like(gate), dense_like(up)


define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor d_gate, Tensor d_up)",
    silu_mul_backward,
    fake=_fake_backward,
    cases=partial(gradient_cases, _silu_case),
)


def silu_mul_quantize(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`silu_mul` of gate and up [M, K], quantized by a given scale []: (q, amax)."""
    return quantize(silu_mul(gate, up), scale, dtype)


def _composed_silu_mul_quantize(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y = torch.ops.fp8serve.silu_mul(gate, up)
    return cast(tuple[Tensor, Tensor], torch.ops.fp8serve.quantize(y, scale, dtype))


def _silu_quantize_case(dtype: torch.dtype, shape: tuple[int, int], fp8: torch.dtype) -> tuple[Any, ...]:
    return tiles(*shape, dtype), tiles(*shape, dtype, seed=1), torch.tensor(3.0), fp8


def _silu_quantize_cases() -> list[Case]:
    grid = product((torch.float32, torch.bfloat16), ((5, 64), (33, 300)), FP8_MAX)
    return [Case(f"{d} {s} {fp8}", partial(_silu_quantize_case, d, s, fp8)) for d, s, fp8 in grid]


define(
    "silu_mul_quantize(Tensor gate, Tensor up, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    silu_mul_quantize,
    composition=_composed_silu_mul_quantize,
    fake=fake_cast,
    cases=_silu_quantize_cases,
)


def look_up(x: Tensor, table: Tensor) -> Tensor:
    """x BF16 [M, K] and table BF16 [65536] -> [M, K]: for each element the table's entry at the integer with its
    bits."""
    places = x.contiguous().view(torch.uint16).int()
    return table.index_select(0, places.view(-1)).view(x.shape)  # a fifth of the time of indexing by []


def _case(kind: str) -> tuple[Any, ...]:
    """All entries of the table differ: each is its index read as a BF16 number, negated."""
    table = torch.arange(2**16).to(torch.int16).roll(2**15).view(torch.bfloat16)
    dtype = torch.bfloat16
    inputs = {
        "hostile": lambda: hostile(dtype).nan_to_num(0.0, torch.inf, -torch.inf),  # NaN equals nothing
        "odd": lambda: normal(5, 70, dtype),
        "rows apart": lambda: normal(9, 64, dtype)[:, 3:36],
        "no rows": lambda: normal(0, 16, dtype),
        "several tasks": lambda: normal(130, 1032, dtype),
    }
    return inputs[kind](), table


def _cases() -> list[Case]:
    return [Case(kind, partial(_case, kind)) for kind in ("hostile", "odd", "rows apart", "no rows", "several tasks")]


define("look_up(Tensor x, Tensor table) -> Tensor", look_up, fake=fake_like_first, cases=_cases, kernels=("cpu",))
