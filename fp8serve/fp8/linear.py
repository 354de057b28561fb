"""Linear: Y = X W^T with its three GEMMs in FP8.

    forward   Y  [M, N] = X  [M, K] W^T     X and W in the forward format (E4M3)
    dgrad     dX [M, K] = dY [M, N] W       dY in the backward format (E5M2 with HYBRID)
    wgrad     dW [N, K] = dY^T X

Every GEMM needs both operands quantized along the dimension that it contracts. Under per-tensor scaling each tensor is
cast once, and the data are transposed for the backward pass if the device needs it (casting.py). Under row-wise and
block scaling an activation is quantized twice in the forward pass: along K for the forward GEMM and, transposed, along
M for wgrad. Either way autograd saves one byte per element of X and never X itself, unless wgrad runs in high
precision. A weight with 128x128 blocks is quantized once for both directions, a row-wise weight twice.

A weight is quantized in every forward pass, unless the caller states that it has not changed since the last one
(`is_first_microbatch`, microbatch.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import is_parametrized

from fp8serve.fp8.autocast import Frame, current_frame
from fp8serve.fp8.batch_invariant import product
from fp8serve.fp8.casting import (
    Operand,
    Quantized,
    cast_current,
    cast_delayed,
    cast_recording,
    draw_seed,
    operand_from_data,
    operand_of_cast,
    transposes_data,
    with_nan_scale,
)
from fp8serve.fp8.layer_inputs import FLOATS, cast_by_torch_autocast, check_operands, check_whole_blocks
from fp8serve.fp8.microbatch import QuantizedWeightCache, validate_is_first_microbatch
from fp8serve.fp8.ops import DTYPES, arithmetic
from fp8serve.fp8.ops.arithmetic import E8M0
from fp8serve.fp8.recipe import Precisions, Recipe, as_delayed
from fp8serve.fp8.recompute import check_not_reentrant, plan_call
from fp8serve.fp8.recording import (
    ModuleKey,
    add_to_step,
    expect_backward,
    module_key,
    prepare_module,
    record_amax,
    separate_states,
)
from fp8serve.fp8.scaling import Direction, ScalingState
from fp8serve.fp8.session import UpdateConfig
from fp8serve.fp8.spec import LINEAR_TENSORS, QuantSpec
from fp8serve.fp8.stateful import Stateful

if TYPE_CHECKING:
    from fp8serve.fp8.shared_input import SharedCast

# Produces the input and quantizes it in one op: (scale, FP8 dtype) -> (FP8 data [M, K], amax).
FusedQuantize = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
# Produces the input, quantizes it and records its amax in one op: (scale, history, FP8 dtype, whether to transpose) ->
# (FP8 data [M, K], transposed data [K, M] or an empty tensor, scale_inv).
ProducedCast = Callable[[Tensor, Tensor | None, torch.dtype, bool], tuple[Tensor, Tensor, Tensor]]
Observer = Callable[[str, Tensor, Tensor, Tensor], None]  # (tensor name, values, FP8 data, scale_inv)

_mx_mm = torch.ops.fp8serve.mx_mm.default
_nvfp4_mm = torch.ops.fp8serve.nvfp4_mm.default
_scaled_mm = torch.ops.fp8serve.scaled_mm.default
_unsafe_view = torch.ops.aten._unsafe_view.default


# LinearCall and LinearPlan are not `frozen`, which would make their creation in every call four times as slow.
@dataclass(eq=False)
class LinearCall:
    """The settings of one forward call, which its backward pass uses as well."""

    module_key: ModuleKey
    recipe: Recipe
    config_id: int | None  # the id of `config`; None for recipes without states
    config: UpdateConfig | None  # how delayed states are updated; this reference keeps it alive, the registry's is weak
    states: dict[str, ScalingState]  # empty for recipes without states
    high_precision: Precisions  # which of fprop, dgrad, wgrad run in high precision
    is_recording: bool  # whether the forward pass stages amaxes
    observer: Observer | None  # a monitor that reads the FP8 data
    is_calibrating: bool  # also stages the amaxes of operands that stay in high precision
    shard_group: Any = None  # the process group whose ranks hold the other shards of every operand (tensor_parallel.py)
    rounding_seed: Tensor | None = None  # of the stochastic rounding of the gradient, int64 []

    def cast(self, name: str, x: Tensor, rowwise: bool, columnwise: bool) -> Operand:
        """Quantizes the named tensor for the requested directions and stages its amax if the recipe has states."""
        if not (rowwise or columnwise):
            if self.is_calibrating:
                self._stage_amax(name, arithmetic.fast_amax(x))
            return Operand(None, None)
        if name == "weight" and hasattr(x, "received_quantized"):  # FSDP2 gathered it in FP8 (fsdp.py)
            operand, amax = cast(Any, x).received_quantized(self.is_recording)
            if amax is not None:
                self._stage_amax(name, amax)
            return cast(Operand, operand)
        spec, is_gradient = self.recipe.specs.linear[name], name == "grad_output"
        if spec.source == "current":
            seed = self.rounding_seed if spec.stochastic else None
            operand = cast_current(
                x, spec, rowwise, columnwise, self.shard_group, infinity_is_nan=is_gradient, seed=seed
            )
        else:
            operand = self._cast_delayed(name, x, spec, columnwise, is_gradient)
        if self.observer is not None:
            self._call_observer(name, lambda: x, operand)
        return operand if rowwise and columnwise else operand.only(rowwise, columnwise)

    def _cast_delayed(self, name: str, x: Tensor, spec: QuantSpec, columnwise: bool, is_gradient: bool) -> Operand:
        state = self.states[name]
        if torch.compiler.is_compiling():  # separate ops, which the compiler fuses; add_to_step would not be traced
            operand, amax = cast_delayed(x, spec, state.scale, columnwise)
            self._stage_amax(name, amax)
            return operand.map(lambda data: with_nan_scale(data, amax.isinf())) if is_gradient else operand
        stages_amax = self.config_id is not None and (self.is_recording or is_gradient)
        history = state.amax_history if stages_amax else None
        operand = cast_recording(x, spec, state.scale, history, columnwise, infinity_is_nan=is_gradient)
        if stages_amax:
            add_to_step("backward" if is_gradient else "forward", self.module_key, cast(int, self.config_id))
        return operand

    def cast_fused(self, fused_quantize: FusedQuantize, compute: Callable[[], Tensor], columnwise: bool) -> Operand:
        """Quantizes the input with an op that also produces it. `compute` returns the input for an observer."""
        scale = self.states["input"].scale
        q, amax = fused_quantize(scale, DTYPES[self.recipe.specs.linear["input"].element])
        self._stage_amax("input", amax)
        operand = operand_from_data(q, scale, columnwise)
        if self.observer is not None:
            self._call_observer("input", lambda: compute().reshape(q.shape), operand)
        return operand

    def cast_produced(self, produce: ProducedCast, compute: Callable[[], Tensor], device: torch.device) -> Operand:
        """Quantizes the input in both directions with an op that also produces it and records its amax.

        `compute` returns the input for an observer.
        """
        state = self.states["input"]
        history = state.amax_history if self.config_id is not None and self.is_recording else None
        dtype = DTYPES[self.recipe.specs.linear["input"].element]
        operand = operand_of_cast(*produce(state.scale, history, dtype, transposes_data(device, True)), True)
        self.join_cast(compute, operand)
        return operand

    def join_cast(self, compute: Callable[[], Tensor], operand: Operand) -> None:
        """Does what `cast("input", ...)` does, except for the cast and the recording of the amax.

        Layers that share an operand share the history, so its staging slot has risen to the amax already. `compute`
        returns the input for an observer.
        """
        if self.config_id is not None and self.is_recording:
            if torch.compiler.is_compiling():  # the graph's node adds the module to the step; 0 changes no amax
                history = self.states["input"].amax_history
                record_amax("forward", history, history.new_zeros(()), self.module_key, self.config_id)
            else:
                add_to_step("forward", self.module_key, self.config_id)
        if self.observer is not None:
            self._call_observer("input", compute, operand)

    def _call_observer(self, name: str, compute_values: Callable[[], Tensor], operand: Operand) -> None:
        if self.observer is None or self.recipe.specs.linear[name].is_4bit:  # it counts FP8 values
            return
        if operand.rowwise is not None:
            self.observer(name, compute_values(), *operand.rowwise)
        elif operand.columnwise is not None:
            self.observer(name, compute_values().t(), *operand.columnwise)

    def _stage_amax(self, name: str, amax: Tensor) -> None:
        direction: Direction = "backward" if name == "grad_output" else "forward"
        if self.config_id is not None and (self.is_recording or direction == "backward"):
            record_amax(direction, self.states[name].amax_history, amax, self.module_key, self.config_id)


class LinearInput(NamedTuple):
    """The input of a call, which a fused op may produce and quantize.

    `graph_tensor` is the input in the autograd graph: the input itself or a placeholder without values. `compute`
    returns the input in high precision; it is not called if the plan reads only FP8 data and there is a fused op.
    `shared` is given if other layers have the same input.
    """

    graph_tensor: Tensor
    compute: Callable[[], Tensor]
    fused_quantize: FusedQuantize | None = None
    shared: "SharedCast | None" = None


class Parameters(NamedTuple):
    """The parameters of a layer, read once per call.

    A parametrization is evaluated at every read and may give another weight each time, for example a new dropout mask.
    """

    weight: Tensor
    bias: Tensor | None


@dataclass(eq=False)
class LinearPlan:
    """How one forward call runs: its settings, its quantized weight, and the directions in which it reads the input."""

    call: LinearCall
    input_rowwise: bool
    input_columnwise: bool
    weight: Operand

    @property
    def reads_only_fp8_input(self) -> bool:
        """Whether the call needs only the FP8 data of the input: the scale is delayed and no GEMM reads the input in
        high precision."""
        return self.call.config_id is not None and self.input_rowwise and not self.call.high_precision[2]

    def for_second_run(self) -> "LinearPlan":
        """Returns the plan for recomputing the forward pass: it has a copy of the current scale and records nothing."""
        states = {name: replace(s, scale=s.scale.clone()) for name, s in self.call.states.items() if name == "input"}
        return replace(self, call=replace(self.call, states=states, is_recording=False, observer=None))


def mm(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Returns a b^T + bias, [M, N] of `out_dtype`, for quantized a [M, K] and b [N, K]."""
    if a.is_nvfp4:
        return cast(Tensor, _nvfp4_mm(a.q, b.q, a.scale_inv, b.scale_inv, bias, out_dtype))
    if a.scale_inv.dtype == E8M0:
        return cast(Tensor, _mx_mm(a.q, b.q, a.scale_inv, b.scale_inv, bias, None, out_dtype))
    return cast(Tensor, _scaled_mm(a.q, b.q, a.scale_inv, b.scale_inv, bias, out_dtype))


class _LinearFunction(torch.autograd.Function):
    """The forward and backward pass of a linear layer under any recipe: x [M, K], weight [N, K] -> [M, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, x_q: Operand, weight_q: Operand
    ) -> Tensor:
        _, is_dgrad_hp, is_wgrad_hp = call.high_precision
        ctx.call, ctx.dtypes = call, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        hp_tensors = x if is_wgrad_hp else None, weight if is_dgrad_hp else None
        ctx.save_for_backward(*hp_tensors, *(x_q.columnwise or ()), *(weight_q.columnwise or ()))
        ctx.has_columnwise = (x_q.columnwise is not None, weight_q.columnwise is not None)
        if x_q.rowwise is None or weight_q.rowwise is None:
            return product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return mm(x_q.rowwise, weight_q.rowwise, bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        (x_dtype, w_dtype, b_dtype), (needs_dx, needs_dw, needs_db) = ctx.dtypes, ctx.needs_input_grad[:3]
        x, weight, *data = ctx.saved_tensors
        x_columnwise = Quantized(*data[:2]) if ctx.has_columnwise[0] else None
        weight_columnwise = Quantized(*data[-2:]) if ctx.has_columnwise[1] else None
        _, is_dgrad_hp, is_wgrad_hp = call.high_precision
        dy_q = call.cast("grad_output", dy, needs_dx and not is_dgrad_hp, needs_dw and not is_wgrad_hp)
        dx = gradient(needs_dx, dy_q.rowwise, weight_columnwise, lambda: dy @ weight.to(dy.dtype), x_dtype)
        dw = gradient(needs_dw, dy_q.columnwise, x_columnwise, lambda: dy.t() @ x.to(dy.dtype), w_dtype)
        db = dy.float().sum(0).to(b_dtype) if needs_db else None
        return dx, dw, db, None, None, None


def gradient(
    is_needed: bool,
    a: Quantized | None,
    b: Quantized | None,
    compute_in_high_precision: Callable[[], Tensor],
    dtype: torch.dtype,
) -> Tensor | None:
    """Returns a b^T in `dtype`, in high precision if an operand is not quantized, or None if it is not needed."""
    if not is_needed:
        return None
    return compute_in_high_precision().to(dtype) if a is None or b is None else mm(a, b, None, dtype)


class Linear(Stateful, nn.Linear):
    """An nn.Linear that runs in FP8 inside `autocast` and in high precision outside of it.

    The output has the dtype of the input, or of torch.autocast if that is active. The weight may have another dtype,
    such as FP32 master weights with BF16 activations; its gradient has the weight's dtype. `params_dtype` is
    Transformer Engine's name for `dtype`. Raises TypeError if both are given and differ.
    """

    tensors: ClassVar[dict[Direction, tuple[str, ...]]] = {
        "forward": LINEAR_TENSORS[:2],
        "backward": LINEAR_TENSORS[2:],
    }

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is not None and params_dtype not in (None, dtype):
            raise TypeError(f"dtype is {dtype} and params_dtype {params_dtype}; they are two names of one parameter.")
        super().__init__(in_features, out_features, bias, device, params_dtype if dtype is None else dtype)
        self._init_states()

    def _init_states(self) -> None:
        super()._init_states()
        self._weight_cache: QuantizedWeightCache[Operand] = QuantizedWeightCache()
        self.observer: Observer | None = None
        self._ran_without_gradients = False  # whether the last call ran in FP8 without gradients

    @classmethod
    def convert(cls, linear: nn.Linear) -> "Linear":
        """Turns an nn.Linear into a Linear in place. Its parameters, hooks, flags and parametrizations stay."""
        kind = type(linear)
        # The class of a parametrized layer is made by torch. Its properties evaluate the parametrizations.
        attributes = {
            name: value for name, value in vars(kind).items() if isinstance(value, property) or name == "__getstate__"
        }
        linear.__class__ = type(kind.__name__, (cls,), attributes) if is_parametrized(linear) else cls
        converted = cast(Linear, linear)
        converted._init_states()
        return converted

    def state_device(self) -> torch.device:
        """Returns the device of the parameters, without evaluating a parametrized weight."""
        first = self._parameters.get("weight")
        if first is None:
            first = next(self.parameters(), None)
        return (self.weight if first is None else first).device

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Returns the output [..., out_features] for an input [..., in_features].

        With `is_first_microbatch=True` the quantized weight is cached, with False the cached weight is used, with None
        the `autocast` decides. Raises RecipeError for another value. In FP8, raises TypeError, ValueError or
        RuntimeError for an input that cannot be multiplied in FP8 (layer_inputs.py).
        """
        x = cast_by_torch_autocast(input)
        return self.run(LinearInput(x, lambda: x), is_first_microbatch)

    def run_shared(self, x: Tensor, shared: "SharedCast") -> Tensor:
        """Returns the output of the layer for an input that other layers share (shared_input.py)."""
        return self.run(LinearInput(x, lambda: x, shared=shared))

    def run(self, input: LinearInput, is_first_microbatch: bool | None = None) -> Tensor:
        """Returns the output of the layer; see `forward`."""
        x, parameters = input.graph_tensor, Parameters(self.weight, self.bias)
        is_first = validate_is_first_microbatch(is_first_microbatch)
        is_alone = input.shared is None
        plan = plan_call(self.key, lambda: self._create_plan(x, parameters.weight, is_first, is_alone))
        if plan is None:
            return self._run_in_high_precision(input.compute(), parameters)
        y = self._run_in_fp8(input, plan, parameters)
        if x.dim() == 2:
            return y
        middle = x.shape[1:-1]
        # The first dimension may differ from the input's, because tensor-parallel layers gather and scatter tokens.
        first = x.shape[:1] if math.prod(middle) == 0 else (y.shape[0] // math.prod(middle),)
        shape = (self.out_features,) if x.dim() == 1 else (*first, *middle, self.out_features)
        # Not `view`: FSDP2 warns about a module that returns a view.
        return cast(Tensor, _unsafe_view(y, shape))

    def _run_in_high_precision(self, x: Tensor, parameters: Parameters) -> Tensor:
        """Returns the same bits as the original nn.Linear and raises the same errors."""
        weight, bias = parameters
        if x.dtype in FLOATS and weight.dtype in FLOATS:  # master weights may have another dtype than activations
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return F.linear(x, weight, bias)

    def _create_plan(
        self, x: Tensor, weight: Tensor, is_first_microbatch: bool | None, is_alone: bool = True
    ) -> LinearPlan | None:
        """Returns how this call runs under the active recipe, or None if it runs in high precision.

        `is_alone` is False if the layers with which this one shares states run on the same input.
        """
        frame, has_graph = current_frame(), torch.is_grad_enabled()
        runs_without_gradients = frame is not None and not has_graph
        if frame is None and has_graph:
            check_not_reentrant(self._ran_without_gradients)
        # Setting a module's attribute is slow, so it is set only if it changes. In a compiled graph it is always set,
        # because a graph that reads it would be compiled again for every value. An exported graph sets no attribute.
        is_changed = torch.compiler.is_compiling() or self._ran_without_gradients != runs_without_gradients
        if not torch.compiler.is_exporting() and is_changed:
            self._ran_without_gradients = runs_without_gradients
        if frame is None:
            return None
        check_operands(x, weight, self.in_features)
        if is_alone and self.shared_states:
            separate_states(self)
        call = self._create_call(frame)
        is_fprop_hp, is_dgrad_hp, is_wgrad_hp = call.high_precision
        rowwise, columnwise = not is_fprop_hp, has_graph and x.requires_grad and not is_dgrad_hp
        if rowwise:
            check_whole_blocks(frame.recipe, self.in_features)
        input_columnwise = has_graph and weight.requires_grad and not is_wgrad_hp
        calibrates_backward = call.is_calibrating and has_graph and (x.requires_grad or weight.requires_grad)
        if call.config_id is not None and (columnwise or input_columnwise or calibrates_backward):
            expect_backward(call.states["weight"].amax_history, call.config_id, cast(UpdateConfig, call.config))
        is_first = is_first_microbatch
        if is_first is None and not torch.compiler.is_compiling():  # a graph cannot see changes between its runs
            is_first = frame.is_first_microbatch
        weight_q = self._quantize_weight(weight, call, is_first, rowwise, columnwise)
        return LinearPlan(call, rowwise, input_columnwise, weight_q)

    def _quantize_weight(
        self, weight: Tensor, call: LinearCall, is_first_microbatch: bool | None, rowwise: bool, columnwise: bool
    ) -> Operand:
        with torch.no_grad():
            # A weight that FSDP2 has gathered in FP8 has a cache of its own.
            if is_first_microbatch is None or hasattr(weight, "received_quantized"):
                return call.cast("weight", weight, rowwise, columnwise)

            def has_directions(operand: Operand) -> bool:
                return not (rowwise and operand.rowwise is None) and not (columnwise and operand.columnwise is None)

            def quantize() -> Operand:
                return call.cast("weight", weight, rowwise, columnwise)

            return self._weight_cache.get(weight, call.recipe, is_first_microbatch, quantize, has_directions)

    def _create_call(self, frame: Frame) -> LinearCall:
        recipe, has_graph = frame.recipe, torch.is_grad_enabled()
        delayed, is_recording = as_delayed(recipe), has_graph or frame.calibrating
        high_precision = recipe.override_linear_precision if frame.enabled else (True, True, True)
        if delayed is not None and frame.config_id is not None:
            is_recording_or_hp = is_recording or high_precision[0]
            prepare_module(self, frame.config_id, frame.config, delayed.amax_history_len, is_recording_or_hp)
        return LinearCall(
            module_key=module_key(self),
            recipe=recipe,
            config_id=frame.config_id,
            config=frame.config,
            states={} if delayed is None else self.scaling,
            high_precision=high_precision,
            is_recording=is_recording,
            observer=None if torch.compiler.is_compiling() else self.observer,
            is_calibrating=frame.calibrating,
            rounding_seed=draw_seed() if has_graph and recipe.specs.linear["grad_output"].stochastic else None,
        )

    def _run_in_fp8(self, input: LinearInput, plan: LinearPlan, parameters: Parameters) -> Tensor:
        x, x_q = self._quantize_input(input, plan)
        args = (x, *parameters, plan.call, x_q, plan.weight)
        return cast(Tensor, _LinearFunction.apply(*args))  # type: ignore[no-untyped-call]

    def _quantize_input(self, input: LinearInput, plan: LinearPlan) -> tuple[Tensor, Operand]:
        """Returns the input as a matrix [M, K] of the autograd graph, and the quantized input."""
        call, shared = plan.call, input.shared
        fused_quantize = input.fused_quantize if plan.reads_only_fp8_input else None
        is_produced = fused_quantize is not None or (shared is not None and shared.produce is not None)
        x = input.graph_tensor if is_produced else input.compute()
        if x.dim() != 2 or x.shape[1] != self.in_features:
            x = x.reshape(math.prod(x.shape[:-1]), self.in_features)  # not -1, which is ambiguous for no features
        with torch.no_grad():
            if shared is not None:
                compute = input.compute if is_produced else lambda: x
                return x, shared.cast(call, compute, x.device, plan.input_rowwise, plan.input_columnwise)
            if fused_quantize is not None:
                return x, call.cast_fused(fused_quantize, input.compute, plan.input_columnwise)
            return x, call.cast("input", x, plan.input_rowwise, plan.input_columnwise)
