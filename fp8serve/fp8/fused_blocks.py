"""The parts of a decoder layer that training on a GPU runs fused: norm and projections, and the gated MLP.

    projections   the norm, and the cast and transpose of q's, k's and v's input
    gated MLP     the norm and the cast for gate and up; silu(gate) * up and the cast for down; in the backward pass,
                  the gradients of gate and up and their casts

Each of these casts is fused with the operation before it into one op (ops/fused_casts.py), so the values between the
two are never written in high precision. Placeholders without values represent them in the autograd graph, which saves
the same tensors as for separate modules. The results have the same bits as those of separate modules on the same
device.

The functions return None if a part cannot be fused: outside of FP8, under other recipes than delayed scaling, without
gradients, with hooks or observers, in checkpointed regions, in compiled graphs (which the compiler fuses itself), and
on a CPU, whose kernels for separate modules are as fast.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.fp8.autocast import current_frame
from fp8serve.fp8.casting import Operand, Quantized, operand_of_cast, transposes_data
from fp8serve.fp8.elementwise import rms_norm, silu_mul
from fp8serve.fp8.linear import Linear, LinearCall, LinearInput, LinearPlan, mm
from fp8serve.fp8.ops import DTYPES
from fp8serve.fp8.recipe import DelayedScaling, as_delayed
from fp8serve.fp8.recompute import running_regions
from fp8serve.fp8.recording import add_to_step
from fp8serve.fp8.shared_input import SharedCast, SharedInput, are_one, are_plain

_rms_norm_backward = torch.ops.fp8serve.rms_norm_backward.default
_cast_norm = torch.ops.fp8serve.rms_norm_quantize_delayed.default
_cast_silu = torch.ops.fp8serve.silu_mul_quantize_delayed.default
_cast_silu_gradients = torch.ops.fp8serve.silu_mul_backward_quantize_delayed.default


class NormParameters(NamedTuple):
    """The weight and eps of an RMSNorm."""

    weight: Tensor
    eps: float


def project_normed(
    shared: SharedInput, layers: Sequence[nn.Module | None], x: Tensor, norm: NormParameters
) -> Sequence[Tensor] | None:
    """Returns layer(rms_norm(x)) for each layer, or None if the norm and the cast cannot be fused."""
    delayed = _fusible_recipe(x)
    if delayed is None or not _are_fusible(layers) or not _share_state(shared, layers, delayed):
        return None
    input = _normed_input(x, norm)
    return [layer.run(input) for layer in layers]


def run_gated_mlp(
    shared: SharedInput, layers: Sequence[nn.Module | None], x: Tensor, norm: NormParameters
) -> Tensor | None:
    """Returns down(silu(gate(y)) * up(y)) for y = rms_norm(x) and the layers gate, up, down, or None if it cannot be
    fused."""
    delayed = _fusible_recipe(x)
    if delayed is None or not _are_fusible(layers) or not _share_state(shared, layers[:2], delayed):
        return None
    gate_layer, up_layer, down = layers
    if not all(_is_trained_without_bias(layer) for layer in (gate_layer, up_layer)):
        return None
    input = _normed_input(x, norm)
    products = [_plan(layer, input) for layer in (gate_layer, up_layer)]
    weights, plans, operands = zip(*products, strict=True)
    calls = [plan.call for plan in plans]
    weight_operands = [plan.weight for plan in plans]
    arguments = input.graph_tensor, *weights, calls, operands[0], weight_operands
    activation, gate, up = _GatedProducts.apply(*arguments)  # type: ignore[no-untyped-call]
    return down.run(
        LinearInput(activation, partial(silu_mul, gate, up), shared=SharedCast(partial(_cast_silu, gate, up)))
    )


def _normed_input(x: Tensor, norm: NormParameters) -> LinearInput:
    placeholder = cast(Tensor, _Norm.apply(x, *norm))  # type: ignore[no-untyped-call]
    produce = partial(_cast_norm, x, *norm)
    return LinearInput(placeholder, partial(rms_norm, x, *norm), shared=SharedCast(produce))


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _fusible_recipe(x: Tensor) -> DelayedScaling | None:
    """Returns the recipe if x [M, K] is an activation of a training step whose casts can be fused."""
    frame = current_frame()
    if frame is None or not frame.enabled or not (_is_on_gpu(x) and x.requires_grad and torch.is_grad_enabled()):
        return None
    delayed = as_delayed(frame.recipe)
    is_plain = x.dim() == 2 and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type)
    is_usual = delayed is not None and not any(frame.recipe.override_linear_precision) and not frame.calibrating
    return delayed if is_plain and is_usual and not running_regions() else None


def _are_fusible(layers: Sequence[nn.Module | None]) -> TypeGuard[Sequence[Linear]]:
    modules = cast(Sequence[nn.Module], layers)
    return None not in layers and are_plain(modules) and not any(layer.observer is not None for layer in modules)


def _share_state(shared: SharedInput, layers: Sequence[Linear], delayed: DelayedScaling) -> bool:
    """Makes the layers share one state for their input if their states are equal. Returns whether they share one."""
    if len(layers) == 1:
        return True
    shared.share_states(layers, delayed)
    return are_one([layer.scaling.get("input") for layer in layers])


def _is_trained_without_bias(layer: Linear) -> bool:
    return layer.weight.requires_grad and layer.bias is None


def _plan(layer: Linear, input: LinearInput) -> tuple[Tensor, LinearPlan, Operand]:
    """Returns the weight of a layer, the plan of its call, and its quantized input."""
    weight, x, shared = layer.weight, input.graph_tensor, cast(SharedCast, input.shared)
    plan = cast(LinearPlan, layer._create_plan(x, weight, None, is_alone=False))
    with torch.no_grad():
        return weight, plan, shared.cast(plan.call, input.compute, x.device, True, True)


def _placeholder(like: Tensor, *shape: int) -> Tensor:
    """Returns a tensor without values, which takes the memory of one element."""
    return like.new_empty(1).expand(shape)


class _Norm(torch.autograd.Function):
    """A placeholder for rms_norm(x, weight, eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _placeholder(x, *x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_x, d_weight = _rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps)
        return d_x, d_weight, None


class _GatedProducts(torch.autograd.Function):
    """The products of gate and up, and a placeholder for silu(gate) * up.

    The backward pass receives the gradient of silu(gate) * up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        calls: Sequence[LinearCall],
        x_q: Operand,
        weights_q: Sequence[Operand],
    ) -> tuple[Tensor, Tensor, Tensor]:
        rowwise, columnwise = cast(tuple[Quantized, Quantized], x_q)
        gate, up = (mm(rowwise, cast(Quantized, weight.rowwise), None, x.dtype) for weight in weights_q)
        weights_columnwise = [cast(Quantized, weight.columnwise) for weight in weights_q]
        ctx.save_for_backward(gate, up, *columnwise, *weights_columnwise[0], *weights_columnwise[1])
        ctx.calls, ctx.dtypes = calls, (x.dtype, gate_weight.dtype, up_weight.dtype)
        ctx.mark_non_differentiable(gate, up)
        ctx.set_materialize_grads(False)  # gradients of gate and up would be zeros, which nobody reads
        return _placeholder(x, *gate.shape), gate, up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *data = ctx.saved_tensors
        x_columnwise, gate_weight, up_weight = Quantized(*data[:2]), Quantized(*data[2:4]), Quantized(*data[4:])
        x_dtype, gate_dtype, up_dtype = ctx.dtypes
        gate_q, up_q = _cast_gradients(ctx.calls, grad, gate, up)
        d_x = mm(cast(Quantized, up_q.rowwise), up_weight, None, x_dtype)
        d_up_weight = mm(cast(Quantized, up_q.columnwise), x_columnwise, None, up_dtype)
        d_x = d_x + mm(cast(Quantized, gate_q.rowwise), gate_weight, None, x_dtype)
        d_gate_weight = mm(cast(Quantized, gate_q.columnwise), x_columnwise, None, gate_dtype)
        return d_x, d_gate_weight, d_up_weight, None, None, None


def _cast_gradients(calls: Sequence[LinearCall], grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Operand, Operand]:
    """Returns the quantized gradients of gate and up, and records their amaxes."""
    states = [call.states["grad_output"] for call in calls]
    histories = [s.amax_history if call.config_id is not None else None for s, call in zip(states, calls, strict=True)]
    dtype = DTYPES[calls[0].recipe.specs.linear["grad_output"].element]
    states_and_histories = states[0].scale, histories[0], states[1].scale, histories[1]
    transposes = transposes_data(gate.device, True)
    gate_q, gate_q_t, gate_scale_inv, up_q, up_q_t, up_scale_inv = _cast_silu_gradients(
        grad, gate, up, *states_and_histories, dtype, transposes
    )
    for call in calls:
        if call.config_id is not None:
            add_to_step("backward", call.module_key, call.config_id)
    return operand_of_cast(gate_q, gate_q_t, gate_scale_inv, True), operand_of_cast(up_q, up_q_t, up_scale_inv, True)
