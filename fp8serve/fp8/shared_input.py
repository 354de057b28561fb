"""Several linear layers with the same input, such as q, k, v and gate, up: the input is quantized once.

Each layer alone would cast the same values with the same scale, so one cast gives the same bits. Without scaling states
this is so for every recipe. Under delayed scaling the input's states of the layers must be equal. Reading them in every
call would wait for the GPU. So the layers hold one state in common, which is certainly equal. `SharedInput` compares
their states once and then lets the layers share the first one's.

A layer that shares states gets a copy of its own (`Stateful.separate_states`) before it runs alone, and before code
outside of a step reads or writes its states: in `state_dict`, `scaling_state` and when checkpoints are written. The
next common call compares again. States that differ, for example because a checkpoint has different scales for q and k,
stay separate, and the layers cast for themselves. A compiled graph shares what is shared when it is traced; it
is compiled again if the states are separated.

Layers are called one by one if one of them has hooks, which may change the input. The same holds if one is of a
subclass of Linear (tensor-parallel, parametrized, sharded by itself) or of another class (adapters, frozen layers).
"""

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from fp8serve.fp8.autocast import current_frame
from fp8serve.fp8.casting import Operand
from fp8serve.fp8.layer_inputs import cast_by_torch_autocast
from fp8serve.fp8.linear import Linear, LinearCall, ProducedCast
from fp8serve.fp8.recipe import DelayedScaling, as_delayed
from fp8serve.fp8.recompute import running_regions
from fp8serve.fp8.recording import can_read
from fp8serve.fp8.scaling import FIELDS, ScalingState
from fp8serve.fp8.torch_private import has_global_hooks


class SharedInput:
    """Runs the layers that read one input. It must always be called with the same layers, in the same order."""

    def __init__(self) -> None:
        self._unequal_states: list[ScalingState] = []  # the layers' states when they were last found to differ

    def __call__(self, layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
        """Returns layer(x) for each layer, bit-equal to separate calls."""
        frame = current_frame()
        frame = frame if frame is not None and frame.enabled else None
        # The backward pass runs a checkpointed region again, outside of the context.
        if not (frame is not None or running_regions()) or len(layers) == 1 or not are_unhooked(layers):
            return [layer(x) for layer in layers]
        if frame is not None and (delayed := as_delayed(frame.recipe)) is not None:
            self.share_states(layers, delayed)
        shared = SharedCast()
        return [layer.run_shared(cast_by_torch_autocast(x), shared) for layer in layers]

    def prepare(self, layers: Sequence[nn.Module]) -> None:
        """Makes the layers share a state as far as a call would, so that a compiled graph finds it shared."""
        frame = current_frame()
        delayed = as_delayed(frame.recipe) if frame is not None and frame.enabled else None
        if delayed is not None and len(layers) > 1 and are_unhooked(layers):
            self.share_states(layers, delayed)

    def share_states(self, linears: Sequence[Linear], delayed: DelayedScaling) -> None:
        """Makes the layers share the state of their input if their states are equal."""
        if torch.compiler.is_compiling():
            return
        states = [linear.scaling.get("input") for linear in linears]
        if not is_shared(states) and not _are_identical(states, self._unequal_states):
            self._unequal_states = _share_equal_states(linears, delayed.amax_history_len)


class SharedCast:
    """The quantized input of layers that run one after the other. The first layer casts it for all.

    If `produce` is given, it casts the input in both directions and computes it as well (fused.py).
    """

    def __init__(self, produce: ProducedCast | None = None) -> None:
        self.produce = produce
        self._first: LinearCall | None = None
        self._operand = Operand(None, None)

    def cast(
        self,
        call: LinearCall,
        compute: Callable[[], Tensor],
        device: torch.device,
        rowwise: bool,
        columnwise: bool,
    ) -> Operand:
        """Returns what `call.cast("input", ...)` returns for the layers' input, the result of `compute`."""
        if self._first is not None and self._serves(self._first, call, rowwise, columnwise):
            operand = self._operand.only(rowwise, columnwise)
            call.join_cast(compute, operand)
            return operand
        if self.produce is None:
            operand = call.cast("input", compute(), rowwise, columnwise)
        else:
            operand = call.cast_produced(self.produce, compute, device)
        if self._first is None:
            self._first, self._operand = call, operand
        return operand.only(rowwise, columnwise)

    def _serves(self, first: LinearCall, call: LinearCall, rowwise: bool, columnwise: bool) -> bool:
        """Returns whether the first call's operand is what a cast for this call would give."""
        has_rowwise = self._operand.rowwise is not None or not rowwise
        has_columnwise = self._operand.columnwise is not None or not columnwise
        if not ((rowwise or columnwise) and has_rowwise and has_columnwise and call.recipe is first.recipe):
            return False
        if not call.states:
            return True
        # The second run of a checkpointed region has copies of the states, with the histories of the first run.
        has_same_state = call.states["input"].amax_history is first.states["input"].amax_history
        return has_same_state and call.config_id == first.config_id and call.is_recording == first.is_recording


def are_unhooked(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[Linear]]:
    """Returns whether the layers are `Linear`, and run their own `forward` on the input that they are given."""
    return all(map(_is_unhooked, layers)) and not has_global_hooks()


def _is_unhooked(layer: nn.Module) -> bool:
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is Linear and not hooks and "forward" not in vars(layer)


def _share_equal_states(linears: Sequence[Linear], history_len: int) -> list[ScalingState]:
    """Makes the layers share the first one's state if their states are equal. Otherwise returns their states."""
    for linear in linears:
        linear.prepare(history_len)
    states = [linear.scaling["input"] for linear in linears]
    if not can_read(states[0].scale):
        return []
    if not _are_equal(states):
        return states
    for linear in linears:
        linear.scaling["input"], linear.shared_states = states[0], ("input",)
    return []


def is_shared(states: Sequence[ScalingState | None]) -> bool:
    """Returns whether the layers share one state."""
    return states[0] is not None and all(state is states[0] for state in states)


def _are_identical(states: Sequence[ScalingState | None], others: Sequence[ScalingState]) -> bool:
    return len(states) == len(others) and all(a is b for a, b in zip(states, others, strict=True))


def _are_equal(states: Sequence[ScalingState]) -> bool:
    """Compares the values of the states. Waits for the GPU once."""
    if is_shared(states):
        return True
    first, *others = states
    equal = [(getattr(first, field) == getattr(other, field)).all() for other in others for field in FIELDS]
    return bool(torch.stack(equal).all())
