"""The MLPs of a mixture's experts as one op: it sorts rows, computes both products and adds the weighted outputs.

While decoding, calling an op takes longer than its work. This op equals the composition of ops of mixture.py and
grouped.py bit for bit. It is for recipes that compute scales from the inputs, for each row or each `width` columns.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import BLOCK, blocks
from fp8serve.fp8.ops.inputs import random_fp8, tiled_noise
from fp8serve.fp8.ops.mixture import random_topk_ids
from fp8serve.fp8.ops.registry import Case, define_composed
from fp8serve.fp8.ops.row_casts import E4M3, cast_rows


def grouped_mlp(
    ops: Any,
    x: Tensor,
    topk_ids: Tensor,
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
    """Returns [T, N], the weighted sum over experts of down(silu(gate(x)) * up(x)), for x [T, K].

    `topk_ids` int64 [T, k] and `weights` [T, k] are those of choose_experts. gate_up [E, 2 I, K] and down [E, N, I]
    are FP8, with scales and biases as in grouped_mm. `tokens` int64 [E] rises by the number of rows of each expert.
    `width` is the number of columns that share a scale, 128, or 0 for all columns of a row.
    """
    token_indices, row_indices, offsets = ops.sort_by_expert(topk_ids, tokens)
    q, scale_inv = cast_rows(ops, x.index_select(0, token_indices), width, power_2)
    gate_and_up = ops.grouped_mm(q, gate_up, scale_inv, gate_up_scale_inv, offsets, gate_up_bias, x.dtype)
    q, scale_inv = cast_rows(ops, ops.silu_mul(*gate_and_up.chunk(2, 1)), width, power_2)
    output = ops.grouped_mm(q, down, scale_inv, down_scale_inv, offsets, down_bias, x.dtype)
    return ops.add_weighted(output, row_indices, weights)  # type: ignore[no-any-return]


def _fake(x: Tensor, *rest: Any) -> Tensor:
    down = rest[6]
    return x.new_empty((x.shape[0], down.shape[1] * (16 if down.dim() == 4 else 1)))


def _weights(experts: int, rows: int, cols: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (weights, scales, biases) of all experts."""
    noise = torch.Generator().manual_seed(seed)
    shape = (experts, rows, 1) if width == 0 else (experts, blocks(rows), blocks(cols))
    matrices = torch.stack([random_fp8(rows, cols, E4M3, seed + i) for i in range(experts)])
    scales = torch.exp2(torch.randn(shape, generator=noise) - 6)
    return matrices, scales, torch.randn(experts, rows, generator=noise)


def _case(size: tuple[int, int, int], width: int, has_bias: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    (rows, k, experts), (hidden, inner) = size, (208, 128)
    topk_ids = random_topk_ids(rows, k, experts)
    weights = torch.rand(topk_ids.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    first = _weights(experts, 2 * inner, hidden, width, 1)
    second = _weights(experts, hidden, inner, width, 50)
    tensors = [*(first if has_bias else (*first[:2], None)), *(second if has_bias else (*second[:2], None))]
    return tiled_noise(rows, hidden, dtype), topk_ids, weights, torch.arange(experts), *tensors, width, False


def _cases() -> list[Case]:
    sizes = ((1, 8, 16), (1, 1, 1), (0, 2, 4), (7, 2, 4), (70, 3, 8))  # T, k, E
    grid = product(sizes, (0, BLOCK), (False, True), (torch.bfloat16, torch.float32))
    return [Case(f"{s}, width {w}, bias {b}, {d}", partial(_case, s, w, b, d)) for s, w, b, d in grid]


define_composed(
    "grouped_mlp(Tensor x, Tensor topk_ids, Tensor weights, Tensor(a!) tokens, Tensor gate_up,"
    " Tensor gate_up_scale_inv, Tensor? gate_up_bias, Tensor down, Tensor down_scale_inv, Tensor? down_bias, int width,"
    " bool power_2) -> Tensor",
    grouped_mlp,
    fake=_fake,
    cases=_cases,
    kernel_devices=("cpu",),
)
