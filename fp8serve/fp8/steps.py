"""Step: the modules that staged amaxes in one outermost context or one backward pass, and the update that ends it.

Over a process group, one MAX all-reduce covers the staged amaxes of *all* live modules of the session. A rank on which
a module did not run contributes zeros, so nothing hangs and all ranks hold equal scales. If some rank has no backward
pass, the amaxes of gradients are reduced at the end of the next context (distributed.py).

A context or backward pass that ends inside `accumulated_update` is no step of its own: all states are updated together
when `accumulated_update` ends. So the microbatches of a step compute with the same scales, wherever and in whatever
order they run.

States are updated when the outermost context ends, so any number of forward passes can be one step. A whole training
loop inside one context therefore never updates its scales. On a new model they are 1, at which most gradients are below
E5M2's smallest number, and the model does not learn. `LoopDetector` warns about such a loop: one optimizer steps twice
and FP8 layers run in between, which does not happen in gradient accumulation. Different optimizers that step once each,
such as those of a generator and a discriminator, are not a loop.
"""

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8serve.fp8.distributed import make_header, reduce_staged_amaxes
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Direction, Entry, fp8_max, update
from fp8serve.fp8.session import Session, UpdateConfig
from fp8serve.fp8.stateful import Stateful
from fp8serve.fp8.torch_private import backward_pass, when_backward_ends


class LoopDetector:
    """Detects a training loop inside one outermost context of a thread, from its first staged amax until `close`."""

    def __init__(self) -> None:
        self._num_staged = 0
        self._num_staged_at_step: WeakKeyDictionary[Optimizer, int] | None = None  # at each optimizer's last step

    def count_staged_amax(self) -> None:
        """Counts an amax that a forward pass staged."""
        if self._num_staged == 0:
            _LOCAL.detector = self
        self._num_staged += 1

    def close(self) -> None:
        """Stops the detection."""
        if _LOCAL.detector is self:
            _LOCAL.detector = None

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """Warns if the optimizer has stepped before in this context and an amax was staged in between."""
        if self._num_staged_at_step is None:
            self._num_staged_at_step = WeakKeyDictionary()
        if self._num_staged_at_step.get(optimizer, self._num_staged) < self._num_staged:
            warnings.warn(
                f"{type(optimizer).__name__} stepped twice inside one autocast, which updates delayed scales only when "
                "the outermost context ends; open the context anew for every step, around the forward pass.",
                stacklevel=5,
            )
        self._num_staged_at_step[optimizer] = self._num_staged


class _ThreadState(threading.local):
    """Per thread: the loop detector of the outermost context."""

    detector: LoopDetector | None = None


_LOCAL = _ThreadState()


def _on_optimizer_step(optimizer: Optimizer, *_: Any) -> None:
    if _LOCAL.detector is not None:
        _LOCAL.detector.on_optimizer_step(optimizer)


# Registered once per process: other threads must not change torch's hooks while torch iterates over them.
register_optimizer_step_post_hook(_on_optimizer_step)


@dataclass
class Step:
    """The modules that staged amaxes in one outermost context or one backward pass: by update config, then by key."""

    direction: Direction
    staged: dict[UpdateConfig, dict[int, Stateful]] = field(default_factory=dict)
    configs_with_backward: set[UpdateConfig] = field(default_factory=set)  # a module under it has a backward pass
    loop_detector: LoopDetector = field(default_factory=LoopDetector)
    # Modules that were evaluated for the first time and still have their initial scales.
    without_history: list[Stateful] = field(default_factory=list)

    def add_config(self, config: UpdateConfig) -> None:
        """Makes the step take part in the collective of an update config even if no module runs on this rank."""
        self.staged.setdefault(config, {})

    def add_module(self, module: Stateful, config: UpdateConfig) -> None:
        """Adds a module that staged amaxes under an update config."""
        module.session.include_position_of(module)
        if (modules := self.staged.get(config)) is None:
            modules = self.staged[config] = {}
        modules[module.key] = module

    def finish(self) -> None:
        """Updates the states of all staged amaxes, with one op (and one collective) per update config."""
        for config in [config for config in self.staged if config.session.accumulator is not None]:
            config.session.accumulator.add(self.direction, self.staged.pop(config))
        # Read for all configs before the first collective changes an answer.
        is_deferred = {c: c.reduction_state.is_backward_deferred() for c in self.staged if c.reduces_amax}
        for config, modules in self.staged.items():
            if config in is_deferred:
                self._finish_over_group(config, is_deferred[config])
            else:
                _update(modules.values(), self.direction, config.recipe)
        self.staged.clear()

    def _finish_over_group(self, config: UpdateConfig, is_backward_deferred: bool) -> None:
        if is_backward_deferred == (self.direction == "forward"):
            _update_over_group("backward", config, expects_backward=False)
        if self.direction == "forward":
            _update_over_group("forward", config, config in self.configs_with_backward)

    def discard(self) -> None:
        """Discards all staged amaxes, as if the step had not happened."""
        _discard(self.direction, self.staged)


class StepAccumulator:
    """The modules that staged amaxes in several contexts and backward passes, for one update at their end."""

    def __init__(self) -> None:
        self.staged: dict[Direction, dict[int, Stateful]] = {"forward": {}, "backward": {}}

    def add(self, direction: Direction, modules: dict[int, Stateful]) -> None:
        """Adds the modules of one step."""
        self.staged[direction] |= modules

    def finish(self, config: UpdateConfig) -> None:
        """Updates all states once. Over a group every rank must call this, even if no module ran on it."""
        if config.reduces_amax:
            config.reduction_state.is_backward_deferred()  # raises if the ranks were in different passes
        for direction, modules in self.staged.items():
            if config.reduces_amax:
                _update_over_group(direction, config, expects_backward=True)
            else:
                _update(modules.values(), direction, config.recipe)


@contextmanager
def accumulated_update(session: Session, recipe: DelayedScaling, group: Any = None) -> Iterator[None]:
    """Makes one step of all contexts of the session and all backward passes in the `with` block, with one recipe.

    At the end the amaxes are reduced over `group`, and each scale is updated once from the largest amax of all passes.
    An exception discards the amaxes.
    """
    _, config = session.update_config(recipe, group)
    accumulator = session.accumulator = StepAccumulator()
    try:
        yield
    except BaseException:
        for direction, modules in accumulator.staged.items():
            _discard(direction, {config: modules})
        raise
    finally:
        session.accumulator = None
    with torch.no_grad():
        accumulator.finish(config)


def _discard(direction: Direction, staged: dict[UpdateConfig, dict[int, Stateful]]) -> None:
    for modules in staged.values():
        for module in modules.values():
            for name in module.tensors[direction]:
                module.scaling[name].discard()


def _update_over_group(direction: Direction, config: UpdateConfig, expects_backward: bool) -> None:
    """Reduces the session's staged amaxes of one direction over the group and updates the states."""
    session, recipe = config.session, config.recipe
    header = make_header(direction, expects_backward, session.num_positions)
    live_modules = session.live_modules()
    modules = reduce_staged_amaxes(live_modules, direction, recipe, config.group, header, config.reduction_state)
    _update(modules, direction, recipe)


def _update(modules: Iterable[Stateful], direction: Direction, recipe: DelayedScaling) -> None:
    maxima: dict[str, float] = {}
    entries: dict[int, Entry] = {}  # by the state's id, because modules may share a state
    for module in modules:
        for name in module.tensors[direction]:
            if name not in maxima:
                maxima[name] = fp8_max(recipe, name)
            state = module.scaling[name]
            entries[id(state)] = Entry(state, maxima[name])
    update(list(entries.values()), recipe)


_BACKWARD_STEPS: WeakValueDictionary[int, Step] = WeakValueDictionary()  # of running backward passes, by their id
_LOCK = threading.Lock()


def backward_step() -> Step:
    """Returns the step of the running backward pass. The autograd engine finishes it when the pass ends."""
    task = backward_pass()
    assert task is not None, "gradients are staged in a backward pass"
    with _LOCK:  # one pass may run in several threads
        step = _BACKWARD_STEPS.get(task)
        if step is None:
            step = _BACKWARD_STEPS[task] = Step("backward")
            # The engine holds the bound method, and with it the step, until the backward pass ends or fails. So a step
            # that is freed before `finish` has cleared it belongs to a pass that failed.
            weakref.finalize(step, _discard, "backward", step.staged).atexit = False
            when_backward_ends(step.finish)
    return step
