"""Change tracking: dictionaries and tensors of a module that notify listeners when an entry or a tensor is replaced.

torch holds a module's tensors, children and hooks in dictionaries. Code that has joined the tensors of many modules
must know before every call whether a tensor was replaced. A check of all modules in every decoding step is slow,
because their objects are not in the processor's caches. These classes record changes, so the code checks only after a
change.
"""

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from fp8serve.fp8.torch_private import plain_torch_function

_TRACKED_DICTIONARIES = "_buffers", "_forward_hooks", "_forward_pre_hooks"  # attributes of nn.Module

Listener = tuple[set[int], int]
"""A set and a number that is added to the set on a change."""


class TrackedDict(OrderedDict[Any, Any]):
    """A dictionary that notifies its listeners of every change."""

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


class TrackedView(Tensor):
    """A view of a joined tensor that notifies its listeners when it may have moved to other memory.

    `tensor.data = other` and `torch.utils.swap_tensors` both set an attribute; `set_` is a method. Ops treat the view
    as a plain tensor and return plain tensors. Writing to the elements notifies nobody, because the joined tensor has
    the same memory.
    """

    listeners: Sequence[Listener] = ()
    __torch_function__ = plain_torch_function

    def __setattr__(self, name: str, value: Any) -> None:
        listeners = self.listeners  # read first, because swap_tensors replaces the attribute
        super().__setattr__(name, value)
        _notify(listeners)

    def set_(self, *args: Any, **options: Any) -> Any:
        _notify(self.listeners)
        return super().set_(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrackedView":
        """Returns a view of the copied tensor, with copied listeners."""
        memo[id(self)] = view = deepcopy(self.detach(), memo).as_subclass(TrackedView)
        view.listeners = deepcopy(self.listeners, memo)
        return view


def track_view(tensor: Tensor, listener: Listener) -> TrackedView:
    """Returns the same view as a TrackedView that notifies this listener."""
    view = tensor.as_subclass(TrackedView)
    view.listeners = [listener]
    return view


def _notify(listeners: Sequence[Listener]) -> None:
    for changed, number in listeners:
        changed.add(number)


def track_children(parent: nn.Module, names: Sequence[str], listener: Listener) -> None:
    """Adds a listener for replaced children of `parent` and for replaced tensors and new hooks of its children `names`.

    It does not track whether a tensor moves to other memory; see `TrackedView`.
    """
    track_dictionary(parent, "_modules", listener)
    for name in names:
        for dictionary in _TRACKED_DICTIONARIES:
            track_dictionary(parent._modules[name], dictionary, listener)  # type: ignore[arg-type]  # not None


def track_dictionary(module: nn.Module, name: str, listener: Listener) -> None:
    """Adds a listener for changes of the module's dictionary of this name."""
    tracked = module.__dict__[name]
    if not isinstance(tracked, TrackedDict):
        tracked = module.__dict__[name] = TrackedDict(tracked)
    if not any(changed is listener[0] and number == listener[1] for changed, number in tracked.listeners):
        tracked.listeners = [*tracked.listeners, listener]
