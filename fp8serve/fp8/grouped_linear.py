"""Linears of many experts at once: rows are sorted by expert, and one op multiplies for all, in forward and in dgrad.

    forward   Y_e  [M_e, N] = X_e  [M_e, K] W_e^T      one grouped_mm
    dgrad     dX_e [M_e, K] = dY_e [M_e, N] W_e        one grouped_mm
    wgrad     dW_e [N, K]   = dY_e^T X_e               one grouped_wgrad on a GPU; on a CPU a product for each expert,
                                                       whose operands need not be put together

Every expert stays a `Linear` with a state of its own for input, weight and gradient. A stacked weight with one state
would let the largest expert set the scale of all, and would move the scale of an expert that saw no token; files store
scales expert by expert, too. So each expert's operands are cast as its `Linear` casts them, an expert without rows does
not run, and the result is that of calling the linears one by one, to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8serve.fp8.autocast import current
from fp8serve.fp8.casting import Operand, Quantized
from fp8serve.fp8.linear import Linear, LinearCall, LinearPlan, Parameters, gradient
from fp8serve.fp8.recompute import planned, regions

Span = tuple[int, int]  # (begin, end) of an expert's rows


@dataclass(frozen=True)
class _Part:
    """One expert that has rows: how its linear runs, and its input and weight, quantized."""

    own: Parameters
    rows: slice
    call: LinearCall
    x: Operand
    weight: Operand


def grouped_linear(linears: Sequence[Linear], x: Tensor, spans: Sequence[Span]) -> Tensor:
    """x [T, K], rows sorted by expert, each through its own linear -> [T, N]. `spans` cover x, one for each linear."""
    if not _runs_together(linears, x):
        return _one_by_one(linears, x, spans)
    parts = [_part(linear, x, slice(*span)) for linear, span in zip(linears, spans, strict=True) if span[0] < span[1]]
    weights, biases = [part.own.weight for part in parts], [part.own.bias for part in parts]
    return cast(Tensor, _Grouped.apply(x, parts, *weights, *biases))  # type: ignore[no-untyped-call]


def _runs_together(linears: Sequence[Linear], x: Tensor) -> bool:
    """Whether the products run in FP8 and no linear has to be called itself: there is no hook, and no checkpointed
    region, whose second run is outside of the context."""
    context = current()
    in_fp8 = context is not None and context.enabled and not context.recipe.override_linear_precision[0]
    is_plain = all(type(m) is Linear and not (m._forward_hooks or m._forward_pre_hooks) for m in linears)
    return in_fp8 and is_plain and len(x) > 0 and not regions() and not torch.is_autocast_enabled(x.device.type)


def _one_by_one(linears: Sequence[Linear], x: Tensor, spans: Sequence[Span]) -> Tensor:
    rows = [linear(x[begin:end]) for linear, (begin, end) in zip(linears, spans, strict=True) if begin < end]
    return torch.cat(rows) if rows else x.new_empty(0, linears[0].out_features)


def _part(linear: Linear, x: Tensor, rows: slice) -> _Part:
    """Plans, stages and casts as a call of the linear with these rows would."""
    tokens, own = x[rows], Parameters(linear.weight, linear.bias)
    plan = cast(LinearPlan, planned(linear.key, lambda: linear._plan(tokens, own.weight, None)))
    with torch.no_grad():
        x_q = plan.call.cast("input", tokens, plan.input_rowwise, plan.input_columnwise)
    return _Part(own, rows, plan.call, x_q, plan.weight)


def _multiply(a: Sequence[Quantized], b: Sequence[Quantized], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a_e [M_e, K] x b_e [N, K] of every expert -> [sum of M_e, N]."""
    ends = torch.tensor([len(x.q) for x in a], device=a[0].q.device).cumsum(0).to(torch.int32)
    a_scales, b_scales = [x.scale_inv for x in a], torch.stack([x.scale_inv for x in b])
    scales = torch.stack(a_scales) if a_scales[0].dim() == 0 else torch.cat(a_scales)
    rows, weights = _bytes_of(a, torch.cat), _bytes_of(b, torch.stack)
    return cast(Tensor, torch.ops.fp8serve.grouped_mm(rows, weights, scales, b_scales, ends, bias, dtype))


def _bytes_of(parts: Sequence[Quantized], together: Any) -> Tensor:
    """FP8 data, concatenated or stacked as bytes, which torch supports."""
    return cast(Tensor, together([part.q.view(torch.uint8) for part in parts])).view(parts[0].q.dtype)


class _Grouped(torch.autograd.Function):
    """x [T, K], weights [N, K] of the experts that have rows, then their biases -> [T, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Sequence[_Part], *tensors: Tensor | None) -> Tensor:
        weights, biases = tensors[: len(parts)], tensors[len(parts) :]
        columnwise = [t for part in parts for operand in (part.x, part.weight) for t in operand.columnwise or ()]
        wgrad_in_hp = any(part.call.hp[2] for part in parts)
        ctx.parts = [(part.call, part.rows, part.x.columnwise is not None, part.weight.columnwise is not None)
                     for part in parts]  # fmt: skip
        ctx.dtype, ctx.bias_dtype = x.dtype, None if biases[0] is None else biases[0].dtype
        ctx.save_for_backward(x if wgrad_in_hp else None, *weights, *columnwise)
        bias = None if biases[0] is None else torch.stack([b for b in biases if b is not None])
        return _multiply([_rowwise(part.x) for part in parts], [_rowwise(part.weight) for part in parts], bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        count = len(ctx.parts)
        weights, columnwise = tensors[:count], iter(tensors[count:])
        wants = ctx.needs_input_grad
        dx_of: list[tuple[Operand, Quantized | None]] = []
        dw_of: list[_WeightGradient] = []
        for (call, rows, has_x, has_weight), weight, want in zip(ctx.parts, weights, wants[2:], strict=False):
            x_q = Quantized(next(columnwise), next(columnwise)) if has_x else None
            weight_q = Quantized(next(columnwise), next(columnwise)) if has_weight else None
            own = dy[rows]
            dy_q = call.cast("grad_output", own, wants[0] and not call.hp[1], want and not call.hp[2])
            dx_of.append((dy_q, weight_q))
            dw_of.append(_WeightGradient(want, dy_q.columnwise, x_q, _wgrad(own, x, rows), weight.dtype))
        dw = _wgrad_together(dw_of) if _is_one_product(dw_of, dy.device) else [gradient(*part) for part in dw_of]
        dx = _dgrad(dy, ctx.parts, dx_of, weights, ctx.dtype) if wants[0] else None
        db = [_bias_gradient(dy[rows], ctx.bias_dtype) for _, rows, *_ in ctx.parts]
        return dx, None, *dw, *db


class _WeightGradient(NamedTuple):
    """The arguments of `gradient`, of one expert."""

    needed: bool
    a: Quantized | None
    b: Quantized | None
    in_high_precision: Callable[[], Tensor]
    dtype: torch.dtype


def _is_one_product(parts: Sequence[_WeightGradient], device: torch.device) -> bool:
    return device.type != "cpu" and all(part.needed and part.a is not None and part.b is not None for part in parts)


def _wgrad_together(parts: Sequence[_WeightGradient]) -> list[Tensor | None]:
    """dW of all experts, whose gradients and inputs are all quantized."""
    a, b = [cast(Quantized, part.a) for part in parts], [cast(Quantized, part.b) for part in parts]
    ends = torch.tensor([x.q.shape[1] for x in a], device=a[0].q.device).cumsum(0).to(torch.int32)
    together = partial(torch.cat, dim=1)
    columns, scales = [_bytes_of(x, together) for x in (a, b)], [_scales_of_columns(x) for x in (a, b)]
    dw = torch.ops.fp8serve.grouped_wgrad(*columns, *scales, ends, parts[0].dtype)
    return list(dw.unbind())


def _scales_of_columns(parts: Sequence[Quantized]) -> Tensor:
    """As `grouped_wgrad` reads them: [E], [E, rows, 1], or the blocks of all side by side."""
    scales = [part.scale_inv for part in parts]
    if scales[0].dim() == 0:
        return torch.stack(scales)
    are_rows = all(scale.shape[1] == 1 for scale in scales)
    return torch.stack(scales) if are_rows else torch.cat(scales, 1)


def _rowwise(operand: Operand) -> Quantized:
    return cast(Quantized, operand.rowwise)


def _wgrad(dy: Tensor, x: Tensor | None, rows: slice) -> Any:
    return lambda: dy.t() @ cast(Tensor, x)[rows].to(dy.dtype)


def _dgrad(
    dy: Tensor,
    parts: Sequence[tuple[LinearCall, slice, bool, bool]],
    operands: Sequence[tuple[Operand, Quantized | None]],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """dX of all experts; in high precision where the recipe leaves it there."""
    a = [dy_q.rowwise for dy_q, _ in operands if dy_q.rowwise is not None]
    b = [weight for _, weight in operands if weight is not None]
    if len(a) == len(b) == len(parts):
        return _multiply(a, b, None, dtype)
    own = [dy[rows] @ weight.to(dy.dtype) for (_, rows, *_), weight in zip(parts, weights, strict=True)]
    return torch.cat(own).to(dtype)


def _bias_gradient(dy: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else dy.float().sum(0).to(dtype)
