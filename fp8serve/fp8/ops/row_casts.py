"""A norm or a gated activation, fused with a cast that computes scales from its rows; equal to both ops bit for bit.

width          columns of a row that share a scale: 128, or 0 for all
power_2        whether scales are rounded down to a power of two
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import BLOCK, blocks
from fp8serve.fp8.ops.inputs import tiled_noise
from fp8serve.fp8.ops.registry import Case, define_composed

E4M3 = torch.float8_e4m3fn
Cast = tuple[Tensor, Tensor]


def cast_rows(ops: Any, x: Tensor, width: int, power_2: bool) -> Cast:
    """Casts x [M, K] with `ops`; returns (q, scale_inv [M, 1] or [M, ceil(K / 128)])."""
    if width == 0:
        return ops.quantize_rowwise(x, E4M3, power_2)  # type: ignore[no-any-return]
    return ops.quantize_block(x, E4M3, 1, power_2)  # type: ignore[no-any-return]


def rms_norm_quantize_rows(ops: Any, x: Tensor, weight: Tensor, eps: float, width: int, power_2: bool) -> Cast:
    """Casts the rows of rms_norm(x), x [M, K]; returns (q, scale_inv)."""
    return cast_rows(ops, ops.rms_norm(x, weight, eps), width, power_2)


def silu_mul_quantize_rows(ops: Any, gate: Tensor, up: Tensor, width: int, power_2: bool) -> Cast:
    """Casts the rows of silu_mul(gate, up), both [M, K]; returns (q, scale_inv)."""
    return cast_rows(ops, ops.silu_mul(gate, up), width, power_2)


def _fake(x: Tensor, *rest: Any) -> Cast:
    width = rest[-2]
    scales = (x.shape[0], 1 if width == 0 else blocks(x.shape[1]))
    return torch.empty(x.shape, dtype=E4M3, device=x.device), x.new_empty(scales, dtype=torch.float32)


def _norm_case(dtype: torch.dtype, shape: tuple[int, int], width: int, power_2: bool) -> tuple[Any, ...]:
    return tiled_noise(*shape, dtype), torch.linspace(0.5, 2, shape[1]).to(dtype), 1e-6, width, power_2


def _gated_case(dtype: torch.dtype, shape: tuple[int, int], width: int, power_2: bool) -> tuple[Any, ...]:
    return tiled_noise(*shape, dtype), tiled_noise(*shape, dtype, seed=1), width, power_2


def _cases(case: Any) -> list[Case]:
    grid = product((torch.float32, torch.bfloat16), ((5, 64), (33, 300), (0, 16)), (0, BLOCK), (False, True))
    return [Case(f"{d} {s}, width {w}, power of two {p}", partial(case, d, s, w, p)) for d, s, w, p in grid]


define_composed(
    "rms_norm_quantize_rows(Tensor x, Tensor weight, float eps, int width, bool power_2)"
    " -> (Tensor q, Tensor scale_inv)",
    rms_norm_quantize_rows,
    fake=_fake,
    cases=partial(_cases, _norm_case),
    kernel_devices=("cpu",),
)
define_composed(
    "silu_mul_quantize_rows(Tensor gate, Tensor up, int width, bool power_2) -> (Tensor q, Tensor scale_inv)",
    silu_mul_quantize_rows,
    fake=_fake,
    cases=partial(_cases, _gated_case),
    kernel_devices=("cpu",),
)
