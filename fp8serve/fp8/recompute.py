"""Activation recomputation: the second forward pass uses what the first one recorded.

`torch.utils.checkpoint(..., use_reentrant=False)` drops the activations of a region and, in the backward pass, runs the
region again. By then the autocast context has ended and the scales have moved on; without further care the second run
would compute different values from the first, and the gradients would be wrong. So every call of a layer inside such a
region is logged with the recipe, the input's scale and the quantized weight (which the layer keeps anyway). The second
run replays the log in order, and stages no amax.

The log belongs to the region's frame, which torch keeps exactly as long as its graph. torch has no public name for it:
we find it in the closure of the saved-tensor hooks that are in force. If that ever changes, the error is not silent:
the second run would save other tensors than the first, which torch refuses. The reentrant variant hides its first run
under no_grad and cannot be followed; a layer that notices it refuses.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch

from fp8serve.fp8.torch_private import (
    backward_pass,
    constant_in_graphs,
    is_checkpoint_frame,
    saved_tensor_hooks,
    saves_with_hooks,
)


@dataclass(frozen=True)
class Region:
    """A checkpointed region that is running: its frame, and for a second run the hook that is new in every run."""

    frame: Any
    second_run: Callable[..., Any] | None


_LOGS: WeakKeyDictionary[Any, list[tuple[int, Any]]] = WeakKeyDictionary()
_POSITIONS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _region(hook: Callable[..., Any]) -> Region | None:
    """The region whose pack hook this is; None for any other hook."""
    inner = inspect.unwrap(hook)
    for cell in inner.__closure__ or ():
        content = cell.cell_contents
        frame = content() if isinstance(content, ref) else content
        if is_checkpoint_frame(frame):
            return Region(frame, hook if inner.__qualname__.startswith("_recomputation_hook") else None)
    return None


def regions() -> list[Region]:
    """The checkpointed regions that are running, innermost first; cheap where there is none."""
    if torch.compiler.is_compiling() or not saves_with_hooks():
        return []
    return [region for pack, _ in saved_tensor_hooks() if (region := _region(pack)) is not None]


class Repeatable(Protocol):
    """How a call runs."""

    def repeated(self) -> Self:
        """How the same call runs a second time."""


P = TypeVar("P", bound=Repeatable)


def planned(layer: int, make: Callable[[], P | None]) -> P | None:
    """How this call of a layer (by key) runs: as `make` says, or in a second run like the first run's call."""
    running = regions()
    if not running:
        return make()
    again, plan = recall(running, layer)
    if not again:
        plan = make()
        remember(running, layer, plan and plan.repeated())
    return cast("P | None", plan)


def remember(running: list[Region], layer: int, memory: Any) -> None:
    """Log a call of a layer (by key) for the second run of every region that is in its first."""
    for region in running:
        if region.second_run is None:
            _LOGS.setdefault(region.frame, []).append((layer, memory))


def recall(running: list[Region], layer: int) -> tuple[bool, Any]:
    """In a second run: (True, what the first run logged for this call); else (False, None)."""
    region = next((r for r in running if r.second_run is not None), None)
    if region is None:
        return False, None
    position = _POSITIONS.get(region.second_run, 0)
    _POSITIONS[region.second_run] = position + 1
    log = _LOGS.get(region.frame, [])
    if position >= len(log) or log[position][0] != layer:
        raise RuntimeError(
            "A checkpointed region ran its layers in another order the second time; it must be repeatable."
        )
    return True, log[position][1]


@constant_in_graphs
def refuse_reentrant(ran_frozen: bool) -> None:
    """Raise if a layer that last ran in FP8 without gradients is now asked for them, inside a backward pass.

    torch.compile asks while it traces.
    """
    if ran_frozen and backward_pass() is not None:
        raise RuntimeError(
            "A checkpointed region cannot be recomputed with its FP8 scales in the reentrant variant;"
            " call torch.utils.checkpoint.checkpoint with use_reentrant=False."
        )
