"""Step: what one outermost context, or one backward pass, has staged, and the update that ends it.

Over a process group, the staged amaxes of *all* living modules of the session are reduced with one MAX: a rank where
some module did not run still takes part with zeros, so nothing hangs and all ranks hold equal scales. Because of a rank
without a backward pass the others' gradients wait for the end of the next context (distributed.py).

What ends inside `one_update` is no step of its own: its amaxes wait, and all are updated together. So the microbatches
of a step compute with the same scales, wherever and in which order they run.

Any number of forward passes can be one step, because states are updated when the outermost context ends. A whole
training loop inside one context therefore trains with the scales it began with: 1, on a fresh model, at which most
gradients are below E5M2's smallest number. It looks like training that does not learn. `LoopWatch` warns of it: in a
loop, unlike in accumulation, one optimizer steps twice with FP8 layers running in between. Different optimizers that
step once each, such as a generator's and a discriminator's, are not a loop.
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

from fp8serve.fp8.distributed import header, reduce_staged
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Direction, Entry, Scaled, fp8_max, update
from fp8serve.fp8.session import Rule, Session
from fp8serve.fp8.torch_private import backward_pass, when_backward_ends


class LoopWatch:
    """Watches one outermost context of one thread, from the first amax that is staged in it until `close`."""

    def __init__(self) -> None:
        self._staged = 0
        self._staged_at_step: WeakKeyDictionary[Optimizer, int] | None = None  # of optimizers that stepped

    def staged(self) -> None:
        """Note that a forward pass staged an amax."""
        if self._staged == 0:
            _LOCAL.watch = self
        self._staged += 1

    def close(self) -> None:
        """Stop watching."""
        if _LOCAL.watch is self:
            _LOCAL.watch = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Warn if this is the optimizer's second step, with something staged in between."""
        if self._staged_at_step is None:
            self._staged_at_step = WeakKeyDictionary()
        if self._staged_at_step.get(optimizer, self._staged) < self._staged:
            warnings.warn(
                f"{type(optimizer).__name__} stepped twice inside one autocast, which updates delayed scales only when "
                "the outermost context ends; open the context anew for every step, around the forward pass.",
                stacklevel=5,
            )
        self._staged_at_step[optimizer] = self._staged


class _Local(threading.local):
    """Per thread: the watcher of its outermost context."""

    watch: LoopWatch | None = None


_LOCAL = _Local()


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    if _LOCAL.watch is not None:
        _LOCAL.watch.stepped(optimizer)


# Registered once per process: other threads must not change torch's hooks while torch iterates over them.
register_optimizer_step_post_hook(_stepped)


@dataclass
class Step:
    """What one outermost context, or one backward pass, has staged: per rule the modules by key."""

    direction: Direction
    ran: dict[Rule, dict[int, Scaled]] = field(default_factory=dict)
    expecting: set[Rule] = field(default_factory=set)  # rules under which something with a backward pass ran
    watch: LoopWatch = field(default_factory=LoopWatch)
    # Modules that were evaluated for the first time, and whose scales nothing has set.
    without_history: list[Scaled] = field(default_factory=list)

    def open(self, rule: Rule) -> None:
        """Take part in the rule's collective even if no module runs here."""
        self.ran.setdefault(rule, {})

    def add(self, module: Scaled, rule: Rule) -> None:
        """Note that a module staged amaxes by a rule."""
        module.session.staged(module)
        if (modules := self.ran.get(rule)) is None:
            modules = self.ran[rule] = {}
        modules[module.key] = module

    def finish(self) -> None:
        """Update every state that was staged; one op (and one collective) per rule, normally one in all."""
        for rule in [rule for rule in self.ran if rule.session.held is not None]:
            rule.session.held.add(self.direction, self.ran.pop(rule))
        deferred = {rule: rule.attendance.deferred() for rule in self.ran if rule.shared}  # all before any collective
        for rule, modules in self.ran.items():
            if rule in deferred:
                self._finish_together(rule, deferred[rule])
            else:
                _update(modules.values(), self.direction, rule.recipe)
        self.ran.clear()

    def _finish_together(self, rule: Rule, deferred: bool) -> None:
        if deferred == (self.direction == "forward"):
            _update_together("backward", rule, expecting=False)
        if self.direction == "forward":
            _update_together("forward", rule, rule in self.expecting)

    def discard(self) -> None:
        """Forget what was staged, as if the step had not happened."""
        _discard(self.direction, self.ran)


class Held:
    """What contexts and backward passes have staged that do not update by themselves."""

    def __init__(self) -> None:
        self.ran: dict[Direction, dict[int, Scaled]] = {"forward": {}, "backward": {}}

    def add(self, direction: Direction, modules: dict[int, Scaled]) -> None:
        """Take over what one step has staged."""
        self.ran[direction] |= modules

    def finish(self, rule: Rule) -> None:
        """Update it all, once; over a group all ranks must come here, whatever ran on them."""
        if rule.shared:
            rule.attendance.deferred()
        for direction, modules in self.ran.items():
            if rule.shared:
                _update_together(direction, rule, expecting=True)
            else:
                _update(modules.values(), direction, rule.recipe)


@contextmanager
def one_update(session: Session, recipe: DelayedScaling, group: Any = None) -> Iterator[None]:
    """The contexts of a session and the backward passes that lie inside are one step, by one recipe.

    Their amaxes are reduced over `group` and the scales updated at the end, once, from the largest amax of all. After
    an exception nothing is updated.
    """
    _, rule = session.rule(recipe, group)
    held = session.held = Held()
    try:
        yield
    except BaseException:
        for direction, modules in held.ran.items():
            _discard(direction, {rule: modules})
        raise
    finally:
        session.held = None
    with torch.no_grad():
        held.finish(rule)


def _discard(direction: Direction, ran: dict[Rule, dict[int, Scaled]]) -> None:
    for modules in ran.values():
        for module in modules.values():
            for name in module.tensors[direction]:
                module.scaling[name].discard()


def _update_together(direction: Direction, rule: Rule, expecting: bool) -> None:
    """Reduce the amaxes that the session's modules staged in one direction over the group, and update the modules."""
    session = rule.session
    own_header = header(direction, expecting, session.reach)
    chosen = reduce_staged(session.living(), direction, rule.recipe, rule.group, own_header, rule.attendance)
    _update(chosen, direction, rule.recipe)


def _update(modules: Iterable[Scaled], direction: Direction, recipe: DelayedScaling) -> None:
    limits: dict[str, float] = {}
    entries = []
    for module in modules:
        for name in module.tensors[direction]:
            if name not in limits:
                limits[name] = fp8_max(recipe, name)
            entries.append(Entry(module.scaling[name], limits[name]))
    update(entries, recipe)


_BACKWARD: WeakValueDictionary[int, Step] = WeakValueDictionary()  # by the number of a pass that is running
_LOCK = threading.Lock()


def backward_step() -> Step:
    """The step of the running backward pass; the engine finishes it when the pass ends."""
    task = backward_pass()
    assert task is not None, "gradients are staged in a backward pass"
    with _LOCK:  # one pass may run in several threads
        step = _BACKWARD.get(task)
        if step is None:
            step = _BACKWARD[task] = Step("backward")
            # The engine keeps the bound method, and with it the step, until this backward pass ends or fails: a step
            # that is freed before it has finished has failed.
            weakref.finalize(step, _discard, "backward", step.ran).atexit = False
            when_backward_ends(step.finish)
    return step
