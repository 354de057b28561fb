"""What a mixture of experts does around its products: experts chosen and rows sorted by them on the way in, weighted
sums on the way out.

    logits         [T, E], what a router says of each token
    chosen         int64 [T, k], the experts of each token, all different, the best first
    rows           int64 [T * k], the token of each row: rows of expert 0 first, an expert's in the tokens' order
    places         int64 [T * k], the row of each choice, token by token
    offsets        int32 [E], where the rows of each expert end

With torch's ops each of these takes a dozen calls, and at decoding a call takes longer than its work.
"""

from enum import IntEnum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.inputs import tiles
from fp8serve.fp8.ops.registry import Case, define

Sorted = tuple[Tensor, Tensor, Tensor]


class Scores(IntEnum):
    """What an expert's logit becomes: its weight, before the weights of a token are normalised."""

    SOFTMAX = 0  # of all experts
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2


def choose_experts(
    logits: Tensor,
    correction: Tensor | None,
    count: int,
    scores: int,
    groups: int,
    kept: int,
    normalizes: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (chosen [T, count], weights [T, count] of `dtype`), by logits, or by sigmoids + correction [E].

    Experts of equal scores come in their order, NaN comes first. Experts form `groups` of adjacent experts; each token
    is routed within its best `kept` groups. The score of a group is that of its best expert, or with sigmoids the sum
    of its best two. The weights are those of `weigh`.
    """
    by = logits.float()
    if scores == Scores.SIGMOID:
        by = by.sigmoid() if correction is None else by.sigmoid() + correction.float()
    if kept < groups:
        by = _among_groups(by, groups, kept, best=2 if scores == Scores.SIGMOID else 1)
    chosen = _largest(by, count)
    return chosen, weigh(logits, chosen, scores, normalizes, scale, dtype)


def weigh(logits: Tensor, chosen: Tensor, scores: int, normalizes: bool, scale: float, dtype: torch.dtype) -> Tensor:
    """The weights [T, k] of `dtype` of the chosen: their scores in FP32, divided by their sum if it `normalizes`, times
    `scale`. Differentiable."""
    wide = logits.float()
    if scores == Scores.SOFTMAX_OF_CHOSEN:
        weights = wide.gather(-1, chosen).softmax(-1)
    else:
        weights = (wide.sigmoid() if scores == Scores.SIGMOID else wide.softmax(-1)).gather(-1, chosen)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * scale).to(dtype)


def _largest(x: Tensor, count: int) -> Tensor:
    """Places [T, count] of the largest of each row; topk would take any of several equal ones."""
    return x.sort(dim=-1, descending=True, stable=True)[1][:, :count].contiguous()


def _among_groups(x: Tensor, groups: int, kept: int, best: int) -> Tensor:
    """x [T, E], with -inf where an expert is not in one of the best groups, by the sum of the group's `best`."""
    grouped = x.view(len(x), groups, -1)
    is_retained = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x.device)
    is_retained.scatter_(-1, _largest(grouped.topk(best, -1)[0].sum(-1), kept), True)
    return grouped.masked_fill(~is_retained.unsqueeze(-1), -torch.inf).flatten(1)


def _fake_chosen(logits: Tensor, correction: Tensor | None, count: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], count
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=rest[-1])


def _choose_case(
    shape: tuple[int, int, int], kind: Scores, groups: int, kept: int, normalizes: bool, dtypes: tuple[torch.dtype, ...]
) -> tuple[Any, ...]:
    (rows, count, experts), (dtype, out_dtype) = shape, dtypes
    noise = torch.Generator().manual_seed(experts)
    logits = (3 * torch.randn(rows, experts, generator=noise)).to(dtype)
    if rows > 4:
        logits[1], logits[2, ::3] = logits[1, 0], logits[2, 0]  # all equal, some equal
        logits[3, 1:] = -torch.inf
    correction = torch.linspace(0, 1, experts) if kind == Scores.SIGMOID else None
    return logits, correction, count, int(kind), groups, kept, normalizes, 1.0 if normalizes else 2.5, out_dtype


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
    "choose_experts(Tensor logits, Tensor? correction, int count, int scores, int groups, int kept, bool normalizes,"
    " float scale, ScalarType dtype) -> (Tensor chosen, Tensor weights)",
    choose_experts,
    fake=_fake_chosen,
    cases=_choose_cases,
    kernels=("cpu",),
)


def sort_by_expert(chosen: Tensor, tokens: Tensor) -> Sorted:
    """chosen [T, k] -> (rows, places, offsets). tokens int64 [E] rises by the rows of each expert."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    rows = order // max(chosen.shape[1], 1)
    counts = torch.zeros_like(tokens).scatter_add_(0, flat, torch.ones_like(flat))
    tokens += counts
    return rows, places, counts.cumsum(0, dtype=torch.int32)


def _fake_sorted(chosen: Tensor, tokens: Tensor) -> Sorted:
    rows = chosen.new_empty(chosen.numel())
    return rows, torch.empty_like(rows), chosen.new_empty(len(tokens), dtype=torch.int32)


def choices(rows: int, k: int, experts: int) -> Tensor:
    noise = torch.Generator().manual_seed(rows + k)
    scores = torch.rand(rows, experts, generator=noise) + torch.linspace(0, 1, experts)  # some are chosen more often
    return scores.topk(k, -1)[1]


_SIZES = ((1, 8, 64), (1, 1, 1), (0, 2, 4), (7, 2, 4), (70, 8, 64), (33, 4, 4))  # T, k, E


def _sort_case(rows: int, k: int, experts: int) -> tuple[Any, ...]:
    return choices(rows, k, experts), torch.arange(experts)


def _sort_cases() -> list[Case]:
    return [Case(str(size), partial(_sort_case, *size)) for size in _SIZES]


define(
    "sort_by_expert(Tensor chosen, Tensor(a!) tokens) -> (Tensor rows, Tensor places, Tensor offsets)",
    sort_by_expert,
    fake=_fake_sorted,
    cases=_sort_cases,
    kernels=("cpu",),
)


def add_weighted(outputs: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """outputs [T * k, N], places [T * k], weights [T, k] in outputs.dtype or FP32 -> [T, N]; dtype: outputs.dtype.

    The terms of a token are added in the order of the experts. Each is rounded, and so is every sum.
    """
    rising, order = places.view(weights.shape).sort(-1)
    terms = outputs.index_select(0, rising.flatten()).view(*weights.shape, outputs.shape[1])
    terms = (terms * weights.gather(-1, order).unsqueeze(-1)).to(dtype or outputs.dtype)
    total = terms[:, 0]
    for k in range(1, terms.shape[1]):
        total = total + terms[:, k]
    return total.contiguous()


def _fake_added(outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return outputs.new_empty((len(weights), outputs.shape[1]))


def _add_case(
    size: tuple[int, int, int], columns: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Any, ...]:
    chosen = choices(*size)
    _, places, _ = sort_by_expert(chosen, torch.zeros(size[2], dtype=torch.int64))
    noise = torch.Generator().manual_seed(9)
    weights = torch.rand(chosen.shape, generator=noise).to(weight_dtype)
    return tiles(chosen.numel(), columns, dtype), places, weights


def _add_cases() -> list[Case]:
    kinds = [(torch.bfloat16, torch.float32), *((d, d) for d in (torch.bfloat16, torch.float16, torch.float32))]
    grid = product(_SIZES, (64, 1100), kinds)
    return [Case(f"{s}, {n} columns, {d} {w}", partial(_add_case, s, n, d, w)) for s, n, (d, w) in grid]


define(
    "add_weighted(Tensor outputs, Tensor places, Tensor weights) -> Tensor",
    add_weighted,
    fake=_fake_added,
    cases=_add_cases,
    kernels=("cpu",),
)
