"""Step: what one outermost context, or one backward pass, has staged, and the update that ends it.

Over a process group, the staged amaxes of *all* living modules of the session are reduced with one MAX: a rank where
some module did not run still takes part with zeros, so nothing hangs and all ranks hold equal scales. Because of a rank
without a backward pass the others' gradients wait for the end of the next context (distributed.py).
"""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from fp8serve.fp8.attendance import header
from fp8serve.fp8.distributed import reduce_staged
from fp8serve.fp8.loops import LoopWatch
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Direction, Entry, Scaled, fp8_max, update
from fp8serve.fp8.session import Rule
from fp8serve.fp8.torch_private import backward_pass, when_backward_ends


@dataclass
class Step:
    """What one outermost context, or one backward pass, has staged: per rule the modules by key."""

    direction: Direction
    ran: dict[Rule, dict[int, Scaled]] = field(default_factory=dict)
    expecting: set[Rule] = field(default_factory=set)  # under which something ran that has a backward pass
    watch: LoopWatch = field(default_factory=LoopWatch)

    def open(self, rule: Rule) -> None:
        """Take part in the rule's collective even if no module runs here."""
        self.ran.setdefault(rule, {})

    def add(self, module: Scaled, rule: Rule) -> None:
        """Note that a module staged amaxes by a rule."""
        module.session.staged(module)
        self.ran.setdefault(rule, {})[module.key] = module

    def finish(self) -> None:
        """Update every state that was staged; one op (and one collective) per rule, normally one in all."""
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


def _discard(direction: Direction, ran: dict[Rule, dict[int, Scaled]]) -> None:
    for modules in ran.values():
        for module in modules.values():
            for name in module.tensors[direction]:
                module.scaling[name].discard()


def _update_together(direction: Direction, rule: Rule, expecting: bool) -> None:
    """Reduce over the group what the session's modules staged in one direction, and update them, here as everywhere."""
    session = rule.session
    said = header(direction, expecting, session.reach)
    chosen = reduce_staged(session.living(), direction, rule.recipe, rule.group, said, rule.attendance)
    _update(chosen, direction, rule.recipe)


def _update(modules: Iterable[Scaled], direction: Direction, recipe: DelayedScaling) -> None:
    named = [(name, m.scaling[name]) for m in modules for name in m.tensors[direction]]
    update([Entry(state, fp8_max(recipe, name)) for name, state in named], recipe)


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
            # that goes without having finished has failed.
            weakref.finalize(step, _discard, "backward", step.ran).atexit = False
            when_backward_ends(step.finish)
    return step
