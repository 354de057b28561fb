"""silu(gate) * up, its gradient and its fusion with a cast; and `look_up`, which evaluates a BF16 function by a table.

A fused op equals the composition of its parts and rounds where they round. Kernels may differ from the reference only
in the last bit of the sigmoid.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.ops.inputs import (
    dense_like,
    edge_values,
    fake_cast,
    fake_like_first,
    gradient_cases,
    grid_cases,
    random_normal,
    row_cases,
    tiled_noise,
)
from fp8serve.fp8.ops.registry import Case, define, define_composed


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up; silu(gate) is rounded to its dtype before the product."""
    return F.silu(gate) * up


def _silu_case(dtype: torch.dtype, rows: int, cols: int) -> tuple[Any, ...]:
    return random_normal(rows, cols, dtype), random_normal(rows, cols, dtype, 1)


define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    silu_mul,
    fake=fake_like_first,
    cases=partial(row_cases, _silu_case),
)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `silu_mul` for gate and up, computed in FP32 and rounded once."""
    gate_fp32, upstream = gate.float(), grad.float()
    sigmoid = gate_fp32.sigmoid()
    d_gate = upstream * up * (sigmoid * (1 + gate_fp32 * (1 - sigmoid)))
    return d_gate.to(gate.dtype), (upstream * (gate_fp32 * sigmoid).to(gate.dtype)).to(up.dtype)


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return dense_like(gate), dense_like(up)


define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor d_gate, Tensor d_up)",
    silu_mul_backward,
    fake=_fake_backward,
    cases=partial(gradient_cases, _silu_case),
)


def silu_mul_quantize(ops: Any, gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
    """Quantizes silu_mul(gate, up), both [M, K], by `scale` []; returns (q, amax)."""
    return ops.quantize(ops.silu_mul(gate, up), scale, dtype)


def _silu_quantize_case(dtype: torch.dtype, shape: tuple[int, int], fp8: torch.dtype) -> tuple[Any, ...]:
    return tiled_noise(*shape, dtype), tiled_noise(*shape, dtype, seed=1), torch.tensor(3.0), fp8


define_composed(
    "silu_mul_quantize(Tensor gate, Tensor up, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)",
    silu_mul_quantize,
    fake=fake_cast,
    cases=partial(
        grid_cases,
        "{} {} {}",
        _silu_quantize_case,
        (torch.float32, torch.bfloat16),
        ((5, 64), (33, 300)),
        FP8_MAX,
    ),
)


def look_up(x: Tensor, table: Tensor) -> Tensor:
    """Replaces each element of x, BF16 [M, K], by table[bits of the element as an integer], BF16 [65536]."""
    indices = x.contiguous().view(torch.uint16).int()
    return table.index_select(0, indices.view(-1)).view(x.shape)  # five times as fast as table[indices]


def _case(kind: str) -> tuple[Any, ...]:
    """Arguments with a table of distinct entries: each is the negative BF16 number with the bits of its index."""
    table = torch.arange(2**16).to(torch.int16).roll(2**15).view(torch.bfloat16)
    dtype = torch.bfloat16
    inputs = {
        "hostile": lambda: edge_values(dtype).nan_to_num(0.0, torch.inf, -torch.inf),  # NaN equals nothing
        "odd": lambda: random_normal(5, 70, dtype),
        "rows apart": lambda: random_normal(9, 64, dtype)[:, 3:36],
        "no rows": lambda: random_normal(0, 16, dtype),
        "several tasks": lambda: random_normal(130, 1032, dtype),
    }
    return inputs[kind](), table


def _cases() -> list[Case]:
    return [Case(kind, partial(_case, kind)) for kind in ("hostile", "odd", "rows apart", "no rows", "several tasks")]


define(
    "look_up(Tensor x, Tensor table) -> Tensor", look_up, fake=fake_like_first, cases=_cases, kernel_devices=("cpu",)
)
