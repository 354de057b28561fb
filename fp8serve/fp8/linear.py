"""Linear: Y = X W^T with its three GEMMs in FP8, and `convert`, which turns any module's nn.Linear into it.

    forward   Y  [M, N] = X  [M, K] W^T     X and W in the forward format (E4M3)
    dgrad     dX [M, K] = dY [M, N] W       dY in the backward format (E5M2 with HYBRID)
    wgrad     dW [N, K] = dY^T X

Every GEMM wants both operands quantized along the dimension it contracts. Under per-tensor scaling one set of codes
serves all, transposed for the backward pass as the device needs it (devices.py). Under row-wise and block scaling an
activation is quantized twice in the forward pass, along K for the forward GEMM and, transposed, along M for wgrad.
Either way a layer keeps one byte per element of X, never X itself (unless wgrad stays in high precision). 128x128
blocks of a weight serve both directions; a row-wise weight is quantized twice.

The delayed states live outside of the module's parameters and buffers: `.to(bfloat16)` must not round them and DDP must
not broadcast them. `state_dict` stores them as plain tensors under the names of a scaling checkpoint
(`P.input.scale`, `P.weight.amax_history`, ...), and a state dict without them still loads.

A weight is quantized once per optimizer step, without being told: its codes are kept while gradients accumulate
(`weight.grad is not None`) and the parameter's version counter and storage are unchanged. The price is one byte per
weight element between two microbatches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8serve.errors import ScalesError
from fp8serve.fp8 import reference
from fp8serve.fp8.autocast import Direction, autocast, current, enroll, prepare, record
from fp8serve.fp8.casting import Codes, Pair, cast_by_content, cast_delayed
from fp8serve.fp8.ops import DTYPES
from fp8serve.fp8.recipe import DelayedScaling, Precisions, Recipe
from fp8serve.fp8.recompute import recall, refuse_reentrant, regions, remember
from fp8serve.fp8.scaling import FIELDS, ScalingState

NAMES = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class Call:
    """What one forward call fixes for its backward pass."""

    module: int  # by key, as `record` wants it
    recipe: Recipe
    rule: int | None  # how delayed states are updated, by id; None for recipes without state
    states: dict[str, ScalingState]  # empty for recipes without state
    hp: Precisions  # which of fprop, dgrad, wgrad run in high precision
    recording: bool  # stage amaxes in the forward pass
    observing: bool  # calibrating: stage the amax of operands that stay in high precision, too

    def cast(self, name: str, x: Tensor, rows: bool, cols: bool) -> Pair:
        """Codes of the named tensor for the directions asked for; its amax is staged if the recipe has states."""
        if not (rows or cols):
            if self.observing:
                self._stage(name, reference.amax(x))
            return Pair(None, None)
        fmt = self.recipe.fp8_format
        dtype = DTYPES[fmt.backward if name == "grad_output" else fmt.forward]
        if self.rule is None:
            pair = cast_by_content(x, dtype, self.recipe, name == "weight", rows, cols)
        else:
            pair, amax = cast_delayed(x, dtype, self.states[name].scale, cols)
            self._stage(name, amax)
        return Pair(pair.rows if rows else None, pair.cols if cols else None)

    def _stage(self, name: str, amax: Tensor) -> None:
        direction: Direction = "backward" if name == "grad_output" else "forward"
        if self.rule is not None and (self.recording or direction == "backward"):
            record(direction, self.states[name].amax_history, amax, self.module, self.rule)


@dataclass(frozen=True)
class Plan:
    """How one forward call runs, and how it runs again if its activations are recomputed."""

    call: Call
    input_rows: bool  # which codes of the input its GEMMs read
    input_cols: bool
    weight_codes: Pair

    def repeated(self) -> "Plan":
        """The plan of the second run: the scale as it is now, nothing recorded."""
        states = {name: replace(s, scale=s.scale.clone()) for name, s in self.call.states.items() if name == "input"}
        return replace(self, call=replace(self.call, states=states, recording=False))


def _mm(a: Codes, b: Codes, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """[M, K] x [N, K] -> [M, N]."""
    return cast(Tensor, torch.ops.fp8serve.scaled_mm(a.q, b.q, a.scale_inv, b.scale_inv, bias, out_dtype))


class _Matmul(torch.autograd.Function):
    """The one autograd function: all recipes, all overrides. x [M, K], weight [N, K] -> [M, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, x_codes: Pair, w_codes: Pair
    ) -> Tensor:
        _, dgrad_hp, wgrad_hp = call.hp
        ctx.call, ctx.dtypes = call, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(
            x if wgrad_hp else None, weight if dgrad_hp else None, *(x_codes.cols or ()), *(w_codes.cols or ())
        )
        ctx.has_cols = (x_codes.cols is not None, w_codes.cols is not None)
        if x_codes.rows is None or w_codes.rows is None:
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return _mm(x_codes.rows, w_codes.rows, bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        (x_dtype, w_dtype, b_dtype), (want_dx, want_dw, want_db) = ctx.dtypes, ctx.needs_input_grad[:3]
        x, weight, *codes = ctx.saved_tensors
        x_cols = Codes(*codes[:2]) if ctx.has_cols[0] else None
        w_cols = Codes(*codes[-2:]) if ctx.has_cols[1] else None
        pair = call.cast("grad_output", dy, want_dx and not call.hp[1], want_dw and not call.hp[2])
        dx = _gradient(want_dx, pair.rows, w_cols, lambda: dy @ weight.to(dy.dtype), x_dtype)
        dw = _gradient(want_dw, pair.cols, x_cols, lambda: dy.t() @ x.to(dy.dtype), w_dtype)
        db = dy.float().sum(0).to(b_dtype) if want_db else None
        return dx, dw, db, None, None, None


def _gradient(
    wanted: bool, a: Codes | None, b: Codes | None, in_high_precision: Callable[[], Tensor], dtype: torch.dtype
) -> Tensor | None:
    if not wanted:
        return None
    return in_high_precision().to(dtype) if a is None or b is None else _mm(a, b, None, dtype)


class _WeightCodes:
    """The codes of a weight, kept while gradients accumulate. Not copied with the module."""

    def __init__(self) -> None:
        self.key: tuple[Any, ...] = ()
        self.pair = Pair(None, None)

    def __deepcopy__(self, memo: Any) -> "_WeightCodes":
        return _WeightCodes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _WeightCodes, ()

    def get(self, weight: Tensor, recipe: Recipe, rows: bool, cols: bool, make: Callable[[], Pair]) -> Pair:
        if torch.compiler.is_compiling():  # a graph cannot ask whether the weight has changed
            return make()
        key = (weight._version, weight.data_ptr(), recipe)
        usable = key == self.key and (self.pair.rows or not rows) and (self.pair.cols or not cols)
        if weight.grad is None or not usable:
            self.key, self.pair = key, make()
        return self.pair


class Linear(nn.Linear):
    """nn.Linear [..., in_features] -> [..., out_features] that runs in FP8 inside `autocast`, else in high precision.

    The output has the dtype of the input (of torch.autocast, where that is active); the weight may have another, such
    as FP32 master weights under BF16 activations, and its gradient has the weight's.
    """

    key: int
    scaling: dict[str, ScalingState]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._begin()

    def _begin(self) -> None:
        self.key = enroll(self)
        self.scaling = {}
        self._weight_codes = _WeightCodes()
        self._ran_frozen = False  # the last call ran in FP8 without gradients

    @classmethod
    def adopt(cls, linear: nn.Linear) -> "Linear":
        """Turn an nn.Linear into a Linear in place: same object, parameters, hooks and flags."""
        linear.__class__ = cls
        adopted = cast(Linear, linear)
        adopted._begin()
        return adopted

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy is a module of its own: own place, own states
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.key = enroll(self)

    def prepare(self, length: int) -> None:
        """Create the delayed states, or resize them to this history length (the newest rows stay)."""
        for name in NAMES:
            if name not in self.scaling:
                self.scaling[name] = ScalingState.create(length, self.weight.device)
            self.scaling[name].resize(length)

    def delayed_states(self, recipe: DelayedScaling) -> dict[str, ScalingState]:
        """The states by tensor name, as this recipe wants them."""
        self.prepare(recipe.amax_history_len)
        return self.scaling

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        running = regions()
        again, plan = recall(running, self.key)
        if not again:
            plan = self._plan(x)
            remember(running, self.key, plan and plan.repeated() if running else None)
        if plan is None:
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return self._quantized(x.reshape(-1, self.in_features), plan).view(*x.shape[:-1], self.out_features)

    def _plan(self, x: Tensor) -> Plan | None:
        """How this call runs: the recipe in force and the codes of the weight. None: in high precision."""
        context, graph = current(), torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            if context is None:
                refuse_reentrant(self._ran_frozen)
            if self._ran_frozen != (context is not None and not graph):  # setting a module's attribute is slow
                self._ran_frozen = not self._ran_frozen
        if context is None:
            return None
        call = self._call(context)
        fprop_hp, dgrad_hp, wgrad_hp = call.hp
        rows, cols = not fprop_hp, graph and x.requires_grad and not dgrad_hp
        with torch.no_grad():
            weight_codes = self._weight_codes.get(
                self.weight, call.recipe, rows, cols, lambda: call.cast("weight", self.weight, rows, cols)
            )
        return Plan(call, rows, graph and self.weight.requires_grad and not wgrad_hp, weight_codes)

    def _call(self, context: autocast) -> Call:
        recipe = context.recipe
        if isinstance(recipe, DelayedScaling):
            prepare(self.key, recipe.amax_history_len)
        return Call(
            module=self.key,
            recipe=recipe,
            rule=context.rule,
            states=self.scaling if isinstance(recipe, DelayedScaling) else {},
            hp=recipe.override_linear_precision if context.enabled else (True, True, True),
            recording=torch.is_grad_enabled() or context.calibrating,
            observing=context.calibrating,
        )

    def _quantized(self, x: Tensor, plan: Plan) -> Tensor:
        with torch.no_grad():
            x_codes = plan.call.cast("input", x, plan.input_rows, plan.input_cols)
        args = (x, self.weight, self.bias, plan.call, x_codes, plan.weight_codes)
        return cast(Tensor, _Matmul.apply(*args))  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Linear":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for state in self.scaling.values():  # follow the weight to its device, but stay FP32
            state.move(self.weight.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, state in self.scaling.items():
            for field in FIELDS:
                destination[f"{prefix}{name}.{field}"] = getattr(state, field)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in NAMES:
            found = {field: state_dict.pop(f"{prefix}{name}.{field}", None) for field in FIELDS}
            if any(value is not None for value in found.values()):
                self.scaling[name] = _restored(found, f"{prefix}{name}", self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _restored(found: dict[str, Tensor | None], name: str, device: torch.device) -> ScalingState:
    """A state from a state dict; counters that a scaling checkpoint does not carry start at 0."""
    scale, history = found["scale"], found["amax_history"]
    if scale is None or history is None:
        raise ScalesError(f"The state dict holds a part of {name} only; it needs {name}.scale and {name}.amax_history.")
    zero = torch.zeros((), dtype=torch.int64)
    counters = [zero if found[field] is None else found[field] for field in ("nonfinite", "steps")]
    with torch.no_grad():
        return ScalingState(*(cast(Tensor, t).detach().to(device).clone() for t in (scale, history, *counters)))


def _skipped(name: str, skip: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) or name.rpartition(".")[2] == pattern for pattern in skip)


def _plain_linears(module: nn.Module, skip: tuple[str, ...]) -> Iterator[nn.Linear]:
    for name, child in module.named_modules():
        if type(child) is nn.Linear and not _skipped(name, skip):
            yield child


def convert(module: nn.Module, skip: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """Turn every nn.Linear inside `module` into a `Linear`, in place: parameters, hooks and names stay; returns module.

    `skip` holds last name components ("lm_head"), full names, or patterns ("model.layers.0.*"). Subclasses of nn.Linear
    are left alone, because they promise something of their own.
    """
    for linear in list(_plain_linears(module, (skip,) if isinstance(skip, str) else tuple(skip))):
        Linear.adopt(linear)
    return module


def scaling_state(linear: Linear) -> dict[str, ScalingState]:
    """The delayed states of a Linear by name ("input", "weight", "grad_output"); empty before its first delayed run."""
    return dict(linear.scaling)
