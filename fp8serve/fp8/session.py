"""Session: the modules whose amaxes are reduced together over a process group, in an order that all ranks share.

    model = convert(model)                                # nothing to do: these modules belong to the common session
    session = Session(model)                              # optional: a session that the model owns
    with autocast(recipe=recipe, session=session):        # reduces only the amaxes of this model

Without a process group a session has no effect: a step updates the modules that ran in it. Over a group, all ranks must
agree on the position of each amax in the vector that they reduce. This includes a rank on which no module ran, whose
context names no model. So there is one common session per process, which orders its modules by their creation. Often
only one rank makes a copy of a model, for example for evaluation. Copies therefore have a second order and do not move
the positions of other modules. If the ranks have made different numbers of copies, the common session cannot match the
copies. A session that the model owns can: it uses a module's position in the model. A copy of such a model has its own
session, which takes no part in the collectives of other models.

A session holds its modules weakly and the modules hold the session, so it is freed with them. It also holds process
groups weakly, because `destroy_process_group` can end a group's threads and connections only if nothing refers to the
group. A gloo thread that still runs may release a tensor while the interpreter shuts down, which aborts the process.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary

from torch import nn

from fp8serve.errors import RecipeError
from fp8serve.fp8.distributed import ReductionState, has_other_ranks
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.scaling import Order, Position

if TYPE_CHECKING:
    from fp8serve.fp8.stateful import Stateful

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """A table of objects by an integer id. A compiled graph can hold an integer until it runs, but no object.

    The registry holds its objects weakly, so an id keeps no object alive. No id is used twice. It is safe to use from
    several threads.
    """

    def __init__(self) -> None:
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._ids = count()
        self._lock = threading.RLock()

    def add(self, item: T) -> int:
        """Adds an object and returns its new id."""
        with self._lock:
            id_ = next(self._ids)
            self._objects[id_] = item
        return id_

    def get(self, id_: int) -> T | None:
        """Returns the object of an id, or None if the object no longer exists."""
        return self._objects.get(id_)

    def __getitem__(self, id_: int) -> T:
        return self._objects[id_]

    def __len__(self) -> int:
        return len(self._objects)


MAX_RECENT_CONFIGS = 1024  # update configs that a session holds although no context uses them at the moment


@dataclass(frozen=True)
class UpdateConfig:
    """How delayed states are updated: by which recipe, and over which process group and session amaxes are reduced.

    `group_ref` is a weak reference to the group, or None if the group has no other rank.
    """

    recipe: DelayedScaling
    group_ref: "ReferenceType[Any] | None" = None
    session: "Session" = field(compare=False, kw_only=True, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)  # cached, because every staged amax needs it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.recipe, self.group_ref)))

    def __hash__(self) -> int:
        return self._hash

    def matches(self, recipe: DelayedScaling, group: Any) -> bool:
        """Returns whether the config has this recipe and group. Also False for a group of one rank."""
        own_group = None if self.group_ref is None else self.group_ref()
        is_alive = self.group_ref is None or own_group is not None
        return own_group is group and is_alive and self.recipe == recipe

    @property
    def reduces_amax(self) -> bool:
        """Whether amaxes are reduced over a process group."""
        return self.recipe.reduce_amax and self.group_ref is not None

    @property
    def group(self) -> Any:
        """The process group. Raises RecipeError if the group was destroyed."""
        group = None if self.group_ref is None else self.group_ref()
        if group is None:
            raise RecipeError("The process group was destroyed before the amaxes of this step were reduced over it.")
        return group

    @property
    def reduction_state(self) -> ReductionState:
        """What the ranks of the group have agreed on."""
        return self.session.reduction_states.setdefault(self.group, ReductionState())

    def check_module(self, module: "Stateful") -> None:
        """Raises RecipeError if the collective would leave out the module, because it belongs to another session."""
        if self.reduces_amax and module.session is not self.session:
            raise RecipeError(
                "This layer's amaxes belong to another session than the autocast reduces over the process group; "
                "name the session of its model: autocast(session=...)."
            )


MODULES: "WeakRegistry[Stateful]" = WeakRegistry()
UPDATE_CONFIGS: WeakRegistry[UpdateConfig] = WeakRegistry()


class RegisteredConfig(NamedTuple):
    """An update config and its id in `UPDATE_CONFIGS`."""

    id: int
    config: UpdateConfig


class Session:
    """The FP8 modules of one model, whose amaxes are reduced together over a process group.

    If a `model` is given, its FP8 modules leave the session that they were in and are ordered as in `model.modules()`.
    From then on the model owns the session. A copy of the model (`copy.deepcopy`, pickle) owns a new one:
    `Session.of(copy)`. Raises RecipeError if the model has no FP8 modules.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._modules: WeakValueDictionary[Position, Stateful] = WeakValueDictionary()
        self._next_numbers = dict.fromkeys(Order, 0)
        self._configs: WeakValueDictionary[int, UpdateConfig] = WeakValueDictionary()
        self._latest_config: RegisteredConfig | None = None
        # Holds configs between steps, so that the next step finds the config of the step before.
        self._recent_configs: deque[UpdateConfig] = deque(maxlen=MAX_RECENT_CONFIGS)
        self._retained_configs: dict[int, UpdateConfig] = {}  # used by compiled graphs
        self._lock = threading.RLock()
        self.reduction_states: WeakKeyDictionary[Any, ReductionState] = WeakKeyDictionary()  # by process group
        self.accumulator: Any = None  # the steps.StepAccumulator inside `accumulated_update`, else None
        # The history length with which all modules have states, if that is certain before a graph is traced.
        self.prepared_length: int | None = None
        self.num_positions = 0  # one more than the highest position, in either order, that ever staged an amax
        if model is not None:
            self._move_modules_of(model)

    def _move_modules_of(self, model: nn.Module) -> None:
        modules = _fp8_modules(model)
        if not modules:
            raise RecipeError(f"This {type(model).__name__} has no FP8 modules to make a session of; convert it first.")
        for module in modules:
            module.session.remove_module(module)
            module.session, module.position = self, self.add_module(module)

    @staticmethod
    def of(model: nn.Module) -> "Session":
        """Returns the session of a model's FP8 modules. Raises RecipeError if they have no session or several."""
        sessions = {id(module.session): module.session for module in _fp8_modules(model)}
        if len(sessions) != 1:
            raise RecipeError(f"This model's FP8 modules have {len(sessions)} sessions; make one: Session(model).")
        return next(iter(sessions.values()))

    def add_module(self, module: "Stateful", order: Order = Order.CREATED) -> Position:
        """Adds a module at the next position of an order and returns the position."""
        with self._lock:
            position = Position(order, self._next_numbers[order])
            self._next_numbers[order] += 1
            self._modules[position] = module
        return position

    def add_copy(self, module: "Stateful") -> Position:
        """Adds a copied module, at its original's position if that is free in this session; returns the position."""
        position = module.position
        with self._lock:
            if position in self._modules:  # a shallow copy, which has its original's session
                return self.add_module(module, Order.COPIED)
            self._modules[position] = module
            self._next_numbers[position.order] = max(self._next_numbers[position.order], position.number + 1)
        return position

    def remove_module(self, module: "Stateful") -> None:
        """Removes a module; its position stays empty."""
        with self._lock:
            self._modules.pop(module.position, None)

    def live_modules(self) -> list["Stateful"]:
        """Returns all modules that still exist, ordered by position."""
        with self._lock:
            return [module for _, module in sorted(self._modules.items(), key=lambda item: item[0])]

    def include_position_of(self, module: "Stateful") -> None:
        """Raises `num_positions` to include a module that stages an amax."""
        if module.position.number >= self.num_positions:
            with self._lock:
                self.num_positions = max(self.num_positions, module.position.number + 1)

    def update_config(self, recipe: DelayedScaling, group: Any) -> RegisteredConfig:
        """Returns the update config of a recipe and a group, an existing one if there is one.

        The caller must hold the config to keep it alive.
        """
        latest = self._latest_config
        if latest is None or not latest.config.matches(recipe, group):
            latest = self._latest_config = self._find_or_create_config(recipe, group)
        return latest

    def _find_or_create_config(self, recipe: DelayedScaling, group: Any) -> RegisteredConfig:
        config = UpdateConfig(recipe, ReferenceType(group) if has_other_ranks(group) else None, session=self)
        with self._lock:
            for id_, existing in list(self._configs.items()):
                if existing == config:
                    return RegisteredConfig(id_, existing)
            id_ = UPDATE_CONFIGS.add(config)
            self._configs[id_] = config
            self._recent_configs.append(config)
        return RegisteredConfig(id_, config)

    def retain_config(self, id_: int, config: UpdateConfig) -> None:
        """Holds an update config as long as the session exists."""
        self._retained_configs[id_] = config

    def __reduce__(self) -> tuple[Any, ...]:
        return Session, ()  # the copies of the modules add themselves to the copied session


def _fp8_modules(model: nn.Module) -> "list[Stateful]":
    from fp8serve.fp8.stateful import Stateful  # which imports this module

    return [module for module in model.modules() if isinstance(module, Stateful)]


class _CommonSession(Session):
    """The session of all modules whose model owns none."""

    def add_copy(self, module: "Stateful") -> Position:
        """Adds a copied module in the order of copies and returns its position."""
        return self.add_module(module, Order.COPIED)

    def __reduce__(self) -> tuple[Any, ...]:
        return common_session, ()


_COMMON = _CommonSession()


def common_session() -> Session:
    """Returns the session of all modules whose model owns none."""
    return _COMMON
