"""The MLPs of a mixture's experts, from choices to the weighted sum: the ops of mixture.py and grouped.py in one call.

At decoding, calling an op takes longer than its work. This op is by definition the composition of its parts, to the
last bit. It is for inputs that are cast by their own content, one scale for each row or for each `width` columns of it.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import BLOCK, blocks
from fp8serve.fp8.ops.inputs import quantized, tiles
from fp8serve.fp8.ops.mixture import choices
from fp8serve.fp8.ops.registry import Case, define, reference
from fp8serve.fp8.ops.strips import E4M3, cast_rows


def composed(ops: Any) -> Any:
    """grouped_mlp as a sequence of `ops`."""

    def grouped_mlp(
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        tokens: Tensor,
        gate_up: Tensor,
        gate_up_scale_inv: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_scale_inv: Tensor,
        down_bias: Tensor | None,
        width: int,
        power_2: bool,
    ) -> Tensor:
        """x [T, K], chosen int64 [T, k], weights [T, k] -> [T, N], the weighted sum of down(silu(gate(x)) * up(x)).

        gate_up [E, 2 I, K] and down [E, N, I], FP8, with scales and biases as in grouped_mm. tokens int64 [E] rises by
        the rows of each expert. width: columns that share a scale, 128, or 0 for all of a row.
        """
        rows, places, offsets = ops.sort_by_expert(chosen, tokens)
        q, scale_inv = cast_rows(ops, x.index_select(0, rows), width, power_2)
        both = ops.grouped_mm(q, gate_up, scale_inv, gate_up_scale_inv, offsets, gate_up_bias, x.dtype)
        q, scale_inv = cast_rows(ops, ops.silu_mul(*both.chunk(2, 1)), width, power_2)
        output = ops.grouped_mm(q, down, scale_inv, down_scale_inv, offsets, down_bias, x.dtype)
        return ops.add_weighted(output, places, weights)  # type: ignore[no-any-return]

    return grouped_mlp


def _fake(x: Tensor, *rest: Any) -> Tensor:
    down = rest[6]
    return x.new_empty((x.shape[0], down.shape[1] * (16 if down.dim() == 4 else 1)))


def _weights(experts: int, rows: int, cols: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, their scales, biases) of all experts."""
    noise = torch.Generator().manual_seed(seed)
    shape = (experts, rows, 1) if width == 0 else (experts, blocks(rows), blocks(cols))
    matrices = torch.stack([quantized(rows, cols, E4M3, seed + i) for i in range(experts)])
    scales = torch.exp2(torch.randn(shape, generator=noise) - 6)
    return matrices, scales, torch.randn(experts, rows, generator=noise)


def _case(size: tuple[int, int, int], width: int, has_bias: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    (rows, k, experts), (hidden, inner) = size, (208, 128)
    chosen = choices(rows, k, experts)
    weights = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    first = _weights(experts, 2 * inner, hidden, width, 1)
    second = _weights(experts, hidden, inner, width, 50)
    tensors = [*(first if has_bias else (*first[:2], None)), *(second if has_bias else (*second[:2], None))]
    return tiles(rows, hidden, dtype), chosen, weights, torch.arange(experts), *tensors, width, False


def _cases() -> list[Case]:
    sizes = ((1, 8, 16), (1, 1, 1), (0, 2, 4), (7, 2, 4), (70, 3, 8))  # T, k, E
    grid = product(sizes, (0, BLOCK), (False, True), (torch.bfloat16, torch.float32))
    return [Case(f"{s}, width {w}, bias {b}, {d}", partial(_case, s, w, b, d)) for s, w, b, d in grid]


define(
    "grouped_mlp(Tensor x, Tensor chosen, Tensor weights, Tensor(a!) tokens, Tensor gate_up, Tensor gate_up_scale_inv,"
    " Tensor? gate_up_bias, Tensor down, Tensor down_scale_inv, Tensor? down_bias, int width, bool power_2) -> Tensor",
    composed(reference),
    composition=composed(torch.ops.fp8serve),
    fake=_fake,
    cases=_cases,
    kernels=("cpu",),
)
