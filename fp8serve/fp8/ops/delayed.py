"""Delayed scaling: the cast, the update of scales and histories, and their book-keeping inside compiled graphs."""

from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FLT_MAX, inverse_of
from fp8serve.fp8.ops.casts import fixed_scale_cases
from fp8serve.fp8.ops.inputs import fake_nothing
from fp8serve.fp8.ops.registry import Case, declare, define, reference
from fp8serve.fp8.torch_private import copy_each


def _casting(ops: Any) -> Any:
    """quantize_delayed by the casts of `ops`."""

    def quantize_delayed(
        x: Tensor, scale: Tensor, history: Tensor | None, dtype: torch.dtype, turned: bool, infinity_is_nan: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, K] cast by a scale [] that was known before: (q [M, K], q_t, scale_inv []).

        q_t is the transpose of q, [K, M], if `turned`, and else empty. Slot 0 of `history`, FP32 [N], rises to the amax
        of x; None: nobody records it. infinity_is_nan: scale_inv is NaN if x holds an infinity.
        """
        if turned:
            q, q_t, amax = ops.quantize_transpose(x, scale, dtype)
        else:
            (q, amax), q_t = ops.quantize(x, scale, dtype), x.new_empty((0, 0), dtype=dtype)
        if history is not None:
            history[0] = torch.maximum(history[0], amax)
        return q, q_t, inverse_of(scale, amax, infinity_is_nan)

    return quantize_delayed


def _fake_cast(
    x: Tensor, scale: Tensor, history: Tensor | None, dtype: torch.dtype, turned: bool, infinity_is_nan: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    q_t = q.new_empty((x.shape[1], x.shape[0]) if turned else (0, 0))
    return q, q_t, x.new_empty((), dtype=torch.float32)


def _delayed_case(cast: Case, staged: float | None, turned: bool, infinity_is_nan: bool) -> tuple[Any, ...]:
    x, scale, dtype = cast.make()
    history = None if staged is None else torch.tensor([staged, 5.0, 7.0])
    return x, scale, history, dtype, turned, infinity_is_nan


def _delayed_cases() -> list[Case]:
    """The casts by a given scale in turn with what may be asked: what a history has staged is below, between and above
    their amaxes."""
    kinds = cycle(((0.0, True, True), (None, True, False), (1e30, False, True), (2.5, False, False), (2.5, True, True)))
    return [
        Case(f"{case.name}, {kind}", partial(_delayed_case, case, *kind))
        for case, kind in zip(fixed_scale_cases(), kinds, strict=False)
    ]


define(
    "quantize_delayed(Tensor x, Tensor scale, Tensor(a!)? history, ScalarType dtype, bool turned, bool infinity_is_nan)"
    " -> (Tensor q, Tensor q_t, Tensor scale_inv)",
    _casting(reference),
    composition=_casting(torch.ops.fp8serve),
    fake=_fake_cast,
    cases=_delayed_cases,
    recipes=("delayed",),
)


def _updated(
    scale: Tensor, history: Tensor, limit: Tensor, due: Tensor, algo: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Steps 3 to 6 of docs/numerics.md for S states at once: history [S, N] -> (scale, history, ran, nonfinite)."""
    staged = history[:, 0]
    dropped = ~staged.isfinite()
    ran = (staged > 0) & ~dropped
    amax = staged if algo == "most_recent" else history.amax(1)
    fresh = ran & due & amax.isfinite()
    new_scale = torch.where(fresh, (limit / amax).clamp(max=FLT_MAX), scale)
    zero = torch.zeros_like(staged).unsqueeze(1)
    rotated = torch.cat([zero, history[:, 2:], staged.unsqueeze(1)], 1)[:, : history.shape[1]]
    waiting = torch.cat([zero, history[:, 1:]], 1)
    return new_scale, torch.where(ran.unsqueeze(1), rotated, waiting), ran, dropped


def delayed_update(
    scales: list[Tensor],
    amax_histories: list[Tensor],
    nonfinite: list[Tensor],
    steps: list[Tensor],
    fp8_maxes: list[float],
    margin: int,
    interval: int,
    algo: str,
) -> None:
    """The delayed-scaling update of any number of states, in place (docs/numerics.md).

    Per state: scale FP32 [], amax_history FP32 [N], nonfinite int64 [], steps int64 []. `steps` counts recorded steps;
    the scale is recomputed when it is a multiple of `interval` before counting, so the first step always counts.
    """
    for length in {h.shape[0] for h in amax_histories}:
        chosen = [i for i, h in enumerate(amax_histories) if h.shape[0] == length]
        picked = [[column[i] for i in chosen] for column in (scales, amax_histories, nonfinite, steps)]
        scale, history, bad, step = (torch.stack(column) for column in picked)
        limit = torch.tensor([fp8_maxes[i] / 2.0**margin for i in chosen], dtype=torch.float32, device=scale.device)
        scale, history, ran, dropped = _updated(scale, history, limit, step % interval == 0, algo)
        for column, values in zip(picked, (scale, history, bad + dropped, step + ran), strict=True):
            copy_each(column, values.unbind())


def example_states(length: int, count: int) -> tuple[Any, ...]:
    """The arguments of `delayed_update` up to fp8_maxes: `count` states with histories of `length`, some with odd
    values staged."""
    noise = torch.Generator().manual_seed(length)
    histories = [torch.randn(length, generator=noise).abs() * 10.0 ** (i - 3) for i in range(count)]
    for history, staged in zip(histories, (0.0, torch.inf, 1e-38, FLT_MAX, torch.nan), strict=False):
        history[0] = staged
    scales = [torch.tensor(7.0 + i) for i in range(count)]
    counters = [[torch.tensor(i % 3) for i in range(count)] for _ in range(2)]
    return scales, histories, *counters, [448.0 if i % 2 else 57344.0 for i in range(count)]


def _update_cases() -> list[Case]:
    def make(length: int, count: int, *rest: Any) -> tuple[Any, ...]:
        return *example_states(length, count), *rest

    grid = product((1, 2, 3, 16, 1024), (1, 9), ((0, 1, "max"), (0, 1, "most_recent"), (3, 2, "max"), (-2, 1, "max")))
    return [Case(f"N={n}, {s} states, {rest}", partial(make, n, s, *rest)) for n, s, rest in grid]


define(
    "delayed_update(Tensor(a!)[] scales, Tensor(b!)[] amax_histories, Tensor(c!)[] nonfinite, Tensor(d!)[] steps,"
    " float[] fp8_maxes, int margin, int interval, str algo) -> ()",
    delayed_update,
    fake=fake_nothing,
    cases=_update_cases,
    recipes=("delayed",),
)

# Book-keeping of delayed scaling inside compiled graphs; the kernel is Python, see autocast.py.
declare("record_amax(Tensor(a!) history, Tensor amax, int module, int rule, str direction) -> ()", fake_nothing)
# "changes" the history: else a graph would drop the op
declare("expect_backward(Tensor(a!) history, int rule) -> ()", fake_nothing)
