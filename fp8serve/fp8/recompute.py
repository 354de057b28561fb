"""Activation recomputation: the second forward pass of a checkpointed region uses the scales and weights of the first.

`torch.utils.checkpoint(..., use_reentrant=False)` frees the activations of a region and runs the region again in the
backward pass. By then the autocast context has ended and the scales have been updated. A plain second run would compute
other values than the first, and the gradients would be wrong. So every call of a layer inside such a region is logged
with the recipe, the scale of the input and the quantized weight (which autograd saves anyway). The second run replays
the log in order and stages no amax.

The log belongs to torch's frame object of the region, which lives as long as the autograd graph. torch has no public
name for the frame, so we look it up in the closure of the active saved-tensor hooks. If a new version of torch breaks
the lookup, the second run saves other tensors than the first, and torch raises an error. The reentrant variant runs
its first forward pass under no_grad, so its calls cannot be logged; a layer that detects this raises an error.
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
    """A checkpointed region that is running.

    `frame` is torch's object for the region. `second_run` is the pack hook of the second run, a new object in every
    run, or None in the first run.
    """

    frame: Any
    second_run: Callable[..., Any] | None


_LOGS: WeakKeyDictionary[Any, list[tuple[int, Any]]] = WeakKeyDictionary()  # (layer key, plan) of each call, by frame
_POSITIONS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the position in the log, by second run


def _region_of(hook: Callable[..., Any]) -> Region | None:
    """Returns the region that has this pack hook, or None if the hook belongs to no checkpointed region."""
    inner = inspect.unwrap(hook)
    for cell in inner.__closure__ or ():
        content = cell.cell_contents
        frame = content() if isinstance(content, ref) else content
        if is_checkpoint_frame(frame):
            return Region(frame, hook if inner.__qualname__.startswith("_recomputation_hook") else None)
    return None


def running_regions() -> list[Region]:
    """Returns the checkpointed regions that are running, innermost first."""
    if torch.compiler.is_compiling() or not saves_with_hooks():
        return []
    return [region for pack, _ in saved_tensor_hooks() if (region := _region_of(pack)) is not None]


class CallPlan(Protocol):
    """How one call of a layer runs."""

    def for_second_run(self) -> Self:
        """Returns the plan by which a second run repeats this call."""


P = TypeVar("P", bound=CallPlan)


def plan_call(layer_key: int, make_plan: Callable[[], P | None]) -> P | None:
    """Returns the result of `make_plan`, or in a second run the plan that the first run logged for the same call."""
    regions = running_regions()
    if not regions:
        return make_plan()
    is_second_run, plan = _next_logged_plan(regions, layer_key)
    if not is_second_run:
        plan = make_plan()
        logged_plan = plan and plan.for_second_run()
        for region in regions:
            if region.second_run is None:
                _LOGS.setdefault(region.frame, []).append((layer_key, logged_plan))
    return cast("P | None", plan)


def _next_logged_plan(regions: list[Region], layer_key: int) -> tuple[bool, Any]:
    """Returns (True, the logged plan of this call) in a second run, else (False, None)."""
    region = next((r for r in regions if r.second_run is not None), None)
    if region is None:
        return False, None
    position = _POSITIONS.get(region.second_run, 0)
    _POSITIONS[region.second_run] = position + 1
    log = _LOGS.get(region.frame, [])
    if position >= len(log) or log[position][0] != layer_key:
        raise RuntimeError(
            "A checkpointed region ran its layers in another order the second time; it must be repeatable."
        )
    return True, log[position][1]


@constant_in_graphs
def check_not_reentrant(ran_without_gradients: bool) -> None:
    """Raises RuntimeError if a reentrant checkpoint runs a layer a second time.

    That is the case if the layer last ran in FP8 without gradients and runs with gradients inside a backward pass now.
    torch.compile calls this while it traces, not in the graph.
    """
    if ran_without_gradients and backward_pass() is not None:
        raise RuntimeError(
            "A checkpointed region cannot be recomputed with its FP8 scales in the reentrant variant;"
            " call torch.utils.checkpoint.checkpoint with use_reentrant=False."
        )
