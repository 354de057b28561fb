"""`autocast`, the context in which layers run in FP8 by a recipe, and the update of scaling states at its end.

    with autocast(recipe=DelayedScaling()):     # outermost context: begins a step
        model(x)                                # every Linear that stages an amax is added to the step
                                                # exit: all staged forward states are updated in one op

Contexts nest and the innermost one decides. Each thread has its own stack of contexts. A `Frame` holds the settings of
one entry until its exit, so one `autocast` object may be entered repeatedly and by several threads at once, as a
decorator is. Only the end of the *outermost* context updates states, and only with gradients enabled. An exception in a
context or in a backward pass discards the staged amaxes, so a failed step changes nothing.

The backward pass runs outside of any context, because every forward call records what its backward pass needs. The
states of gradients are updated when the backward pass ends. The autograd engine reports its end (`queue_callback`). A
backward hook of the first module would not do, because a frozen first module has no backward pass.

If a compiled function enters a context itself, as a decorated `model.forward` does, torch.compile compiles the code
inside the context only. Entry and exit run in Python (`keep_compiler_out`), because a compiled graph would keep
referring to the step of its first run.

The process group is the default group unless the caller passes another or sets `reduce_amax=False`. It is looked up at
each entry, because a decorator is often applied before the process group exists.
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
from fp8serve.fp8.microbatch import validate_is_first_microbatch
from fp8serve.fp8.recipe import DelayedScaling, Recipe, as_delayed, can_train
from fp8serve.fp8.session import Session, UpdateConfig, common_session
from fp8serve.fp8.steps import Step
from fp8serve.fp8.torch_private import keep_compiler_out


@dataclass(frozen=True, eq=False)
class Frame:
    """The settings of one entry into a context, in force until its exit."""

    context: "autocast"
    recipe: Recipe
    enabled: bool
    calibrating: bool
    is_first_microbatch: bool | None
    group: Any = None
    config_id: int | None = None  # the id of `config`, for compiled graphs; None for recipes without states
    config: UpdateConfig | None = None  # how delayed states are updated; the registry holds it only weakly


class _ThreadState(threading.local):
    """Per thread: the stack of open contexts and the step of the outermost one."""

    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.step = Step("forward")


_LOCAL = _ThreadState()


class autocast(ContextDecorator):  # noqa: N801 - reads like torch.autocast
    """A context manager and decorator that runs every `fp8serve.Linear` inside it in FP8.

    Raises RecipeError for `calibrating=True` with a recipe that has no amax history, and if contexts are not left in
    the reverse order of their entry.

    Args:
        enabled: If False, layers inside run in high precision.
        recipe: The FP8 recipe, by default `DelayedScaling()`.
        calibrating: If True, amaxes are recorded even without gradients, and the states are updated at the end. With
            `enabled=False`, layers then record amaxes while they compute in high precision.
        amax_reduction_group: The process group over which delayed amaxes are reduced with MAX, in every context that
            ends with gradients enabled. None is the default group, if one is initialized. With a recipe that has
            `reduce_amax=False` amaxes are not reduced.
        session: The session whose amaxes are reduced. None is the common session, which has all modules whose model
            owns no session.
        is_first_microbatch: For gradient accumulation. True quantizes weights and caches them, False uses the cached
            ones, None quantizes weights without caching. The innermost context decides.
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
        self.session = common_session() if session is None else session
        self.is_first_microbatch = validate_is_first_microbatch(is_first_microbatch)
        if not isinstance(self.recipe, Recipe):
            raise RecipeError(
                "recipe must be DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling or "
                f"NVFP4BlockScaling, found {recipe!r}."
            )
        if not can_train(self.recipe):
            raise RecipeError(f"{type(self.recipe).__name__} is a recipe for serving; train with another.")
        if not isinstance(self.session, Session):
            raise RecipeError(f"session must be a Session, such as Session.of(model), found {shown(session)}.")
        if calibrating and as_delayed(self.recipe) is None:
            kind = type(self.recipe).__name__
            raise RecipeError(f"calibrating records amax histories, and {kind} has none; use DelayedScaling.")

    @keep_compiler_out
    def __enter__(self) -> "autocast":
        frame = self._create_frame()
        _LOCAL.stack.append(frame)
        if frame.config is not None and frame.config.reduces_amax and (self.enabled or self.calibrating):
            _LOCAL.step.add_config(frame.config)
        return self

    def _create_frame(self) -> Frame:
        settings = self, self.recipe, self.enabled, self.calibrating, self.is_first_microbatch
        if (recipe := as_delayed(self.recipe)) is None:
            return Frame(*settings)
        group = default_group() if self.amax_reduction_group is None else self.amax_reduction_group
        return Frame(*settings, group, *self.session.update_config(recipe, group))

    @keep_compiler_out
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_innermost = _pop_frame(self)
        if not is_innermost:
            _LOCAL.step.discard()
        if not _LOCAL.stack:
            _end_step(has_failed=kind is not None, is_recording=torch.is_grad_enabled() or self.calibrating)
        if not is_innermost:
            raise RecipeError(
                "This autocast was left before one that was entered after it, or was not entered in this thread; what "
                "ran is not recorded. Leave contexts in the reverse order of their entry, best by `with`."
            )


def _pop_frame(context: autocast) -> bool:
    """Removes the context's innermost frame from the stack. Returns whether it was the top of the stack."""
    stack = _LOCAL.stack
    index = next((i for i in reversed(range(len(stack))) if stack[i].context is context), None)
    if index is None:
        return False
    del stack[index]
    return index == len(stack)


def _end_step(has_failed: bool, is_recording: bool) -> None:
    """Updates the states whose amaxes the outermost context staged, or discards the amaxes if the step has failed."""
    step, _LOCAL.step = _LOCAL.step, Step("forward")
    step.loop_detector.close()
    if has_failed:
        step.discard()
        for module in step.without_history:  # the next evaluation that succeeds warns about them
            module.is_evaluated = False
        return
    if is_recording:
        with torch.no_grad():
            step.finish()
    # The warning comes last: if warnings are errors, it must not interrupt the update.
    if count := len(step.without_history):
        warnings.warn(
            f"{count} FP8 layer{'s were' if count > 1 else ' was'} evaluated under delayed scaling with scale 1, "
            "because there is no amax history, so small values became zero. Train or calibrate the model first, load "
            "the scaling states of the trained one (in its state_dict, not among its parameters), or use another "
            "recipe.",
            stacklevel=_levels_to_caller(),
        )


def _levels_to_caller() -> int:
    """Returns the `stacklevel` at which a warning of the calling function points to the user's code.

    A decorator leaves its context through contextlib, so its frames are skipped like those of this module.
    """
    skipped, frame, level = {__name__, "contextlib", "torch.utils._contextlib"}, sys._getframe(1), 1
    while frame.f_globals.get("__name__") in skipped and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def is_inside_context() -> bool:
    """Returns whether this thread is inside any `autocast`, an enabled one or not."""
    return bool(_LOCAL.stack)


def current_frame() -> Frame | None:
    """Returns the innermost frame of this thread, or None if layers run in high precision and record nothing."""
    frame = _LOCAL.stack[-1] if _LOCAL.stack else None
    return frame if frame is not None and (frame.enabled or frame.calibrating) else None


def current_step() -> Step:
    """Returns the step of this thread's outermost context."""
    return _LOCAL.step
