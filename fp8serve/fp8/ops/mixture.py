"""A mixture of experts: choosing experts, sorting rows by expert, adding the weighted outputs, and all MLPs as one op.

    logits         [T, E], the router's output
    topk_ids       int64 [T, k], the experts of each token, all different, the best first
    token_indices  int64 [T * k], the token of each row; rows are sorted by expert, and within an expert by token
    row_indices    int64 [T * k], the row of each entry of topk_ids
    offsets        int32 [E], the end of the rows of each expert

With torch's ops each of these functions needs a dozen calls, and while decoding a call takes longer than its work. So
`grouped_mlp` also computes the sorting, both products (grouped.py) and the sum in one call, for recipes that compute
scales from the inputs.
"""

from enum import IntEnum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import BLOCK, blocks
from fp8serve.fp8.ops.fused_casts import E4M3, cast_rows
from fp8serve.fp8.ops.inputs import grid_cases, random_fp8, tiled_noise
from fp8serve.fp8.ops.registry import Case, define, define_composed

Sorted = tuple[Tensor, Tensor, Tensor]


class Scores(IntEnum):
    """How the weight of an expert is computed from the logits, before the weights of a token are normalized."""

    SOFTMAX = 0  # over all experts
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2


def choose_experts(
    logits: Tensor,
    correction: Tensor | None,
    top_k: int,
    scores: int,
    groups: int,
    topk_groups: int,
    normalizes: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns the `top_k` best experts of each token and their weights, (topk_ids [T, top_k], weights [T, top_k]).

    The experts are ranked by logits [T, E], or by sigmoids plus correction [E]. Of experts with equal scores the first
    is chosen, and NaN ranks first. The experts form `groups` of adjacent experts, and each token uses only its best
    `topk_groups` groups. A group has the score of its best expert, or with sigmoids the sum of its best two.
    `routing_weights` computes the weights, of `dtype`.
    """
    ranking = logits.float()
    if scores == Scores.SIGMOID:
        ranking = ranking.sigmoid() if correction is None else ranking.sigmoid() + correction.float()
    if topk_groups < groups:
        ranking = _mask_other_groups(ranking, groups, topk_groups, best=2 if scores == Scores.SIGMOID else 1)
    topk_ids = _topk_indices(ranking, top_k)
    return topk_ids, routing_weights(logits, topk_ids, scores, normalizes, scale, dtype)


def routing_weights(
    logits: Tensor, topk_ids: Tensor, scores: int, normalizes: bool, scale: float, dtype: torch.dtype
) -> Tensor:
    """Returns the weights [T, k] of the experts `topk_ids`, differentiable for logits.

    The weights are the scores in FP32, divided by their sum if `normalizes` is set, times `scale`, rounded to `dtype`.
    """
    logits_fp32 = logits.float()
    if scores == Scores.SOFTMAX_OF_CHOSEN:
        weights = logits_fp32.gather(-1, topk_ids).softmax(-1)
    else:
        weights = (logits_fp32.sigmoid() if scores == Scores.SIGMOID else logits_fp32.softmax(-1)).gather(-1, topk_ids)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * scale).to(dtype)


def _topk_indices(x: Tensor, top_k: int) -> Tensor:
    """Returns the indices [T, top_k] of the largest values of each row, in order. topk does not order equal values."""
    return x.sort(dim=-1, descending=True, stable=True)[1][:, :top_k].contiguous()


def _mask_other_groups(x: Tensor, groups: int, topk_groups: int, best: int) -> Tensor:
    """Returns x [T, E] with -inf outside the best groups, which are ranked by the sum of their `best` values."""
    grouped = x.view(len(x), groups, -1)
    is_kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x.device)
    is_kept.scatter_(-1, _topk_indices(grouped.topk(best, -1)[0].sum(-1), topk_groups), True)
    return grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(1)


def _fake_choose(logits: Tensor, correction: Tensor | None, top_k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=rest[-1])


def _choose_case(
    shape: tuple[int, int, int],
    kind: Scores,
    groups: int,
    topk_groups: int,
    normalizes: bool,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Any, ...]:
    (rows, top_k, experts), (dtype, out_dtype) = shape, dtypes
    noise = torch.Generator().manual_seed(experts)
    logits = (3 * torch.randn(rows, experts, generator=noise)).to(dtype)
    if rows > 4:
        logits[1], logits[2, ::3] = logits[1, 0], logits[2, 0]  # all equal, some equal
        logits[3, 1:] = -torch.inf
    correction = torch.linspace(0, 1, experts) if kind == Scores.SIGMOID else None
    return logits, correction, top_k, int(kind), groups, topk_groups, normalizes, 1.0 if normalizes else 2.5, out_dtype


def _choose_cases() -> list[Case]:
    plain, sigmoid, of_chosen = Scores
    narrow, wide = (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)
    mixed, half = (torch.bfloat16, torch.float32), (torch.float16, torch.float16)
    grid = [
        *product(
            ((1, 8, 64), (37, 8, 64), (0, 2, 4), (7, 1, 1), (9, 3, 7)), [plain], [(1, 1)], (True, False), [narrow]
        ),
        *product([(37, 8, 128)], [plain, of_chosen], [(1, 1)], (True, False), [wide, mixed, half]),
        *product([(1, 4, 32), (9, 4, 32)], [of_chosen], [(1, 1)], [False], [narrow]),
        *product([(1, 8, 256), (33, 6, 160)], [plain, sigmoid], [(8, 3), (1, 1), (4, 4)], (True, False), [wide]),
    ]
    return [
        Case(f"{s}, {kind.name} {g} {n} {d}", partial(_choose_case, s, kind, *g, n, d)) for s, kind, g, n, d in grid
    ]


define(
    "choose_experts(Tensor logits, Tensor? correction, int top_k, int scores, int groups, int topk_groups,"
    " bool normalizes, float scale, ScalarType dtype) -> (Tensor topk_ids, Tensor weights)",
    choose_experts,
    fake=_fake_choose,
    cases=_choose_cases,
    kernel_devices=("cpu",),
)


def sort_by_expert(topk_ids: Tensor, tokens: Tensor) -> Sorted:
    """Returns (token_indices, row_indices, offsets) for topk_ids [T, k]; adds each expert's row count to `tokens`."""
    flat = topk_ids.reshape(-1)
    order = flat.argsort(stable=True)
    row_indices = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    token_indices = order // max(topk_ids.shape[1], 1)
    counts = torch.zeros_like(tokens).scatter_add_(0, flat, torch.ones_like(flat))
    tokens += counts
    return token_indices, row_indices, counts.cumsum(0, dtype=torch.int32)


def _fake_sorted(topk_ids: Tensor, tokens: Tensor) -> Sorted:
    indices = topk_ids.new_empty(topk_ids.numel())
    return indices, torch.empty_like(indices), topk_ids.new_empty(len(tokens), dtype=torch.int32)


def random_topk_ids(rows: int, k: int, experts: int) -> Tensor:
    noise = torch.Generator().manual_seed(rows + k)
    scores = torch.rand(rows, experts, generator=noise) + torch.linspace(
        0, 1, experts
    )  # later experts are chosen more often
    return scores.topk(k, -1)[1]


_SIZES = ((1, 8, 64), (1, 1, 1), (0, 2, 4), (7, 2, 4), (70, 8, 64), (33, 4, 4))  # T, k, E


def _sort_case(size: tuple[int, int, int]) -> tuple[Any, ...]:
    return random_topk_ids(*size), torch.arange(size[2])


define(
    "sort_by_expert(Tensor topk_ids, Tensor(a!) tokens) -> (Tensor token_indices, Tensor row_indices, Tensor offsets)",
    sort_by_expert,
    fake=_fake_sorted,
    cases=partial(grid_cases, "{}", _sort_case, _SIZES),
    kernel_devices=("cpu",),
)


def add_weighted(outputs: Tensor, row_indices: Tensor, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the sum [T, N] of the experts' outputs [T * k, N] times weights [T, k], in `dtype` or outputs.dtype.

    The terms of a token are added in the order of the experts. Every term and every sum is rounded.
    """
    sorted_rows, order = row_indices.view(weights.shape).sort(-1)
    terms = outputs.index_select(0, sorted_rows.flatten()).view(*weights.shape, outputs.shape[1])
    terms = (terms * weights.gather(-1, order).unsqueeze(-1)).to(dtype or outputs.dtype)
    total = terms[:, 0]
    for k in range(1, terms.shape[1]):
        total = total + terms[:, k]
    return total.contiguous()


def _fake_added(outputs: Tensor, row_indices: Tensor, weights: Tensor) -> Tensor:
    return outputs.new_empty((len(weights), outputs.shape[1]))


def _add_case(size: tuple[int, int, int], columns: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Any, ...]:
    (dtype, weight_dtype), topk_ids = dtypes, random_topk_ids(*size)
    _, row_indices, _ = sort_by_expert(topk_ids, torch.zeros(size[2], dtype=torch.int64))
    noise = torch.Generator().manual_seed(9)
    weights = torch.rand(topk_ids.shape, generator=noise).to(weight_dtype)
    return tiled_noise(topk_ids.numel(), columns, dtype), row_indices, weights


_ADD_DTYPES = [(torch.bfloat16, torch.float32), *((d, d) for d in (torch.bfloat16, torch.float16, torch.float32))]
define(
    "add_weighted(Tensor outputs, Tensor row_indices, Tensor weights) -> Tensor",
    add_weighted,
    fake=_fake_added,
    cases=partial(grid_cases, "{0}, {1} columns, {2[0]} {2[1]}", _add_case, _SIZES, (64, 1100), _ADD_DTYPES),
    kernel_devices=("cpu",),
)


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


def _fake_mlp(x: Tensor, *rest: Any) -> Tensor:
    down = rest[6]
    return x.new_empty((x.shape[0], down.shape[1] * (16 if down.dim() == 4 else 1)))


def _expert_weights(experts: int, rows: int, cols: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (weights, scales, biases) of all experts."""
    noise = torch.Generator().manual_seed(seed)
    shape = (experts, rows, 1) if width == 0 else (experts, blocks(rows), blocks(cols))
    matrices = torch.stack([random_fp8(rows, cols, E4M3, seed + i) for i in range(experts)])
    scales = torch.exp2(torch.randn(shape, generator=noise) - 6)
    return matrices, scales, torch.randn(experts, rows, generator=noise)


def _mlp_case(size: tuple[int, int, int], width: int, has_bias: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    (rows, k, experts), (hidden, inner) = size, (208, 128)
    topk_ids = random_topk_ids(rows, k, experts)
    weights = torch.rand(topk_ids.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    first = _expert_weights(experts, 2 * inner, hidden, width, 1)
    second = _expert_weights(experts, hidden, inner, width, 50)
    tensors = [*(first if has_bias else (*first[:2], None)), *(second if has_bias else (*second[:2], None))]
    return tiled_noise(rows, hidden, dtype), topk_ids, weights, torch.arange(experts), *tensors, width, False


def _mlp_cases() -> list[Case]:
    sizes = ((1, 8, 16), (1, 1, 1), (0, 2, 4), (7, 2, 4), (70, 3, 8))  # T, k, E
    dtypes = (torch.bfloat16, torch.float32)
    return grid_cases("{}, width {}, bias {}, {}", _mlp_case, sizes, (0, BLOCK), (False, True), dtypes)


define_composed(
    "grouped_mlp(Tensor x, Tensor topk_ids, Tensor weights, Tensor(a!) tokens, Tensor gate_up,"
    " Tensor gate_up_scale_inv, Tensor? gate_up_bias, Tensor down, Tensor down_scale_inv, Tensor? down_bias, int width,"
    " bool power_2) -> Tensor",
    grouped_mlp,
    fake=_fake_mlp,
    cases=_mlp_cases,
    kernel_devices=("cpu",),
)
