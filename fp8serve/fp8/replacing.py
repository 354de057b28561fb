"""Dictionaries of a module that note when something in them is replaced.

torch keeps a module's tensors, children and hooks in dictionaries. Code that has joined tensors of many modules must
know before every call whether they are still in place. Checking takes longer the more modules there are, because their
objects are no longer in the processor's caches when a step of decoding begins. A dictionary that notes every change
needs a check only after a change.
"""

from collections import OrderedDict
from typing import Any

from torch import nn

DICTIONARIES = "_buffers", "_forward_hooks", "_forward_pre_hooks"  # of a layer


class Noting(OrderedDict[Any, Any]):
    """A dictionary that, at every change, adds `key` to `changed` for every such pair that was registered."""

    listeners: list[tuple[set[int], int]] | tuple[()] = ()

    def _note(self) -> None:
        for changed, key in self.listeners:
            changed.add(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._note()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._note()

    def pop(self, *args: Any) -> Any:
        self._note()
        return super().pop(*args)

    def popitem(self, last: bool = True) -> Any:
        self._note()
        return super().popitem(last)

    def clear(self) -> None:
        super().clear()
        self._note()


def note_changes(module: nn.Module, name: str, changed: set[int], key: int) -> None:
    """From now on a change of the module's dictionary `name` adds `key` to `changed`."""
    held = module.__dict__[name]
    if not isinstance(held, Noting):
        held = module.__dict__[name] = Noting(held)
    held.listeners = [*held.listeners, (changed, key)]
