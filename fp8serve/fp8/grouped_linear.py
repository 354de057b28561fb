"""Grouped GEMMs for the linear layers of many experts, over rows that are sorted by expert.

    forward   Y_e  [M_e, N] = X_e  [M_e, K] W_e^T      one grouped_mm
    dgrad     dX_e [M_e, K] = dY_e [M_e, N] W_e        one grouped_mm
    wgrad     dW_e [N, K]   = dY_e^T X_e               one grouped_wgrad on a GPU; one product per expert on a CPU,
                                                       which saves concatenating the operands

Every expert stays a `Linear` with scaling states of its own for input, weight and gradient. With one state for a
stacked weight, the largest expert would set the scale of all experts, and the scale of an expert without tokens would
change. Files store a scale per expert, too. So each expert's operands are cast as its `Linear` casts them, and an
expert without rows does not run. The result is bit-equal to calling the linear layers one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8serve.fp8.autocast import current_frame
from fp8serve.fp8.casting import Operand, Quantized
from fp8serve.fp8.linear import Linear, LinearCall, LinearPlan, Parameters, gradient
from fp8serve.fp8.recompute import plan_call, running_regions

Span = tuple[int, int]  # (begin, end) of an expert's rows


@dataclass(frozen=True)
class _ExpertCall:
    """The call of one expert that has rows, with its quantized input and weight."""

    parameters: Parameters
    rows: slice
    call: LinearCall
    x: Operand
    weight: Operand


def grouped_linear(linears: Sequence[Linear], x: Tensor, spans: Sequence[Span]) -> Tensor:
    """Returns the outputs [T, N] of the experts' linear layers for x [T, K], whose rows are sorted by expert.

    `spans` has the rows of each linear layer; together they cover x.
    """
    if not _can_group(linears, x):
        rows = [linear(x[begin:end]) for linear, (begin, end) in zip(linears, spans, strict=True) if begin < end]
        return torch.cat(rows) if rows else x.new_empty(0, linears[0].out_features)
    experts = [_prepare(linear, x, slice(*s)) for linear, s in zip(linears, spans, strict=True) if s[0] < s[1]]
    weights, biases = zip(*(expert.parameters for expert in experts), strict=True)
    return cast(Tensor, _GroupedLinearFunction.apply(x, experts, *weights, *biases))  # type: ignore[no-untyped-call]


def _can_group(linears: Sequence[Linear], x: Tensor) -> bool:
    """Returns whether the forward GEMMs run in FP8 and no layer needs a call of its own.

    A layer with hooks needs one, and so does a layer in a checkpointed region, whose second run is outside of the
    context.
    """
    frame = current_frame()
    runs_in_fp8 = frame is not None and frame.enabled and not frame.recipe.override_linear_precision[0]
    are_unhooked = all(type(m) is Linear and not (m._forward_hooks or m._forward_pre_hooks) for m in linears)
    is_autocast = torch.is_autocast_enabled(x.device.type)
    spec = None if frame is None else frame.recipe.specs.linear["input"]
    if spec is not None and (spec.is_4bit or (x.is_cuda and spec.is_mx)):
        return False  # grouped_mm has no NVFP4, and on a GPU no MX blocks
    return runs_in_fp8 and are_unhooked and len(x) > 0 and not running_regions() and not is_autocast


def _prepare(linear: Linear, x: Tensor, rows: slice) -> _ExpertCall:
    """Plans the call of one layer with these rows, and quantizes its input and weight."""
    tokens, parameters = x[rows], Parameters(linear.weight, linear.bias)
    plan = cast(LinearPlan, plan_call(linear.key, lambda: linear._create_plan(tokens, parameters.weight, None)))
    with torch.no_grad():
        x_q = plan.call.cast("input", tokens, plan.input_rowwise, plan.input_columnwise)
    return _ExpertCall(parameters, rows, plan.call, x_q, plan.weight)


def _grouped_mm(a: Sequence[Quantized], b: Sequence[Quantized], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the products of a_e [M_e, K] and b_e [N, K] of all experts, concatenated to [sum of M_e, N]."""
    ends = torch.tensor([len(x.q) for x in a], device=a[0].q.device).cumsum(0).to(torch.int32)
    a_scales, b_scales = [x.scale_inv for x in a], torch.stack([x.scale_inv for x in b])
    scales = torch.stack(a_scales) if a_scales[0].dim() == 0 else torch.cat(a_scales)
    rows, weights = _concat_bytes(a, torch.cat), _concat_bytes(b, torch.stack)
    return cast(Tensor, torch.ops.fp8serve.grouped_mm(rows, weights, scales, b_scales, ends, bias, dtype))


def _concat_bytes(operands: Sequence[Quantized], concat: Any) -> Tensor:
    """Returns the FP8 data of all operands concatenated by `concat`, as bytes, because torch does not concatenate
    FP8."""
    return cast(Tensor, concat([operand.q.view(torch.uint8) for operand in operands])).view(operands[0].q.dtype)


class _GroupedLinearFunction(torch.autograd.Function):
    """x [T, K], and the weights [N, K] and the biases of the experts that have rows -> [T, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Sequence[_ExpertCall], *tensors: Tensor | None) -> Tensor:
        weights, biases = tensors[: len(experts)], tensors[len(experts) :]
        columnwise = [
            t for expert in experts for operand in (expert.x, expert.weight) for t in operand.columnwise or ()
        ]
        is_wgrad_hp = any(expert.call.high_precision[2] for expert in experts)
        ctx.experts = [(e.call, e.rows, e.x.columnwise is not None, e.weight.columnwise is not None) for e in experts]
        ctx.dtype, ctx.bias_dtype = x.dtype, None if biases[0] is None else biases[0].dtype
        ctx.save_for_backward(x if is_wgrad_hp else None, *weights, *columnwise)
        bias = None if biases[0] is None else torch.stack([b for b in biases if b is not None])
        inputs = [cast(Quantized, expert.x.rowwise) for expert in experts]
        return _grouped_mm(inputs, [cast(Quantized, expert.weight.rowwise) for expert in experts], bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        count = len(ctx.experts)
        weights, columnwise = tensors[:count], iter(tensors[count:])
        needs_dx, _, *needs_dw = ctx.needs_input_grad
        dgrad_operands: list[tuple[Operand, Quantized | None]] = []
        wgrad_operands: list[_WeightGradient] = []
        for (call, rows, has_x, has_weight), weight, needed in zip(ctx.experts, weights, needs_dw, strict=False):
            x_q = Quantized(next(columnwise), next(columnwise)) if has_x else None
            weight_q = Quantized(next(columnwise), next(columnwise)) if has_weight else None
            _, is_dgrad_hp, is_wgrad_hp = call.high_precision
            dy_q = call.cast("grad_output", dy[rows], needs_dx and not is_dgrad_hp, needed and not is_wgrad_hp)
            dgrad_operands.append((dy_q, weight_q))
            compute_in_hp = partial(_wgrad_in_high_precision, dy[rows], x, rows)
            wgrad_operands.append(_WeightGradient(needed, dy_q.columnwise, x_q, compute_in_hp, weight.dtype))
        if _can_group_wgrad(wgrad_operands, dy.device):
            dw = _grouped_wgrad(wgrad_operands)
        else:
            dw = [gradient(*operands) for operands in wgrad_operands]
        dx = _dgrad(dy, ctx.experts, dgrad_operands, weights, ctx.dtype) if needs_dx else None
        bias_dtype = ctx.bias_dtype
        db = [None if bias_dtype is None else dy[rows].float().sum(0).to(bias_dtype) for _, rows, *_ in ctx.experts]
        return dx, None, *dw, *db


class _WeightGradient(NamedTuple):
    """The arguments of `gradient` for the weight of one expert."""

    is_needed: bool
    a: Quantized | None
    b: Quantized | None
    compute_in_high_precision: Callable[[], Tensor]
    dtype: torch.dtype


def _can_group_wgrad(experts: Sequence[_WeightGradient], device: torch.device) -> bool:
    return device.type != "cpu" and all(e.is_needed and e.a is not None and e.b is not None for e in experts)


def _grouped_wgrad(experts: Sequence[_WeightGradient]) -> list[Tensor | None]:
    """Returns dW of every expert from quantized gradients and inputs."""
    a, b = [cast(Quantized, expert.a) for expert in experts], [cast(Quantized, expert.b) for expert in experts]
    ends = torch.tensor([x.q.shape[1] for x in a], device=a[0].q.device).cumsum(0).to(torch.int32)
    concat_columns = partial(torch.cat, dim=1)
    columns, scales = [_concat_bytes(x, concat_columns) for x in (a, b)], [_concat_scales(x) for x in (a, b)]
    dw = torch.ops.fp8serve.grouped_wgrad(*columns, *scales, ends, experts[0].dtype)
    return list(dw.unbind())


def _concat_scales(operands: Sequence[Quantized]) -> Tensor:
    """Returns the scales in the shape that `grouped_wgrad` reads: [E], [E, rows, 1] or, of blocks, [rows, blocks]."""
    scales = [operand.scale_inv for operand in operands]
    if scales[0].dim() == 0:
        return torch.stack(scales)
    are_rowwise = all(scale.shape[1] == 1 for scale in scales)
    return torch.stack(scales) if are_rowwise else torch.cat(scales, 1)


def _wgrad_in_high_precision(dy: Tensor, x: Tensor, rows: slice) -> Tensor:
    return dy.t() @ x[rows].to(dy.dtype)


def _dgrad(
    dy: Tensor,
    experts: Sequence[tuple[LinearCall, slice, bool, bool]],
    operands: Sequence[tuple[Operand, Quantized | None]],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Returns dX of all experts, computed in high precision if the recipe overrides the precision of dgrad."""
    a = [dy_q.rowwise for dy_q, _ in operands if dy_q.rowwise is not None]
    b = [weight for _, weight in operands if weight is not None]
    if len(a) == len(b) == len(experts):
        return _grouped_mm(a, b, None, dtype)
    dx = [dy[rows] @ weight.to(dy.dtype) for (_, rows, *_), weight in zip(experts, weights, strict=True)]
    return torch.cat(dx).to(dtype)
