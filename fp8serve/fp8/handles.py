"""Numbers that stand for modules and rules: the only scaling tables that are global to the process.

A compiled graph can carry an integer until it runs, but no Python object. The tables hold their entries weakly, so a
number keeps nothing alive. No number is used twice. Everything else belongs to a session (session.py) or to a step
(steps.py).
"""

import threading
from itertools import count
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Handles(Generic[T]):
    """Objects by number, held weakly; safe to use from several threads."""

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
