"""Session: which modules are scaled together, in which order, and by which rules.

    model = convert(model)                                # nothing to do: these modules share the common session
    own = Session(model)                                  # or the model owns one
    with autocast(recipe=recipe, session=own):            # reduces only its modules over the process group

Without a process group a session decides nothing: a step updates the modules that ran in it. Over a group the ranks
must agree on each amax's position in the one vector that they reduce, even a rank on which nothing ran and whose
context names no model. So there is one common session per process, and its modules are ordered by their creation. It
has a second order for copies, because often only one rank makes a copy, for example for evaluation: such copies do not
move the positions of other modules. If ranks have made different numbers of copies, the common session cannot match
them up; a session that the model owns can. There a module's position is its position in the model. A copy of such a
model has its own session, which takes no part in the collectives of other models.

A session holds its modules weakly, and they hold it, so it is freed with them. Process groups it holds weakly, too:
`destroy_process_group` can only end the threads and connections of a group that nothing refers to. A gloo thread that
is left may still let go of a tensor when the interpreter shuts down, and then the process aborts.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary

from torch import nn

from fp8serve.errors import RecipeError
from fp8serve.fp8.distributed import Attendance, several
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Order, Position, Scaled

T = TypeVar("T")


class Handles(Generic[T]):
    """Numbers that stand for modules and rules: a compiled graph can carry an integer until it runs, but no object.

    The two tables are all that is global to the process. They hold their entries weakly, so a number keeps nothing
    alive, and no number is used twice. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._numbers = count()
        self._lock = threading.RLock()

    def add(self, thing: T) -> int:
        """A new number for an object."""
        with self._lock:
            number = next(self._numbers)
            self._objects[number] = thing
        return number

    def get(self, number: int) -> T | None:
        """The object of a number, None once it is gone."""
        return self._objects.get(number)

    def __getitem__(self, number: int) -> T:
        return self._objects[number]

    def __len__(self) -> int:
        return len(self._objects)


REMEMBERED = 1024  # rules of a session that are not in use at the moment


@dataclass(frozen=True)
class Rule:
    """How a state is updated: the recipe that staged it, and the process group and session to reduce over.

    over: the group, None where it has no other rank.
    """

    recipe: DelayedScaling
    over: "ReferenceType[Any] | None" = None
    session: "Session" = field(compare=False, kw_only=True, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)  # every amax that is staged asks for it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.recipe, self.over)))

    def __hash__(self) -> int:
        return self._hash

    def says(self, recipe: DelayedScaling, group: Any) -> bool:
        """Whether the rule has this recipe and group; False also of a group of one rank, which a rule does not hold."""
        held = None if self.over is None else self.over()
        return held is group and (self.over is None or held is not None) and self.recipe == recipe

    @property
    def shared(self) -> bool:
        """Amaxes are reduced over a group."""
        return self.recipe.reduce_amax and self.over is not None

    @property
    def group(self) -> Any:
        """The group of a shared rule. RecipeError if it is gone."""
        group = None if self.over is None else self.over()
        if group is None:
            raise RecipeError("The process group was destroyed before the amaxes of this step were reduced over it.")
        return group

    @property
    def attendance(self) -> Attendance:
        """What the ranks of the group have reported."""
        return self.session.attendance.setdefault(self.group, Attendance())

    def check(self, module: Scaled) -> None:
        """RecipeError if the module would be left out of the collective."""
        if self.shared and module.session is not self.session:
            raise RecipeError(
                "This layer's amaxes belong to another session than the autocast reduces over the process group; "
                "name the session of its model: autocast(session=...)."
            )


MODULES: Handles[Scaled] = Handles()
RULES: Handles[Rule] = Handles()


class Numbered(NamedTuple):
    """A rule and the number that stands for it in graphs."""

    number: int
    rule: Rule


class Session:
    """The scaled modules of one model, whose amaxes are reduced together over a process group.

    model: its FP8 modules leave the session that they were in; their positions are those in `model.modules()`. The
    model owns the session from then on, and a copy of the model (`copy.deepcopy`, pickle) owns a new one:
    `Session.of(copy)`. RecipeError if the model has no FP8 modules.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._modules: WeakValueDictionary[Position, Scaled] = WeakValueDictionary()
        self._enrolled = dict.fromkeys(Order, 0)
        self._rules: WeakValueDictionary[int, Rule] = WeakValueDictionary()
        self._latest: Numbered | None = None
        self._recent: deque[Rule] = deque(maxlen=REMEMBERED)  # a step then has the rule of the step before
        self._lasting: dict[int, Rule] = {}  # those of compiled graphs
        self._lock = threading.RLock()
        self.attendance: WeakKeyDictionary[Any, Attendance] = WeakKeyDictionary()  # by process group
        self.held: Any = None  # the steps.Held that takes what ends, while one update is made of several passes
        self.reach = 0  # one more than the highest position, in either order, that ever staged an amax
        if model is not None:
            self._take_over(model)

    def _take_over(self, model: nn.Module) -> None:
        modules = [m for m in model.modules() if isinstance(m, Scaled)]
        if not modules:
            raise RecipeError(f"This {type(model).__name__} has no FP8 modules to make a session of; convert it first.")
        for module in modules:
            module.session.leave(module)
            module.session, module.position = self, self.enroll(module)

    @staticmethod
    def of(model: nn.Module) -> "Session":
        """The session of a model's FP8 modules. RecipeError if it has none, or more than one."""
        sessions: dict[int, Session] = {id(m.session): m.session for m in model.modules() if isinstance(m, Scaled)}
        if len(sessions) != 1:
            raise RecipeError(f"This model's FP8 modules have {len(sessions)} sessions; make one: Session(model).")
        return next(iter(sessions.values()))

    def enroll(self, module: Scaled, order: Order = Order.CREATED) -> Position:
        """Give a module the next position of an order."""
        with self._lock:
            position = Position(order, self._enrolled[order])
            self._enrolled[order] += 1
            self._modules[position] = module
        return position

    def copied(self, module: Scaled) -> Position:
        """Add a copied module, at its original's position in the copied session if that position is free."""
        position = module.position
        with self._lock:
            if position in self._modules:  # a shallow copy, which has its original's session
                return self.enroll(module, Order.COPIED)
            self._modules[position] = module
            self._enrolled[position.order] = max(self._enrolled[position.order], position.number + 1)
        return position

    def leave(self, module: Scaled) -> None:
        """Forget a module; its position stays empty."""
        with self._lock:
            self._modules.pop(module.position, None)

    def living(self) -> list[Scaled]:
        """All modules that exist, by position."""
        with self._lock:
            return [module for _, module in sorted(self._modules.items(), key=lambda item: item[0])]

    def staged(self, module: Scaled) -> None:
        """Note that a module has staged an amax."""
        if module.position.number >= self.reach:
            with self._lock:
                self.reach = max(self.reach, module.position.number + 1)

    def rule(self, recipe: DelayedScaling, group: Any) -> Numbered:
        """The rule of a recipe and a group; an existing equal one if there is any. The caller must hold it to keep it
        alive."""
        latest = self._latest
        if latest is None or not latest.rule.says(recipe, group):
            latest = self._latest = self._numbered(recipe, group)
        return latest

    def _numbered(self, recipe: DelayedScaling, group: Any) -> Numbered:
        rule = Rule(recipe, ReferenceType(group) if several(group) else None, session=self)
        with self._lock:
            for number, same in list(self._rules.items()):
                if same == rule:
                    return Numbered(number, same)
            number = RULES.add(rule)
            self._rules[number] = rule
            self._recent.append(rule)
        return Numbered(number, rule)

    def keep(self, number: int, rule: Rule) -> None:
        """Hold a rule as long as the session exists."""
        self._lasting[number] = rule

    def __reduce__(self) -> tuple[Any, ...]:
        return Session, ()  # a copy takes in the copies of its modules one by one


class _Common(Session):
    """The session of all modules whose model owns none."""

    def copied(self, module: Scaled) -> Position:
        """Copies have an order of their own."""
        return self.enroll(module, Order.COPIED)

    def __reduce__(self) -> tuple[Any, ...]:
        return common, ()


_COMMON = _Common()


def common() -> Session:
    """The session of all modules whose model owns none."""
    return _COMMON
