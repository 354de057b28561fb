"""Delayed scaling: the state of one quantized tensor, and the update of many states together (docs/numerics.md).

    index            0        1      ...     N-1
    amax_history   staging  oldest   ...   newest

Quantizing reads `scale` and raises the staging slot; nothing else changes until the step ends. Then `update` turns the
histories of all tensors that ran into new scales and rotates them, in one op for any number of states. The rules of the
update are in the op `delayed_update`; this module adds algorithms given as Python callables and the reduction over a
process group. A state costs 4 N + 20 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fp8serve.fp8.amax_rules import RULES
from fp8serve.fp8.ops.arithmetic import DTYPES, FP8_MAX, floor_to_power_2
from fp8serve.fp8.recipe import AmaxAlgo, DelayedScaling, Recipe

Direction = Literal["forward", "backward"]
FIELDS = ("scale", "amax_history", "nonfinite", "steps")
_delayed_update = torch.ops.fp8serve.delayed_update.default


@dataclass
class ScalingState:
    """The delayed scale of one tensor.

    scale: FP32 [], multiplies to quantize; starts at 1.
    amax_history: FP32 [N]; slot 0 is being filled, 1 is the oldest, N-1 the newest; starts at 0.
    nonfinite: int64 [], how many steps were dropped because their amax was infinite.
    steps: int64 [], how many steps entered the history.

    Training updates them in place, so they are ordinary tensors even if they are set under `torch.inference_mode()`.
    """

    scale: Tensor
    amax_history: Tensor
    nonfinite: Tensor
    steps: Tensor

    def __setattr__(self, name: str, value: Tensor) -> None:
        if value.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                value = value.clone()
        super().__setattr__(name, value)

    @classmethod
    def create(cls, length: int, device: torch.device) -> "ScalingState":
        """A new state: scale 1, a history of `length` zeros."""
        count = torch.zeros((), dtype=torch.int64, device=device)
        scale = torch.ones((), dtype=torch.float32, device=device)
        return cls(scale, torch.zeros(length, dtype=torch.float32, device=device), count, count.clone())

    def resize(self, length: int) -> None:
        """Give the history `length` slots: the staging slot and the newest rows stay, zeros take the oldest places."""
        old = self.amax_history
        if old.shape[0] != length:
            rows = old[1:][max(0, old.shape[0] - length) :]
            self.amax_history = torch.zeros(length, dtype=torch.float32, device=old.device)
            self.amax_history[0] = old[0]
            if rows.numel():
                self.amax_history[-rows.shape[0] :] = rows

    def stage(self, amax: Tensor) -> None:
        """Raise the staging slot to `amax` (FP32 [])."""
        slot = self.amax_history[0]
        slot.copy_(torch.maximum(slot, amax))

    def discard(self) -> None:
        """Forget what was staged, as if the step had not happened."""
        self.amax_history[0] = 0.0

    def move(self, device: torch.device) -> None:
        """Move to a device; the state stays FP32 whatever the module is cast to. A state on "meta" has no numbers and
        begins anew."""
        state = ScalingState.create(len(self.amax_history), device) if self.scale.is_meta else self
        for name in FIELDS:
            setattr(self, name, getattr(state, name).to(device))


class Order(IntEnum):
    """The two orders of a session's positions."""

    CREATED = 0
    COPIED = 1


class Position(NamedTuple):
    """Where a module stands in its session: in which order, and at which number."""

    order: Order
    number: int


@runtime_checkable
class Scaled(Protocol):
    """A module that owns delayed states, by tensor name, such as "input", "weight" and "grad_output" of a Linear."""

    key: int  # stands for the module in graphs (session.py)
    session: Any  # the Session that it is in (session.py)
    position: Position
    tensors: ClassVar[dict[Direction, tuple[str, ...]]]  # which are staged in which pass
    scaling: dict[str, ScalingState]
    is_evaluated: bool  # it has run with the scales that it had, recording nothing

    def prepare(self, length: int) -> None:
        """Create the states, or resize them to this history length."""
        ...


def fp8_max(recipe: Recipe, name: str) -> float:
    """The largest value of the format that the tensor of a role is cast to."""
    return FP8_MAX[DTYPES[recipe.specs.element(name)]]


class Entry(NamedTuple):
    """A state on its way into an update, with the largest value of the format its tensor is cast to."""

    state: ScalingState
    fp8_max: float


def update(entries: Sequence[Entry], recipe: DelayedScaling) -> None:
    """End the step of these states: new scales, rotated histories, in one op per device."""
    by_device: dict[torch.device, list[Entry]] = {}
    for entry in entries:
        by_device.setdefault(entry.state.scale.device, []).append(entry)
    for together in by_device.values():
        _update_together(together, recipe)


def _update_together(entries: list[Entry], recipe: DelayedScaling) -> None:
    algo = _name_in_op(recipe.amax_compute_algo)
    by_op = algo is not None and recipe.scaling_factor_compute_algo is None and not recipe.power_2_scale
    chosen = [] if by_op else [_scale_beside_op(entry, recipe) for entry in entries]
    states = [e.state for e in entries]
    _delayed_update(
        [s.scale for s in states],
        [s.amax_history for s in states],
        [s.nonfinite for s in states],
        [s.steps for s in states],
        [e.fp8_max for e in entries],
        recipe.margin,
        recipe.interval,
        algo or "max",
    )
    for entry, scale in zip(entries, chosen, strict=False):
        entry.state.scale.copy_(scale)


def _name_in_op(algo: AmaxAlgo) -> str | None:
    """The rule's name if the op knows it."""
    return None if callable(algo) or not RULES[algo].in_op else algo


def _scale_beside_op(entry: Entry, recipe: DelayedScaling) -> Tensor:
    """The scale after this step, by functions that the op does not implement; called before the history rotates."""
    state, history = entry.state, entry.state.amax_history
    staged, algo = history[0], recipe.amax_compute_algo
    choose = algo if callable(algo) else RULES[algo].choose
    amax = torch.as_tensor(choose(history.clone()), dtype=torch.float32, device=history.device)
    scale = torch.as_tensor(_formula(amax, entry, recipe), dtype=torch.float32, device=history.device)
    due = (staged > 0) & staged.isfinite() & (state.steps % recipe.interval == 0)
    return torch.where(due & (scale > 0) & scale.isfinite(), scale, state.scale)


def _formula(amax: Tensor, entry: Entry, recipe: DelayedScaling) -> Tensor:
    if recipe.scaling_factor_compute_algo is not None:
        scale: Tensor = recipe.scaling_factor_compute_algo(amax, entry.state.scale.clone(), entry.fp8_max, recipe)
        return scale
    limit = torch.full_like(amax, entry.fp8_max / 2.0**recipe.margin)
    scale = (limit / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = floor_to_power_2(scale) if recipe.power_2_scale else scale
    return torch.where((amax > 0) & amax.isfinite(), scale, 0.0)
