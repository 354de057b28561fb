"""The context that says which recipe is in force, and what is updated when it ends.

    with autocast(recipe=DelayedScaling()):     # outermost: begins a step
        model(x)                                # every Linear that records an amax registers with the step
                                                # exit: all registered forward states are updated in one op

Contexts nest, the innermost wins, each thread has its own stack. The settings of one entry are in a `Frame` until its
exit, so one `autocast` object may be entered again, and by several threads at once, as a decorator is. Only the end of
the *outermost* context updates, and only with gradients enabled; an exception inside, or in a backward pass, discards
what was staged, so that a failed step leaves no trace. The backward pass runs outside of any context: every forward
call has recorded what its backward pass needs. The gradients' states are updated when the running backward pass ends.
We ask the autograd engine for that moment (`queue_callback`) rather than attach it to the first module, because a
frozen first module has no backward at all.

torch.compile of a function that enters a context itself, as a decorated `model.forward` does, compiles what is inside.
Entry and exit are left to Python (`keep_compiler_out`): graphs of them would bake in which step was running.

The process group is the default one unless the caller names another or sets `reduce_amax=False`; it is looked up when a
context is entered, because a decorator is often made before the process group.
"""

import sys
import threading
import warnings
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from fp8serve.errors import RecipeError, shown
from fp8serve.fp8.distributed import default_group
from fp8serve.fp8.microbatch import checked
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed, trains
from fp8serve.fp8.session import Rule, Session, common
from fp8serve.fp8.steps import Step
from fp8serve.fp8.torch_private import keep_compiler_out


@dataclass(frozen=True, eq=False)
class Frame:
    """One entry into a context: the settings in force until its exit."""

    context: "autocast"
    recipe: Recipe
    enabled: bool
    calibrating: bool
    is_first_microbatch: bool | None
    group: Any = None
    rule: int | None = None  # how delayed states are updated, by number; None for recipes without state
    held: Rule | None = None  # that rule itself, which exists as long as somebody holds it


class _Local(threading.local):
    """Per thread: the stack of open contexts and the step of the outermost."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.step = Step("forward")


_LOCAL = _Local()


class autocast(ContextDecorator):  # noqa: N801 - reads like torch.autocast
    """Run every `fp8serve.Linear` inside in FP8 by `recipe` (default `DelayedScaling()`).

    enabled=False makes an island of high precision. With `calibrating=True` amaxes are recorded, also without
    gradients, and the states are updated at the end; together with enabled=False the maths stays in high precision.
    `amax_reduction_group`: the process group over which delayed amaxes are reduced with MAX, in every context that ends
    with gradients enabled. None: the default group, if one is initialised. A recipe with `reduce_amax=False` reduces
    over none. `session`: the session whose modules are reduced; None: the common session, of all modules whose model
    owns no session (session.py). `is_first_microbatch`, for gradient accumulation: True keeps the quantized weights,
    False uses those of the last True, None quantizes the weights (microbatch.py); the innermost context decides. Raises
    RecipeError if calibrating=True comes with a recipe that has no history, or if contexts are not left in the reverse
    order of their entry.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        recipe: Recipe | None = None,
        calibrating: bool = False,
        amax_reduction_group: Any = None,
        session: Session | None = None,
        is_first_microbatch: bool | None = None,
    ) -> None:
        self.enabled = enabled
        self.recipe: Recipe = DelayedScaling() if recipe is None else recipe
        self.calibrating = calibrating
        self.amax_reduction_group = amax_reduction_group
        self.session = common() if session is None else session
        self.is_first_microbatch = checked(is_first_microbatch)
        if not isinstance(self.recipe, Recipe):
            raise RecipeError(
                f"recipe must be DelayedScaling, Float8CurrentScaling or Float8BlockScaling, found {recipe!r}."
            )
        if not trains(self.recipe):
            raise RecipeError(f"{type(self.recipe).__name__} is a recipe to serve with; train with another.")
        if not isinstance(self.session, Session):
            raise RecipeError(f"session must be a Session, such as Session.of(model), found {shown(session)}.")
        if calibrating and delayed(self.recipe) is None:
            kind = type(self.recipe).__name__
            raise RecipeError(f"calibrating records amax histories, and {kind} has none; use DelayedScaling.")

    @keep_compiler_out
    def __enter__(self) -> "autocast":
        frame = self._frame()
        _LOCAL.stack.append(frame)
        if frame.held is not None and frame.held.shared and (self.enabled or self.calibrating):
            _LOCAL.step.open(frame.held)
        return self

    def _frame(self) -> Frame:
        settings = self, self.recipe, self.enabled, self.calibrating, self.is_first_microbatch
        if (recipe := delayed(self.recipe)) is None:
            return Frame(*settings)
        group = default_group() if self.amax_reduction_group is None else self.amax_reduction_group
        return Frame(*settings, group, *self.session.rule(recipe, group))

    @keep_compiler_out
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        in_order = _leave(self)
        if not in_order:
            _LOCAL.step.discard()
        if not _LOCAL.stack:
            _end_step(failed=kind is not None, recording=torch.is_grad_enabled() or self.calibrating)
        if not in_order:
            raise RecipeError(
                "This autocast was left before one that was entered after it, or was not entered in this thread; what "
                "ran is not recorded. Leave contexts in the reverse order of their entry, best by `with`."
            )


def _leave(context: autocast) -> bool:
    """Take the innermost frame of a context off the stack; returns whether it was the innermost of all."""
    stack = _LOCAL.stack
    at = next((i for i in reversed(range(len(stack))) if stack[i].context is context), None)
    if at is None:
        return False
    del stack[at]
    return at == len(stack)


def _end_step(failed: bool, recording: bool) -> None:
    """Update what the outermost context staged, or forget it."""
    ended, _LOCAL.step = _LOCAL.step, Step("forward")
    ended.watch.close()
    if failed:
        ended.discard()
        for module in ended.without_history:  # announced when an evaluation succeeds
            module.is_evaluated = False
        return
    if recording:
        with torch.no_grad():
            ended.finish()
    # Last, because a warning may be an error, which must not leave a step half done.
    if count := len(ended.without_history):
        warnings.warn(
            f"{count} FP8 layer{'s were' if count > 1 else ' was'} evaluated under delayed scaling with scale 1, for "
            "want of an amax history: small values became zero. Train or calibrate the model first, load the scaling "
            "states of the trained one (they are in its state_dict, not among its parameters), or use another recipe.",
            stacklevel=_levels_to_caller(),
        )


def _levels_to_caller() -> int:
    """The stacklevel of a warning of the function that calls this one, for the line outside of this module and of the
    two of contexts, through which a decorator leaves its context."""
    inside, frame, level = {__name__, "contextlib", "torch.utils._contextlib"}, sys._getframe(1), 1
    while frame.f_globals.get("__name__") in inside and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def entered() -> bool:
    """Whether this thread is inside any context."""
    return bool(_LOCAL.stack)


def current() -> Frame | None:
    """The innermost context of this thread if it changes how a Linear runs, else None."""
    frame = _LOCAL.stack[-1] if _LOCAL.stack else None
    return frame if frame is not None and (frame.enabled or frame.calibrating) else None


def step() -> Step:
    """What the running outermost context has staged; another object in every step."""
    return _LOCAL.step
