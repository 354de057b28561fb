"""Modules that own delayed states: where the states live, how they move, and how they are stored.

They live outside of parameters and buffers: `.to(bfloat16)` must not round them and DDP must not broadcast them.
`state_dict` stores them as plain tensors under the names of a scaling checkpoint (`P.input.scale`,
`P.weight.amax_history`, ...), and a state dict without them still loads.

torch.distributed.checkpoint (`get_model_state_dict`, `set_model_state_dict`, and who calls them) looks every key of a
state dict up in the model. For it alone, `named_buffers(recurse=False)` lists the states, and `_fqn_modifiers` says by
which attribute a key is followed. Other callers do not see them: accelerate's offloading, for example, would look up
what is listed as an attribute of the module and fail. For the same reason its loader with a map of devices stops at
their keys: "P.weight.scale" would be an attribute of a parameter (docs/training.md says what to call).
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
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed
from fp8serve.fp8.scaling import FIELDS, Direction, Position, ScalingState
from fp8serve.fp8.selfcheck import prepare_device
from fp8serve.fp8.session import MODULES, Session, common

CHECKPOINTING = "torch.distributed.checkpoint.state_dict"  # the module that lists a model's tensors


class Stateful(nn.Module):
    """A module with one delayed state per name in `tensors`, created when a delayed recipe first runs it."""

    tensors: ClassVar[dict[Direction, tuple[str, ...]]]  # which are staged in which pass
    key: int  # its number in this process, for graphs
    session: Session
    position: Position  # in the session
    scaling: dict[str, ScalingState]
    is_evaluated: bool

    def _begin(self) -> None:
        self.key = MODULES.add(self)
        self.session = common()
        self.position = self.session.enroll(self)
        self.scaling = {}
        self.is_evaluated = False

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy has its own position and its own states
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.key = MODULES.add(self)
        self.position = self.session.copied(self)
        self.is_evaluated = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As any module is copied; torch's own copy of a parametrized module would leave out `__setstate__`."""
        memo[id(self)] = copied = self.__new__(type(self))
        copied.__setstate__(deepcopy(self.__dict__, memo))
        return copied

    def state_device(self) -> torch.device:
        """The device on which the states have to be."""
        raise NotImplementedError

    def state_names(self) -> tuple[str, ...]:
        """The names of all states."""
        return self.tensors["forward"] + self.tensors["backward"]

    def prepare(self, length: int) -> None:
        """Create the delayed states, or resize them to this history length (the newest rows stay). They follow a module
        whose parameters were moved one by one, as accelerate does, without `_apply`."""
        device = self.state_device()
        for name in self.state_names():
            if name not in self.scaling:  # two threads may run the module for the first time at once
                self.scaling.setdefault(name, ScalingState.create(length, device))
            state = self.scaling[name]
            if state.scale.device != device and device.type != "meta":
                state.move(device)
            state.resize(length)

    def delayed_states(self, recipe: DelayedScaling) -> dict[str, ScalingState]:
        """The states by tensor name, as this recipe wants them."""
        self.prepare(recipe.amax_history_len)
        return self.scaling

    @property
    def states_by_name(self) -> SimpleNamespace:
        """What a key of the state dict is followed through; None for a state that does not exist yet."""
        return SimpleNamespace(**{name: self.scaling.get(name) for name in self.state_names()})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Read by torch.distributed.checkpoint: the attribute that holds what a key names."""
        return dict.fromkeys(self.state_names(), "states_by_name")

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As any module's; if torch.distributed.checkpoint calls with `recurse=False`, followed by the parts of the
        states, as a state dict has them."""
        buffers = super().named_buffers(prefix, recurse, remove_duplicate)
        if recurse or sys._getframe(1).f_globals.get("__name__") != CHECKPOINTING:
            return buffers
        start = f"{prefix}." if prefix else ""
        states = ((f"{start}{n}.{f}", getattr(state, f)) for n, state in self.scaling.items() for f in FIELDS)
        return chain(buffers, states)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.state_device()
        if device.type == "cuda":  # a module may come to a GPU after `convert` has looked where it lies
            prepare_device(device)
        for state in self.scaling.values():  # follow the module to its device, but stay FP32
            state.move(device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, state in self.scaling.items():
            for field in FIELDS:
                destination[f"{prefix}{name}.{field}"] = getattr(state, field)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        tensors = {n: {f: state_dict.pop(f"{prefix}{n}.{f}", None) for f in FIELDS} for n in self.state_names()}
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, fields in tensors.items():  # after the parameters, which assign=True may bring to another device
            if any(value is not None for value in fields.values()):
                self.scaling[name] = restored(fields, f"{prefix}{name}", self.state_device())


def prepare_states(model: nn.Module, recipe: Recipe) -> None:
    """Create the states of every FP8 layer of `model` that `recipe` will use, as its first step would.

    For code that loads a checkpoint into the tensors of a state dict, such as `torch.distributed.checkpoint.load`: it
    loads what is there, and a model that has never run has no states. Nothing for a recipe without states.
    """
    if (rules := delayed(recipe)) is not None:
        for module in (m for m in model.modules() if isinstance(m, Stateful)):
            module.prepare(rules.amax_history_len)


def scaling_state(module: nn.Module) -> dict[str, ScalingState]:
    """The delayed states of an FP8 layer by name, such as "input", "weight", "grad_output" of a Linear.

    Empty before its first delayed run. TypeError for a module that keeps none, such as a whole model.
    """
    if not isinstance(module, Stateful):
        raise TypeError(
            f"A {type(module).__name__} has no scaling state of its own; ask an fp8serve.Linear or DotProductAttention "
            "inside of it, after `convert`."
        )
    return dict(module.scaling)


def state_key(name: str) -> tuple[str, str] | None:
    """("P.input", "scale") for the state dict's key "P.input.scale"; None for a key that belongs to no state."""
    tensor, _, field = name.rpartition(".")
    is_state = field in FIELDS and tensor.rpartition(".")[2] in ("input", "weight", "grad_output")
    return (tensor, field) if is_state else None


def restored(tensors: Mapping[str, Tensor | None], name: str, device: torch.device) -> ScalingState:
    """A state from a state dict, in FP32 whatever its stored dtype; missing counters start at 0.

    It lies on `device`; on "meta" only if it was there, because the parameters of an offloaded layer are replaced while
    the layer runs, and its states are not.
    ScalesError: a part is missing, or training could not continue with it.
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
