"""Modules with delayed scaling states: where the states are, how they move between devices, and how they are stored.

States are neither parameters nor buffers, because `.to(bfloat16)` must not round them and DDP must not broadcast them.
`state_dict` stores them as plain tensors under the names of a scaling checkpoint (`P.input.scale`,
`P.weight.amax_history`, ...). A state dict without them can be loaded.

torch.distributed.checkpoint (`get_model_state_dict`, `set_model_state_dict`) looks up every key of a state dict in the
model. For it alone, `named_buffers(recurse=False)` lists the states, and `_fqn_modifiers` names the attribute through
which it finds the tensor of a key. Other callers must not see the states. For example, accelerate's offloading looks up
every listed buffer as an attribute of the module, and would fail. Its loader with a device map fails at the keys of
states for the same reason: it takes "P.weight.scale" for an attribute of a parameter. docs/training.md names functions
to use instead.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fp8serve.errors import ScalesError
from fp8serve.fp8.recipe import DelayedScaling, Recipe, as_delayed
from fp8serve.fp8.scaling import FIELDS, Direction, Position, ScalingState
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.fp8.session import MODULES, Session, common_session
from fp8serve.fp8.spec import LINEAR_TENSORS

CHECKPOINT_MODULE = "torch.distributed.checkpoint.state_dict"  # may see states among the buffers


class Stateful(nn.Module):
    """A module with one delayed state per name in `tensors`, created when a delayed recipe first runs it."""

    tensors: ClassVar[dict[Direction, tuple[str, ...]]]  # the names of the tensors that each pass quantizes
    key: int  # the module's id in `session.MODULES`
    key_tensor: Tensor  # the same, int64 [] on the CPU, as an input of compiled graphs
    session: Session  # which contains the module
    position: Position  # in the session
    scaling: dict[str, ScalingState]  # by tensor name: "input", "weight" and "grad_output" of a Linear
    shared_states: tuple[str, ...] = ()  # the names of states that other modules may hold, too (shared_input.py)
    is_evaluated: bool  # whether the module has run without recording amaxes

    def _init_states(self) -> None:
        self._set_key()
        self.session = common_session()
        self.position = self.session.add_module(self)
        self.scaling = {}
        self.shared_states = ()
        self.is_evaluated = False

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy has its own position and its own states
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_key()
        self.position = self.session.add_copy(self)
        self.is_evaluated = False

    def _set_key(self) -> None:
        self.key = MODULES.add(self)
        self.key_tensor = torch.tensor(self.key, device="cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies the module like any other; torch's copy of a parametrized module would not call `__setstate__`."""
        memo[id(self)] = copy = self.__new__(type(self))
        copy.__setstate__(deepcopy(self.__dict__, memo))
        return copy

    def state_device(self) -> torch.device:
        """Returns the device on which the states must be."""
        raise NotImplementedError

    def state_names(self) -> tuple[str, ...]:
        return self.tensors["forward"] + self.tensors["backward"]

    def prepare(self, length: int) -> None:
        """Creates the delayed states, or resizes their histories to `length`, and moves them to the module's device."""
        device = self.state_device()  # accelerate moves parameters without `_apply`, which would move the states
        for name in self.state_names():
            if name not in self.scaling:  # two threads may run the module for the first time at once
                self.scaling.setdefault(name, ScalingState.create(length, device))
            state = self.scaling[name]
            if state.scale.device != device and device.type != "meta":
                state.move(device)
            state.resize(length)

    def separate_states(self) -> None:
        """Replaces the states that the module shares with others by copies of its own."""
        if self.shared_states:
            self.scaling |= {name: self.scaling[name].copy() for name in self.shared_states}
            self.shared_states = ()

    def delayed_states(self, recipe: DelayedScaling) -> dict[str, ScalingState]:
        """Returns the module's own states by tensor name, with the recipe's history length."""
        self.separate_states()
        self.prepare(recipe.amax_history_len)
        return self.scaling

    @property
    def states_by_name(self) -> SimpleNamespace:
        """The states as attributes of one object; None for a state that does not exist yet."""
        self.separate_states()
        return SimpleNamespace(**{name: self.scaling.get(name) for name in self.state_names()})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint to look up states in `states_by_name`."""
        return dict.fromkeys(self.state_names(), "states_by_name")

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers, and for torch.distributed.checkpoint with `recurse=False` the tensors of the states."""
        buffers = super().named_buffers(prefix, recurse, remove_duplicate)
        if recurse or sys._getframe(1).f_globals.get("__name__") != CHECKPOINT_MODULE:
            return buffers
        self.separate_states()
        prefix = f"{prefix}." if prefix else ""
        states = ((f"{prefix}{n}.{f}", getattr(state, f)) for n, state in self.scaling.items() for f in FIELDS)
        return chain(buffers, states)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.state_device()
        if device.type == "cuda":  # `convert` prepares the device only if the module is already on a GPU
            prepare_device(device)
        for state in self.scaling.values():  # states move with the module but stay FP32
            state.move(device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.separate_states()
        for name, state in self.scaling.items():
            for field in FIELDS:
                destination[f"{prefix}{name}.{field}"] = getattr(state, field)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        tensors = {n: {f: state_dict.pop(f"{prefix}{n}.{f}", None) for f in FIELDS} for n in self.state_names()}
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, fields in tensors.items():  # after the parameters, which assign=True may bring to another device
            if any(value is not None for value in fields.values()):
                self.scaling[name] = state_from_tensors(fields, f"{prefix}{name}", self.state_device())


def prepare_states(model: nn.Module, recipe: Recipe) -> None:
    """Creates the scaling states of every FP8 layer of `model`, as the first step under `recipe` would.

    Call this before `torch.distributed.checkpoint.load`, which loads only tensors that the state dict of the model has:
    a model that has never run has no states. Does nothing for a recipe without states.
    """
    if (delayed := as_delayed(recipe)) is not None:
        for module in (m for m in model.modules() if isinstance(m, Stateful)):
            module.prepare(delayed.amax_history_len)


def scaling_state(module: nn.Module) -> dict[str, ScalingState]:
    """Returns the scaling states of an FP8 layer by tensor name: "input", "weight" and "grad_output" of a Linear.

    The result is empty before the layer first runs under delayed scaling, and valid until the layer runs again. Raises
    TypeError for a module that has no states of its own, such as a whole model.
    """
    if not isinstance(module, Stateful):
        raise TypeError(
            f"A {type(module).__name__} has no scaling state of its own; ask an fp8serve.Linear or DotProductAttention "
            "inside of it, after `convert`."
        )
    module.separate_states()
    return dict(module.scaling)


def state_key(name: str) -> tuple[str, str] | None:
    """Splits a key of a state dict, "P.input.scale", into ("P.input", "scale"). Returns None for other keys."""
    tensor, _, field = name.rpartition(".")
    is_state = field in FIELDS and tensor.rpartition(".")[2] in LINEAR_TENSORS
    return (tensor, field) if is_state else None


def state_from_tensors(tensors: Mapping[str, Tensor | None], name: str, device: torch.device) -> ScalingState:
    """Creates a state on `device` from the tensors of a state dict, in FP32. Missing counters start at 0.

    If `device` is "meta", the tensors stay where they are: an offloaded layer has its parameters on "meta", but its
    states are not replaced when it runs. Raises ScalesError if the scale or the history is missing or invalid.
    """
    scale, history = tensors.get("scale"), tensors.get("amax_history")
    if scale is None or history is None:
        raise ScalesError(f"The state dict holds a part of {name} only; it needs {name}.scale and {name}.amax_history.")
    if scale.numel() != 1 or history.dim() != 1 or len(history) == 0:
        raise ScalesError(
            f"{name}.scale must be one number and {name}.amax_history a list of at least one; "
            f"found shapes {list(scale.shape)} and {list(history.shape)}."
        )
    if not scale.is_meta and not 0 < float(scale) < math.inf:  # NaN fails both
        raise ScalesError(f"{name}.scale must be positive and finite, found {float(scale)}.")
    if not history.is_meta and not (history >= 0).all():
        raise ScalesError(f"{name}.amax_history holds NaN or negative numbers, which no tensor's amax can be.")
    zero = torch.zeros((), dtype=torch.int64)
    counters = [zero if (value := tensors.get(field)) is None else value.long() for field in ("nonfinite", "steps")]
    with torch.no_grad():
        values = (scale.reshape(()).float(), history.float(), *counters)
        return ScalingState(*(t.detach().to(t.device if device.type == "meta" else device).clone() for t in values))
