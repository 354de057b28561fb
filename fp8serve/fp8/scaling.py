"""Delayed scaling: the scaling state of a tensor, and the update of many states in one op (docs/numerics.md).

    index            0        1      ...     N-1
    amax_history   staging  oldest   ...   newest

Quantizing a tensor reads `scale` and raises the staging slot to the tensor's amax. Nothing else changes until the step
ends. Then `update` computes new scales from the histories of all tensors that ran and rotates the histories. The op
`delayed_update` does this for any number of states; this module adds the algorithms that a recipe gives as Python
callables. A state takes 4 N + 20 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

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
    """The scaling state of one tensor under delayed scaling.

    Training updates the fields in place, so they are ordinary tensors even if set under `torch.inference_mode()`.

    Attributes:
        scale: FP32 [], by which the tensor is multiplied when it is quantized; initially 1.
        amax_history: FP32 [N], initially 0. Slot 0 stages the amax of the running step; slots 1 to N-1 hold the amaxes
            of earlier steps, oldest first.
        nonfinite: int64 [], the number of steps that were dropped because their amax was infinite.
        steps: int64 [], the number of steps that entered the history.
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
        """Returns a new state with scale 1 and a history of `length` zeros."""
        count = torch.zeros((), dtype=torch.int64, device=device)
        scale = torch.ones((), dtype=torch.float32, device=device)
        return cls(scale, torch.zeros(length, dtype=torch.float32, device=device), count, count.clone())

    def copy(self) -> "ScalingState":
        """Returns a state with copies of the tensors."""
        return ScalingState(*(getattr(self, field).clone() for field in FIELDS))

    def resize(self, length: int) -> None:
        """Resizes the history to `length` slots. It keeps the staging slot and the newest amaxes and adds zeros."""
        old = self.amax_history
        if old.shape[0] != length:
            amaxes = old[1:][max(0, old.shape[0] - length) :]
            self.amax_history = torch.zeros(length, dtype=torch.float32, device=old.device)
            self.amax_history[0] = old[0]
            if amaxes.numel():
                self.amax_history[-amaxes.shape[0] :] = amaxes

    def stage(self, amax: Tensor) -> None:
        """Raises the staging slot to `amax` (FP32 [])."""
        slot = self.amax_history[0]
        slot.copy_(torch.maximum(slot, amax))

    def discard(self) -> None:
        """Discards the staged amax, as if the step had not happened."""
        self.amax_history[0] = 0.0

    def move(self, device: torch.device) -> None:
        """Moves the state to a device. A state on "meta" has no values and is replaced by a new one."""
        state = ScalingState.create(len(self.amax_history), device) if self.scale.is_meta else self
        for name in FIELDS:
            setattr(self, name, getattr(state, name).to(device))


class Order(IntEnum):
    """The orders in which a session numbers its modules: by creation, and copies by the time of the copy."""

    CREATED = 0
    COPIED = 1


class Position(NamedTuple):
    """The position of a module in its session: an order and a number in that order."""

    order: Order
    number: int


def fp8_max(recipe: Recipe, name: str) -> float:
    """Returns the largest value of the FP8 format to which the recipe casts the tensor of this name."""
    return FP8_MAX[DTYPES[recipe.specs.element(name)]]


class Entry(NamedTuple):
    """A state to be updated, and the largest value of the FP8 format of its tensor."""

    state: ScalingState
    fp8_max: float


def update(entries: Sequence[Entry], recipe: DelayedScaling) -> None:
    """Computes the new scales of these states and rotates their histories, in one op per device."""
    by_device: dict[torch.device, list[Entry]] = {}
    for entry in entries:
        by_device.setdefault(entry.state.scale.device, []).append(entry)
    for device_entries in by_device.values():
        _update_on_device(device_entries, recipe)


def _update_on_device(entries: list[Entry], recipe: DelayedScaling) -> None:
    algo = _algo_of_op(recipe.amax_compute_algo)
    is_scale_from_op = algo is not None and recipe.scaling_factor_compute_algo is None and not recipe.power_2_scale
    # The op rotates the histories, so scales that it cannot compute are computed first and written last.
    scales = [] if is_scale_from_op else [_scale_outside_op(entry, recipe) for entry in entries]
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
    for entry, scale in zip(entries, scales, strict=False):
        entry.state.scale.copy_(scale)


def _algo_of_op(algo: AmaxAlgo) -> str | None:
    """Returns the name of the algorithm if the op `delayed_update` implements it, else None."""
    return None if callable(algo) or not RULES[algo].in_op else algo


def _scale_outside_op(entry: Entry, recipe: DelayedScaling) -> Tensor:
    """Returns the scale after this step, computed by functions that the op does not implement."""
    state, history = entry.state, entry.state.amax_history
    staged, algo = history[0], recipe.amax_compute_algo
    compute_amax = algo if callable(algo) else RULES[algo].compute_amax
    amax = torch.as_tensor(compute_amax(history.clone()), dtype=torch.float32, device=history.device)
    scale = torch.as_tensor(_scale_from_amax(amax, entry, recipe), dtype=torch.float32, device=history.device)
    is_due = (staged > 0) & staged.isfinite() & (state.steps % recipe.interval == 0)
    return torch.where(is_due & (scale > 0) & scale.isfinite(), scale, state.scale)


def _scale_from_amax(amax: Tensor, entry: Entry, recipe: DelayedScaling) -> Tensor:
    if recipe.scaling_factor_compute_algo is not None:
        scale: Tensor = recipe.scaling_factor_compute_algo(amax, entry.state.scale.clone(), entry.fp8_max, recipe)
        return scale
    limit = torch.full_like(amax, entry.fp8_max / 2.0**recipe.margin)
    scale = (limit / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = floor_to_power_2(scale) if recipe.power_2_scale else scale
    return torch.where((amax > 0) & amax.isfinite(), scale, 0.0)
