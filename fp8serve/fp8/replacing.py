"""Dictionaries and tensors of a module that note when something in them is replaced.

torch keeps a module's tensors, children and hooks in dictionaries. Code that has joined tensors of many modules must
know before every call whether they are still in place. Checking takes longer the more modules there are, because their
objects are no longer in the processor's caches when a step of decoding begins. These classes record every change, so
the caller checks only after one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from fp8serve.fp8.torch_private import plain_torch_function

_DICTIONARIES = "_buffers", "_forward_hooks", "_forward_pre_hooks"  # of a layer

Listener = tuple[set[int], int]
"""On a change, the number is added to the set."""


class Noting(OrderedDict[Any, Any]):
    """A dictionary that tells its listeners of every change."""

    listeners: Sequence[Listener] = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        _notify(self.listeners)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        _notify(self.listeners)

    def pop(self, *args: Any) -> Any:
        _notify(self.listeners)
        return super().pop(*args)

    def popitem(self, last: bool = True) -> Any:
        _notify(self.listeners)
        return super().popitem(last)

    def clear(self) -> None:
        super().clear()
        _notify(self.listeners)


class Part(Tensor):
    """A view of a joined tensor that tells its listeners when it may have been given other memory.

    `tensor.data = other` and `torch.utils.swap_tensors` both set an attribute; `set_` is a method. Ops see a plain
    tensor and return plain ones. Writing to the elements is no change: the joined tensor has the same.
    """

    listeners: Sequence[Listener] = ()
    __torch_function__ = plain_torch_function

    def __setattr__(self, name: str, value: Any) -> None:
        listeners = self.listeners  # a swapped tensor no longer has them
        super().__setattr__(name, value)
        _notify(listeners)

    def set_(self, *args: Any, **options: Any) -> Any:
        _notify(self.listeners)
        return super().set_(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Part":
        """A view of the copied tensor, with listeners of its own."""
        memo[id(self)] = part = deepcopy(self.detach(), memo).as_subclass(Part)
        part.listeners = deepcopy(self.listeners, memo)
        return part


def part(tensor: Tensor, listener: Listener) -> Part:
    """The same view, from now on with a listener."""
    part = tensor.as_subclass(Part)
    part.listeners = [listener]
    return part


def _notify(listeners: Sequence[Listener]) -> None:
    for changed, number in listeners:
        changed.add(number)


def note_replacements(owner: nn.Module, names: Sequence[str], listener: Listener) -> None:
    """From now on this listener is told when the owner gets another child, and when one of its children `names` gets
    another tensor or a hook. Their tensors themselves must be Parts to tell when they get other memory."""
    note_changes(owner, "_modules", listener)
    for name in names:
        for dictionary in _DICTIONARIES:
            note_changes(owner._modules[name], dictionary, listener)  # type: ignore[arg-type]  # a child is there


def note_changes(module: nn.Module, name: str, listener: Listener) -> None:
    """From now on a change of the module's dictionary `name` is told to this listener, too."""
    held = module.__dict__[name]
    if not isinstance(held, Noting):
        held = module.__dict__[name] = Noting(held)
    if not any(changed is listener[0] and number == listener[1] for changed, number in held.listeners):
        held.listeners = [*held.listeners, listener]
