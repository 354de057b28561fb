"""Linear layers that are fused with the operation before them, which saves a read and a write of the activation.

    NormLinear        RMSNorm or LayerNorm, then Linear
    SiluMulLinear     silu(gate) * up, then Linear (the second half of a gated MLP)
    project_normed    RMSNorm, then the Linears of q, k and v       on a GPU, in training
    run_gated_mlp     RMSNorm, then a whole gated MLP               on a GPU, in training

One op produces the FP8 data and the amax of the activation between the two parts; the high-precision activation is
never written to memory. A placeholder without values represents it in the autograd graph. The results have the same
bits as those of separate modules. In FP32, BF16 and FP16 these are `elementwise.rms_norm` (or torch's layer norm) or
`elementwise.silu_mul`, then the Linear. Fused and unfused kernels share one function, so the order of sums and the
roundings are the same. torch's own `nn.RMSNorm` and `silu` may differ in the last bit of a sum or an exponential.

A fused op needs the scale before the values are known, so layers fuse only under DelayedScaling.

The two modules run their parts one after the other under other recipes, or if wgrad reads the input in high precision.
On a device without a fused kernel the op is a sequence of other ops. The backward pass recomputes the activation from
the inputs, which autograd saves anyway. A NormLinear has one Linear: fuse q, k and v into one weight, or the norm is
computed three times.

The two functions also fuse the transpose of the activation, and in the backward pass the gradients of gate and up with
their casts (ops/fused_casts.py). The graph saves the same tensors as for separate modules. They return None if the part
cannot be fused: outside of FP8, under other recipes, without gradients, with hooks or observers, in checkpointed
regions, in compiled graphs (which the compiler fuses itself), and on a CPU, whose kernels for separate modules are as
fast.
"""

from collections.abc import Callable, Sequence
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
from fp8serve.fp8.ops.elementwise import layer_norm
from fp8serve.fp8.recipe import DelayedScaling, as_delayed
from fp8serve.fp8.recompute import running_regions
from fp8serve.fp8.recording import add_to_step
from fp8serve.fp8.shared_input import SharedCast, SharedInput, are_unhooked, is_shared

_rms_norm_backward = torch.ops.fp8serve.rms_norm_backward.default
_cast_norm = torch.ops.fp8serve.rms_norm_quantize_delayed.default
_cast_silu = torch.ops.fp8serve.silu_mul_quantize_delayed.default
_cast_silu_gradients = torch.ops.fp8serve.silu_mul_backward_quantize_delayed.default

Inputs = tuple[Tensor | None, ...]  # of the op before the Linear
ComputeActivation = Callable[..., Tensor]  # (*inputs) -> the activation in high precision


def _placeholder(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor without values, which takes the memory of one element. Nothing reads it."""
    return like.new_empty(1, dtype=dtype).expand(shape)


class _Activation(torch.autograd.Function):
    """A placeholder for an activation, whose values the backward pass recomputes."""

    @staticmethod
    def forward(ctx: Any, compute_activation: ComputeActivation, dtype: torch.dtype, *inputs: Tensor | None) -> Tensor:
        ctx.compute_activation = compute_activation
        ctx.save_for_backward(*inputs)
        first = cast(Tensor, inputs[0])
        return _placeholder(first, *first.shape, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Inputs:
        needs_grad = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, needs_grad, strict=True)
        with torch.enable_grad():
            inputs = [None if t is None else t.detach().requires_grad_(needed) for t, needed in pairs]
            activation = ctx.compute_activation(*inputs)
        differentiable = [t for t, needed in zip(inputs, needs_grad, strict=True) if t is not None and needed]
        gradients = iter(torch.autograd.grad(activation, differentiable, gradient))
        return None, None, *(next(gradients) if needed else None for needed in needs_grad)


def _promoted_dtype(inputs: Inputs) -> torch.dtype:
    dtypes = [t.dtype for t in inputs if t is not None]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def _as_matrices(inputs: Inputs) -> list[Tensor | None]:
    return [t.reshape(-1, t.shape[-1]) if t is not None and t.dim() > 1 else t for t in inputs]


def _run_fused(
    linear: Linear,
    compute_activation: ComputeActivation,
    op: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    is_first_microbatch: bool | None,
) -> Tensor:
    """Returns `linear(compute_activation(*inputs))`. If the recipe allows it, `op(*inputs, scale, dtype)` returns the
    FP8 data and the amax of the activation."""
    dtype, kind = _promoted_dtype(inputs), cast(Tensor, inputs[0]).device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != dtype:
        # torch.autocast rounds the activation to its dtype before the Linear, which the fused op does not do.
        return cast(Tensor, linear(compute_activation(*inputs), is_first_microbatch))
    placeholder = cast(Tensor, _Activation.apply(compute_activation, dtype, *inputs))  # type: ignore[no-untyped-call]
    input = LinearInput(
        placeholder, lambda: compute_activation(*inputs), lambda scale, fmt: op(*_as_matrices(inputs), scale, fmt)
    )
    return linear.run(input, is_first_microbatch)


class NormLinear(nn.Module):
    """A norm over the last dimension followed by a Linear: [..., in_features] -> [..., out_features].

    `norm` is any module with `weight` and `eps`, and optionally `bias`. An nn.LayerNorm subtracts the mean; any other
    module is computed as an RMSNorm. If its eps is None, FP32's is used, as in nn.RMSNorm. The parameters of `norm` and
    `linear` are shared, not copied. Raises TypeError for a norm without a weight.
    """

    def __init__(self, norm: nn.Module, linear: Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear
        self.is_layer_norm = isinstance(norm, nn.LayerNorm)
        if not isinstance(getattr(norm, "weight", None), Tensor):
            raise TypeError(
                f"NormLinear needs a norm with a weight, and this {type(norm).__name__} has none; "
                "make it with elementwise_affine=True, or call it before a Linear."
            )
        eps = cast(Any, norm).eps
        self.eps = torch.finfo(torch.float32).eps if eps is None else float(eps)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Returns `linear(norm(x), is_first_microbatch)`."""
        weight, bias = cast(Tensor, self.norm.weight), cast(Tensor | None, getattr(self.norm, "bias", None))
        eps = self.eps
        if self.is_layer_norm:

            def compute_activation(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return layer_norm(x, weight, bias, eps)

            def op(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Any:
                return torch.ops.fp8serve.layer_norm_quantize(x, weight, bias, eps, scale, dtype)

            return _run_fused(self.linear, compute_activation, op, (x, weight, bias), is_first_microbatch)
        return _run_fused(
            self.linear,
            lambda x, weight: rms_norm(x, weight, eps),
            lambda x, weight, scale, dtype: torch.ops.fp8serve.rms_norm_quantize(x, weight, eps, scale, dtype),
            (x, weight),
            is_first_microbatch,
        )


class SiluMulLinear(nn.Module):
    """silu(gate) * up followed by a Linear: gate and up [..., in_features] -> [..., out_features]."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, gate: Tensor, up: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Returns `linear(silu(gate) * up, is_first_microbatch)`."""
        return _run_fused(self.linear, silu_mul, torch.ops.fp8serve.silu_mul_quantize, (gate, up), is_first_microbatch)


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
    is_eager_matrix = (
        x.dim() == 2 and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type)
    )
    uses_fp8_gemms = delayed is not None and not any(frame.recipe.override_linear_precision) and not frame.calibrating
    return delayed if is_eager_matrix and uses_fp8_gemms and not running_regions() else None


def _are_fusible(layers: Sequence[nn.Module | None]) -> TypeGuard[Sequence[Linear]]:
    modules = cast(Sequence[nn.Module], layers)
    return None not in layers and are_unhooked(modules) and not any(layer.observer is not None for layer in modules)


def _share_state(shared: SharedInput, layers: Sequence[Linear], delayed: DelayedScaling) -> bool:
    """Makes the layers share one state for their input if their states are equal. Returns whether they share one."""
    if len(layers) == 1:
        return True
    shared.share_states(layers, delayed)
    return is_shared([layer.scaling.get("input") for layer in layers])


def _is_trained_without_bias(layer: Linear) -> bool:
    return layer.weight.requires_grad and layer.bias is None


def _plan(layer: Linear, input: LinearInput) -> tuple[Tensor, LinearPlan, Operand]:
    """Returns the weight of a layer, the plan of its call, and its quantized input."""
    weight, x, shared = layer.weight, input.graph_tensor, cast(SharedCast, input.shared)
    plan = cast(LinearPlan, layer._create_plan(x, weight, None, is_alone=False))
    with torch.no_grad():
        return weight, plan, shared.cast(plan.call, input.compute, x.device, True, True)


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
        ctx.set_materialize_grads(False)  # the gradients of gate and up would be zeros that are not used
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
