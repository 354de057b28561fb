"""Linear: Y = X W^T with its three GEMMs in FP8.

    forward   Y  [M, N] = X  [M, K] W^T     X and W in the forward format (E4M3)
    dgrad     dX [M, K] = dY [M, N] W       dY in the backward format (E5M2 with HYBRID)
    wgrad     dW [N, K] = dY^T X

Every GEMM needs both operands quantized along the dimension that it contracts. Under per-tensor scaling one cast serves
all of them, transposed for the backward pass as the device needs it (casting.py). Under row-wise and block scaling an
activation is quantized twice in the forward pass, along K for the forward GEMM and, transposed, along M for wgrad.
Either way a layer keeps one byte per element of X, never X itself (unless wgrad stays in high precision). 128x128
blocks of a weight serve both directions; a row-wise weight is quantized twice.

A weight is quantized in every forward pass, unless the caller announces that it is unchanged since the pass before
(`is_first_microbatch`, microbatch.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import is_parametrized

from fp8serve.fp8.autocast import Frame, current
from fp8serve.fp8.batch_invariant_product import product
from fp8serve.fp8.casting import (
    Operand,
    Quantized,
    cast_current,
    cast_delayed,
    cast_recording,
    from_quantized,
    unhidden,
)
from fp8serve.fp8.layer_inputs import FLOATS, cast_by_torch_autocast, check_operands
from fp8serve.fp8.microbatch import Retained, checked
from fp8serve.fp8.ops import DTYPES, arithmetic
from fp8serve.fp8.recipe import Precisions, Recipe, delayed
from fp8serve.fp8.recompute import planned, refuse_reentrant
from fp8serve.fp8.recording import expect_backward, prepare, record, recorded
from fp8serve.fp8.scaling import Direction, ScalingState
from fp8serve.fp8.spec import QuantSpec
from fp8serve.fp8.stateful import Stateful

Fused = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]  # (scale, FP8 dtype) -> (FP8 data [M, K], amax)

Observer = Callable[[str, Tensor, Tensor, Tensor], None]  # (tensor name, values, FP8 data, scale_inv)

NAMES = ("input", "weight", "grad_output")
_scaled_mm = torch.ops.fp8serve.scaled_mm.default
_unsafe_view = torch.ops.aten._unsafe_view.default


# Not `frozen`, which takes four times as long to make: every call of a layer makes one of each.
@dataclass(eq=False)
class LinearCall:
    """What a forward call decides for its backward pass."""

    module: int  # by key, as `record` wants it
    recipe: Recipe
    rule: int | None  # how delayed states are updated, by id; None for recipes without state
    held: Any  # that rule itself, which exists as long as somebody holds it
    states: dict[str, ScalingState]  # empty for recipes without state
    hp: Precisions  # which of fprop, dgrad, wgrad run in high precision
    recording: bool  # stage amaxes in the forward pass
    observer: Observer | None  # a monitor that reads the FP8 data
    observing: bool  # calibrating: stage the amax of operands that stay in high precision, too
    sharers: Any = None  # process group whose ranks hold the other parts of every operand, see tensor_parallel.py

    def cast(self, name: str, x: Tensor, rowwise: bool, columnwise: bool) -> Operand:
        """Quantize the named tensor for the directions asked for; its amax is staged if the recipe has states."""
        if not (rowwise or columnwise):
            if self.observing:
                self._stage(name, arithmetic.amax_now(x))
            return Operand(None, None)
        if name == "weight" and hasattr(x, "received_quantized"):  # FSDP2 gathered it in FP8 (fsdp.py)
            operand, amax = cast(Any, x).received_quantized(self.recording)
            if amax is not None:
                self._stage(name, amax)
            return cast(Operand, operand)
        spec, is_gradient = self.recipe.specs.linear[name], name == "grad_output"
        if spec.source == "current":
            operand = cast_current(x, spec, rowwise, columnwise, self.sharers, infinity_is_nan=is_gradient)
        else:
            operand = self._cast_delayed(name, x, spec, columnwise, is_gradient)
        if self.observer is not None:
            self._show(name, lambda: x, operand)
        return operand if rowwise and columnwise else operand.only(rowwise, columnwise)

    def _cast_delayed(self, name: str, x: Tensor, spec: QuantSpec, columnwise: bool, is_gradient: bool) -> Operand:
        state = self.states[name]
        if torch.compiler.is_compiling():  # the compiler fuses what follows; and only these nodes tell the step
            operand, amax = cast_delayed(x, spec, state.scale, columnwise)
            self._stage(name, amax)
            return operand.map(lambda data: unhidden(data, amax.isinf())) if is_gradient else operand
        stages = self.rule is not None and (self.recording or is_gradient)
        history = state.amax_history if stages else None
        operand = cast_recording(x, spec, state.scale, history, columnwise, infinity_is_nan=is_gradient)
        if stages:
            recorded("backward" if is_gradient else "forward", self.module, cast(int, self.rule))
        return operand

    def cast_fused(self, fused: Fused, values: Callable[[], Tensor], columnwise: bool) -> Operand:
        """The input from an op that produces and quantizes it in one; `values` makes it for an observer."""
        scale = self.states["input"].scale
        q, amax = fused(scale, DTYPES[self.recipe.specs.linear["input"].element])
        self._stage("input", amax)
        operand = from_quantized(q, scale, columnwise)
        if self.observer is not None:
            self._show("input", lambda: values().reshape(q.shape), operand)
        return operand

    def _show(self, name: str, values: Callable[[], Tensor], operand: Operand) -> None:
        if self.observer is not None and operand.rowwise is not None:
            self.observer(name, values(), *operand.rowwise)
        elif self.observer is not None and operand.columnwise is not None:
            self.observer(name, values().t(), *operand.columnwise)

    def _stage(self, name: str, amax: Tensor) -> None:
        direction: Direction = "backward" if name == "grad_output" else "forward"
        if self.rule is not None and (self.recording or direction == "backward"):
            record(direction, self.states[name].amax_history, amax, self.module, self.rule)


class Parameters(NamedTuple):
    """A layer's parameters as one call uses them. A call reads each once, because a parametrization is evaluated at
    every read and may give another weight: DropConnect draws a new mask."""

    weight: Tensor
    bias: Tensor | None


@dataclass(eq=False)
class LinearPlan:
    """How one forward call runs, and how its second run goes if activations are recomputed."""

    call: LinearCall
    input_rowwise: bool  # in which directions its GEMMs read the input
    input_columnwise: bool
    weight: Operand

    @property
    def reads_quantized_only(self) -> bool:
        """Whether the input's values are not needed: its scale is known beforehand and no GEMM reads it in high
        precision."""
        return self.call.rule is not None and self.input_rowwise and not self.call.hp[2]

    def repeated(self) -> "LinearPlan":
        """The plan of the second run: the scale as it is now, nothing recorded."""
        states = {name: replace(s, scale=s.scale.clone()) for name, s in self.call.states.items() if name == "input"}
        return replace(self, call=replace(self.call, states=states, recording=False, observer=None))


def mm(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """[M, K] x [N, K] -> [M, N]."""
    return cast(Tensor, _scaled_mm(a.q, b.q, a.scale_inv, b.scale_inv, bias, out_dtype))


class _Matmul(torch.autograd.Function):
    """The one autograd function: all recipes, all overrides. x [M, K], weight [N, K] -> [M, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, x_q: Operand, weight_q: Operand
    ) -> Tensor:
        _, dgrad_hp, wgrad_hp = call.hp
        ctx.call, ctx.dtypes = call, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(
            x if wgrad_hp else None, weight if dgrad_hp else None, *(x_q.columnwise or ()), *(weight_q.columnwise or ())
        )
        ctx.has_columnwise = (x_q.columnwise is not None, weight_q.columnwise is not None)
        if x_q.rowwise is None or weight_q.rowwise is None:
            return product(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return mm(x_q.rowwise, weight_q.rowwise, bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        (x_dtype, w_dtype, b_dtype), (want_dx, want_dw, want_db) = ctx.dtypes, ctx.needs_input_grad[:3]
        x, weight, *data = ctx.saved_tensors
        x_columnwise = Quantized(*data[:2]) if ctx.has_columnwise[0] else None
        weight_columnwise = Quantized(*data[-2:]) if ctx.has_columnwise[1] else None
        operand = call.cast("grad_output", dy, want_dx and not call.hp[1], want_dw and not call.hp[2])
        dx = gradient(want_dx, operand.rowwise, weight_columnwise, lambda: dy @ weight.to(dy.dtype), x_dtype)
        dw = gradient(want_dw, operand.columnwise, x_columnwise, lambda: dy.t() @ x.to(dy.dtype), w_dtype)
        db = dy.float().sum(0).to(b_dtype) if want_db else None
        return dx, dw, db, None, None, None


def gradient(
    needed: bool, a: Quantized | None, b: Quantized | None, in_high_precision: Callable[[], Tensor], dtype: torch.dtype
) -> Tensor | None:
    if not needed:
        return None
    return in_high_precision().to(dtype) if a is None or b is None else mm(a, b, None, dtype)


class Linear(Stateful, nn.Linear):
    """nn.Linear [..., in_features] -> [..., out_features] that runs in FP8 inside `autocast`, else in high precision.

    The output has the dtype of the input (of torch.autocast, where that is active); the weight may have another, such
    as FP32 master weights under BF16 activations, and its gradient has the weight's. `params_dtype` is Transformer
    Engine's name for `dtype`; TypeError if both are given and differ.
    """

    tensors: ClassVar[dict[Direction, tuple[str, ...]]] = {"forward": NAMES[:2], "backward": NAMES[2:]}

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
            raise TypeError(f"dtype is {dtype} and params_dtype {params_dtype}; they are two names of one thing.")
        super().__init__(in_features, out_features, bias, device, params_dtype if dtype is None else dtype)
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._retained_weight: Retained[Operand] = Retained()
        self.observer: Observer | None = None
        self._ran_frozen = False  # the last call ran in FP8 without gradients

    @classmethod
    def adopt(cls, linear: nn.Linear) -> "Linear":
        """Turn an nn.Linear into a Linear in place: same object, parameters, hooks, flags and parametrizations."""
        kind = type(linear)
        # Of a parametrized layer torch has made a class, whose properties evaluate the parametrizations.
        own = {
            name: value for name, value in vars(kind).items() if isinstance(value, property) or name == "__getstate__"
        }
        linear.__class__ = type(kind.__name__, (cls,), own) if is_parametrized(linear) else cls
        adopted = cast(Linear, linear)
        adopted._begin()
        return adopted

    def state_device(self) -> torch.device:
        """Where the parameters are; a parametrized weight is not evaluated for it."""
        first = self._parameters.get("weight")
        if first is None:
            first = next(self.parameters(), None)
        return (self.weight if first is None else first).device

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """input [..., in_features] -> [..., out_features].

        is_first_microbatch: True keeps the quantized weight, False uses that of the last True, None follows the
        `autocast`, whose default is to quantize again. Raises RecipeError for anything else. In FP8, raises TypeError,
        ValueError or RuntimeError for an input that cannot be multiplied in FP8 (layer_inputs.py).
        """
        x = cast_by_torch_autocast(input)
        return self.run(x, lambda: x, None, is_first_microbatch)

    def run(
        self, edge: Tensor, values: Callable[[], Tensor], fused: Fused | None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """The layer on `values()`, or on the output of `fused` where the plan needs only the FP8 data.

        edge: the input's place in the autograd graph, of its shape and dtype; the input itself, or a stand-in for it.
        """
        own = Parameters(self.weight, self.bias)
        plan = planned(self.key, lambda: self._plan(edge, own.weight, checked(is_first_microbatch)))
        if plan is None:
            return self._in_high_precision(values(), own)
        y = self._quantized(edge, values, fused, plan, own)
        if edge.dim() == 2:
            return y
        middle = edge.shape[1:-1]
        # The first dimension is not always the input's: tensor-parallel layers gather and scatter tokens.
        first = edge.shape[:1] if math.prod(middle) == 0 else (y.shape[0] // math.prod(middle),)
        shape = (self.out_features,) if edge.dim() == 1 else (*first, *middle, self.out_features)
        # Not a view: FSDP2 warns about a module that returns one.
        return cast(Tensor, _unsafe_view(y, shape))

    def _in_high_precision(self, x: Tensor, own: Parameters) -> Tensor:
        """Without a recipe a converted model gives the same bits as the original, and refuses the same inputs."""
        if x.dtype in FLOATS and own.weight.dtype in FLOATS:  # weights may be masters of another dtype
            own = Parameters(own.weight.to(x.dtype), None if own.bias is None else own.bias.to(x.dtype))
        return F.linear(x, own.weight, own.bias)

    def _plan(self, x: Tensor, weight: Tensor, first: bool | None) -> LinearPlan | None:
        """How this call runs: the recipe in force and the quantized weight. None: in high precision."""
        context, graph = current(), torch.is_grad_enabled()
        runs_frozen = context is not None and not graph
        if context is None and graph:
            refuse_reentrant(self._ran_frozen)
        # Setting a module's attribute is slow. A graph that reads one is compiled again for another value; one of
        # torch.export sets none.
        if not torch.compiler.is_exporting() and (torch.compiler.is_compiling() or self._ran_frozen != runs_frozen):
            self._ran_frozen = runs_frozen
        if context is None:
            return None
        check_operands(x, weight, self.in_features)
        call = self._call(context)
        fprop_hp, dgrad_hp, wgrad_hp = call.hp
        rowwise, columnwise = not fprop_hp, graph and x.requires_grad and not dgrad_hp
        input_columnwise = graph and weight.requires_grad and not wgrad_hp
        observed = call.observing and graph and (x.requires_grad or weight.requires_grad)
        if call.rule is not None and (columnwise or input_columnwise or observed):
            expect_backward(call.states["weight"].amax_history, call.rule, call.held)
        first = context.is_first_microbatch if first is None else first
        weight_q = self._quantized_weight(weight, call, first, rowwise, columnwise)
        return LinearPlan(call, rowwise, input_columnwise, weight_q)

    def _quantized_weight(
        self, weight: Tensor, call: LinearCall, first: bool | None, rowwise: bool, columnwise: bool
    ) -> Operand:
        with torch.no_grad():
            # FSDP2 keeps what it has gathered itself
            if first is None or hasattr(weight, "received_quantized"):
                return call.cast("weight", weight, rowwise, columnwise)

            def suits(operand: Operand) -> bool:
                return not (rowwise and operand.rowwise is None) and not (columnwise and operand.columnwise is None)

            return self._retained_weight.get(
                weight, call.recipe, first, lambda: call.cast("weight", weight, rowwise, columnwise), suits
            )

    def _call(self, context: Frame) -> LinearCall:
        recipe = context.recipe
        rules, recording = delayed(recipe), torch.is_grad_enabled() or context.calibrating
        hp = recipe.override_linear_precision if context.enabled else (True, True, True)
        if rules is not None and context.rule is not None:
            prepare(self, context.rule, context.held, rules.amax_history_len, recording or hp[0])
        return LinearCall(
            module=self.key,
            recipe=recipe,
            rule=context.rule,
            held=context.held,
            states={} if rules is None else self.scaling,
            hp=hp,
            recording=recording,
            observer=None if torch.compiler.is_compiling() else self.observer,
            observing=context.calibrating,
        )

    def _quantized(
        self, edge: Tensor, values: Callable[[], Tensor], fused: Fused | None, plan: LinearPlan, own: Parameters
    ) -> Tensor:
        x, x_q = self._input(edge, values, fused, plan)
        args = (x, own.weight, own.bias, plan.call, x_q, plan.weight)
        return cast(Tensor, _Matmul.apply(*args))  # type: ignore[no-untyped-call]

    def _input(
        self, edge: Tensor, values: Callable[[], Tensor], fused: Fused | None, plan: LinearPlan
    ) -> tuple[Tensor, Operand]:
        """The input as a matrix in the autograd graph, and quantized."""
        quantized_only = fused is not None and plan.reads_quantized_only
        x = edge if quantized_only else values()
        if x.dim() != 2 or x.shape[1] != self.in_features:
            x = x.reshape(math.prod(x.shape[:-1]), self.in_features)  # not -1, which is ambiguous for no features
        with torch.no_grad():
            if fused is not None and quantized_only:
                return x, plan.call.cast_fused(fused, values, plan.input_columnwise)
            return x, plan.call.cast("input", x, plan.input_rowwise, plan.input_columnwise)
