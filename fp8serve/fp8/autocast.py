"""The context that says which recipe is in force, and what is updated when it ends.

    with autocast(recipe=DelayedScaling()):     # outermost: owns the session
        model(x)                                # every Linear that records an amax registers with the session
                                                # exit: all registered forward states are updated in one op

Contexts nest, the innermost wins, each thread has its own stack. Only the end of the *outermost* context updates, and
only with gradients enabled; an exception inside, or in a backward pass, discards what was staged, so that a failed step
leaves no trace. The backward pass runs outside of any context: what it needs, every forward call has written down, and
the gradients' states are updated when the running backward pass ends. We ask the autograd engine for that moment
(`queue_callback`) rather than attach it to the first module, because a first module that is frozen has no backward at
all.

Over a process group, the staged amaxes of *all* living modules are reduced with one MAX: a rank where some module did
not run still takes part with zeros, so nothing hangs and all ranks hold equal scales. Because of a rank without a
backward pass the others' gradients wait for the end of the next context (distributed.py). The group is the default one
unless the caller names another or sets `reduce_amax=False`; it is looked up when a context is entered, because a
decorator is often made before the processes have met.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8serve.errors import RecipeError
from fp8serve.fp8.distributed import Attendance, default_group, header, reduce_staged, several
from fp8serve.fp8.loops import LoopWatch
from fp8serve.fp8.microbatch import checked
from fp8serve.fp8.ops import DTYPES, implement
from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed
from fp8serve.fp8.scaling import Direction, Entry, Scaled, update
from fp8serve.fp8.torch_private import backward_pass, constant_in_graphs, when_backward_ends


@dataclass(frozen=True)
class Rule:
    """How a state is updated: the recipe that staged it and the process group to reduce over."""

    recipe: DelayedScaling
    group: Any = None
    attendance: Attendance = field(default_factory=Attendance, compare=False)

    @property
    def shared(self) -> bool:
        """Amaxes are reduced over a group."""
        return self.recipe.reduce_amax and several(self.group)


@dataclass
class Session:
    """What one outermost context, or one backward pass, has staged: per rule the modules by key."""

    direction: Direction
    ran: dict[Rule, dict[int, Scaled]] = field(default_factory=dict)
    expecting: set[Rule] = field(default_factory=set)  # under which something ran that has a backward pass
    watch: LoopWatch = field(default_factory=LoopWatch)

    def open(self, rule: Rule) -> None:
        """Take part in the rule's collective even if no module runs here."""
        self.ran.setdefault(rule, {})

    def add(self, module: Scaled, rule: Rule) -> None:
        self.ran.setdefault(rule, {})[module.key] = module

    def finish(self) -> None:
        """Update every state that was staged; one op (and one collective) per rule, normally one in all."""
        for rule, modules in self.ran.items():
            if not rule.shared:
                _update(modules.values(), self.direction, rule.recipe)
            elif self.direction == "forward":
                if rule.attendance.deferred():
                    _update_together("backward", rule, expecting=False)
                _update_together("forward", rule, rule in self.expecting)
            elif not rule.attendance.deferred():
                _update_together("backward", rule, expecting=False)
        self.ran.clear()

    def discard(self) -> None:
        """Forget what was staged, as if the step had not happened."""
        _discard(self.direction, self.ran)


def _discard(direction: Direction, ran: dict[Rule, dict[int, Scaled]]) -> None:
    for modules in ran.values():
        for module in modules.values():
            for name in module.tensors[direction]:
                module.scaling[name].discard()


def _update_together(direction: Direction, rule: Rule, expecting: bool) -> None:
    """Reduce over the group what all living modules staged in one direction, and update them, here as everywhere."""
    said = header(direction, expecting)
    chosen, heard = reduce_staged(living(), _MADE.count, direction, rule.recipe, rule.group, said)
    rule.attendance.note(heard)
    _update(chosen, direction, rule.recipe)


def _update(modules: Iterable[Scaled], direction: Direction, recipe: DelayedScaling) -> None:
    named = [(name, m.scaling[name]) for m in modules for name in m.tensors[direction]]
    update([Entry(state, fp8_max(recipe, name)) for name, state in named], recipe)


def fp8_max(recipe: Recipe, name: str) -> float:
    """The largest value of the format that the tensor of a role is cast to."""
    return FP8_MAX[DTYPES[recipe.specs.element(name)]]


@dataclass
class _Made:
    """How many modules were ever made, the discarded ones included."""

    count: int = 0


class _Local(threading.local):
    """Per thread: the stack of open contexts and the session of the outermost."""

    def __init__(self) -> None:
        self.stack: list[autocast] = []
        self.session = Session("forward")


_LOCAL = _Local()
_RULES: WeakValueDictionary[int, Rule] = WeakValueDictionary()  # by id, so that a compiled graph can carry it
_NUMBERS = count()
_RECENT: deque[Rule] = deque(maxlen=1024)  # so that a step's rule has the number of the step before
_LASTING: dict[int, Rule] = {}  # those of process groups, which remember attendance, and of compiled graphs
_MADE = _Made()
_MODULES: WeakValueDictionary[int, Scaled] = WeakValueDictionary()
_BACKWARD: WeakValueDictionary[int, Session] = WeakValueDictionary()


def known(rule: Rule) -> tuple[int, Rule]:
    """The number that stands for an equal rule, and that rule; who needs it later (a graph, a context) holds it."""
    for number, same in list(_RULES.items()):
        if same == rule:
            return number, same
    number = next(_NUMBERS)
    _RULES[number] = rule
    _RECENT.append(rule)
    if rule.shared:
        _LASTING[number] = rule
    return number, rule


def enroll(module: Scaled) -> int:
    """Give a module its place in the order of creation."""
    key, _MADE.count = _MADE.count, _MADE.count + 1
    _MODULES[key] = module
    return key


def living() -> list[Scaled]:
    """All modules that exist, in order of creation."""
    return [module for _, module in sorted(_MODULES.items())]


class autocast(ContextDecorator):  # noqa: N801 - reads like torch.autocast
    """Run every `fp8serve.Linear` inside in FP8 by `recipe` (default `DelayedScaling()`).

    enabled=False makes an island of high precision. With `calibrating=True` amaxes are recorded, also without
    gradients, and the states are updated at the end; together with enabled=False the maths stays in high precision.
    `amax_reduction_group`: the process group over which delayed amaxes are reduced with MAX, in every context that ends
    with gradients enabled. None: the default group, if one is initialised. A recipe with `reduce_amax=False` reduces
    over none. `is_first_microbatch`, for gradient accumulation: True keeps the quantized weights, False uses those
    of the last True, None quantizes the weights (microbatch.py); the innermost context decides. Raises RecipeError if
    calibrating is asked of a recipe that has no history.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        recipe: Recipe | None = None,
        calibrating: bool = False,
        amax_reduction_group: Any = None,
        is_first_microbatch: bool | None = None,
    ) -> None:
        self.enabled = enabled
        self.recipe: Recipe = DelayedScaling() if recipe is None else recipe
        self.calibrating = calibrating
        self.named_group = amax_reduction_group
        self.group: Any = None  # this one and the rule are set on entry
        self.rule: int | None = None
        self.held: Rule | None = None
        self.is_first_microbatch = checked(is_first_microbatch)
        if not isinstance(self.recipe, Recipe):
            raise RecipeError(
                f"recipe must be DelayedScaling, Float8CurrentScaling or Float8BlockScaling, found {recipe!r}."
            )
        if calibrating and delayed(self.recipe) is None:
            kind = type(self.recipe).__name__
            raise RecipeError(f"calibrating records amax histories, and {kind} has none; use DelayedScaling.")

    def __enter__(self) -> "autocast":
        _LOCAL.stack.append(self)
        if (rules := delayed(self.recipe)) is not None:
            self.group = default_group() if self.named_group is None else self.named_group
            self.rule, self.held = known(Rule(rules, self.group))
            if self.held.shared and (self.enabled or self.calibrating):
                _LOCAL.session.open(self.held)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LOCAL.stack.pop()
        if _LOCAL.stack:
            return
        session, _LOCAL.session = _LOCAL.session, Session("forward")
        session.watch.close()
        if kind is not None:
            session.discard()
        elif torch.is_grad_enabled() or self.calibrating:
            with torch.no_grad():
                session.finish()


def current() -> autocast | None:
    """The innermost context of this thread if it asks anything of a Linear, else None."""
    context = _LOCAL.stack[-1] if _LOCAL.stack else None
    return context if context is not None and (context.enabled or context.calibrating) else None


def session() -> Session:
    """What the running outermost context has staged; another object in every step."""
    return _LOCAL.session


@constant_in_graphs
def prepare(module: int, length: int) -> bool:
    """Create or resize the states of a module (by key); torch.compile runs this while it traces, not in the graph."""
    _MODULES[module].prepare(length)
    return True


def expect_backward(history: Tensor, rule: int) -> None:
    """Note that gradients will be staged by the rule (by id): the other ranks ask. `history`: any that is updated."""
    if torch.compiler.is_compiling():
        torch.ops.fp8serve.expect_backward(history, rule)
    else:
        _expect_backward(history, rule)


def _expect_backward(history: Tensor, rule: int) -> None:
    _LOCAL.session.expecting.add(_RULES[rule])


def _expect_backward_of_graph(history: Tensor, rule: int) -> None:
    """A compiled graph carries the number of a rule to its backward pass, and nothing that would hold the rule."""
    _LASTING[rule] = _RULES[rule]
    _expect_backward(history, rule)


def record(direction: Direction, history: Tensor, amax: Tensor, module: int, rule: int) -> None:
    """Raise the staging slot of a history to `amax` and note that the module (by key) ran by the rule (by id).

    Inside torch.compile it becomes a node of the graph, which does the same when the graph runs.
    """
    if torch.compiler.is_compiling():
        torch.ops.fp8serve.record_amax(history, amax, module, rule, direction)
    else:
        _record(history, amax, module, rule, direction)


def _record(history: Tensor, amax: Tensor, module: int, rule: int, direction: str) -> None:
    slot = history[0]
    slot.copy_(torch.maximum(slot, amax))
    session = _LOCAL.session if direction == "forward" else _backward_session()
    if direction == "forward" and _LOCAL.stack:
        session.watch.staged()
    owner = _MODULES.get(module)
    if owner is not None:  # a module may be gone before its backward pass runs
        session.add(owner, _RULES[rule])


def _backward_session() -> Session:
    """The session of the running backward pass; the engine finishes it when the pass ends."""
    task = backward_pass()
    assert task is not None, "gradients are staged in a backward pass"
    session = _BACKWARD.get(task)
    if session is None:
        session = _BACKWARD[task] = Session("backward")
        # The engine keeps the bound method, and with it the session, until this backward pass ends or fails: a session
        # that goes without having finished has failed.
        weakref.finalize(session, _discard, "backward", session.ran).atexit = False
        when_backward_ends(session.finish)
    return session


implement("record_amax", _record)
implement("expect_backward", _expect_backward_of_graph)
