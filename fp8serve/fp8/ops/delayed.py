"""Delayed scaling: the cast, the update of scales and amax histories, and recording inside compiled graphs."""

from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FLT_MAX, inverse_scale
from fp8serve.fp8.ops.casts import fixed_scale_cases
from fp8serve.fp8.ops.inputs import fake_nothing
from fp8serve.fp8.ops.registry import Case, declare, define, define_composed
from fp8serve.fp8.torch_private import copy_each


def quantize_delayed(
    ops: Any,
    x: Tensor,
    scale: Tensor,
    history: Tensor | None,
    dtype: torch.dtype,
    transpose: bool,
    infinity_is_nan: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Casts x [M, K] by a stored scale [] and returns (q [M, K], q_t, scale_inv []).

    q_t is the transpose of q, [K, M], if `transpose` is set, or else empty. Slot 0 of `history`, FP32 [N], rises to
    the amax of x, unless `history` is None. With `infinity_is_nan` scale_inv is NaN if x has an infinity.
    """
    if transpose:
        q, q_t, amax = ops.quantize_transpose(x, scale, dtype)
    else:
        (q, amax), q_t = ops.quantize(x, scale, dtype), x.new_empty((0, 0), dtype=dtype)
    if history is not None:
        history[0] = torch.maximum(history[0], amax)
    return q, q_t, inverse_scale(scale, amax, infinity_is_nan)


def _fake_cast(
    x: Tensor, scale: Tensor, history: Tensor | None, dtype: torch.dtype, transpose: bool, infinity_is_nan: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    q_t = q.new_empty((x.shape[1], x.shape[0]) if transpose else (0, 0))
    return q, q_t, x.new_empty((), dtype=torch.float32)


def _delayed_case(cast: Case, staged: float | None, transpose: bool, infinity_is_nan: bool) -> tuple[Any, ...]:
    x, scale, dtype = cast.make()
    history = None if staged is None else torch.tensor([staged, 5.0, 7.0])
    return x, scale, history, dtype, transpose, infinity_is_nan


def _delayed_cases() -> list[Case]:
    """The cases of casts with a given scale. The cases take turns with these options; staged amaxes are below, between
    and above those of x."""
    options = cycle(
        ((0.0, True, True), (None, True, False), (1e30, False, True), (2.5, False, False), (2.5, True, True))
    )
    return [
        Case(f"{case.name}, {option}", partial(_delayed_case, case, *option))
        for case, option in zip(fixed_scale_cases(), options, strict=False)
    ]


define_composed(
    "quantize_delayed(Tensor x, Tensor scale, Tensor(a!)? history, ScalarType dtype, bool transpose,"
    " bool infinity_is_nan) -> (Tensor q, Tensor q_t, Tensor scale_inv)",
    quantize_delayed,
    fake=_fake_cast,
    cases=_delayed_cases,
    recipes=("delayed",),
)


def _updated_states(
    scale: Tensor, history: Tensor, limit: Tensor, due: Tensor, algo: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes steps 3 to 6 of docs/numerics.md for S states with histories [S, N].

    Returns the new scales and histories, and for each state whether it recorded a step and whether its staged amax was
    not finite.
    """
    staged = history[:, 0]
    nonfinite = ~staged.isfinite()
    recorded = (staged > 0) & ~nonfinite
    amax = staged if algo == "most_recent" else history.amax(1)
    has_new_scale = recorded & due & amax.isfinite()
    new_scale = torch.where(has_new_scale, (limit / amax).clamp(max=FLT_MAX), scale)
    zero = torch.zeros_like(staged).unsqueeze(1)
    rotated = torch.cat([zero, history[:, 2:], staged.unsqueeze(1)], 1)[:, : history.shape[1]]
    unchanged = torch.cat([zero, history[:, 1:]], 1)
    return new_scale, torch.where(recorded.unsqueeze(1), rotated, unchanged), recorded, nonfinite


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
    """Updates the scales and amax histories of any number of states in place (docs/numerics.md).

    A state has scale FP32 [], amax_history FP32 [N], nonfinite int64 [] and steps int64 []. `steps` counts recorded
    steps. The scale is computed again if `steps`, before this step, is a multiple of `interval`, so the first step
    always computes it.
    """
    for length in {h.shape[0] for h in amax_histories}:
        indices = [i for i, h in enumerate(amax_histories) if h.shape[0] == length]
        columns = [[column[i] for i in indices] for column in (scales, amax_histories, nonfinite, steps)]
        scale, history, bad, step = (torch.stack(column) for column in columns)
        limit = torch.tensor([fp8_maxes[i] / 2.0**margin for i in indices], dtype=torch.float32, device=scale.device)
        scale, history, recorded, is_bad = _updated_states(scale, history, limit, step % interval == 0, algo)
        for column, values in zip(columns, (scale, history, bad + is_bad, step + recorded), strict=True):
            copy_each(column, values.unbind())


def example_states(length: int, count: int) -> tuple[Any, ...]:
    """Returns the arguments of `delayed_update` up to fp8_maxes for `count` states, some with unusual staged amaxes."""
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

# These ops record amaxes inside compiled graphs. Their kernels are in Python (recording.py). The key of the module is a
# tensor, an input of the graph, so that layers of equal shape can share one graph.
declare("record_amax(Tensor(a!) history, Tensor amax, Tensor module, int rule, str direction) -> ()", fake_nothing)
# The schema says that the op changes the history, because a graph would drop the op otherwise.
declare("expect_backward(Tensor(a!) history, int rule) -> ()", fake_nothing)
