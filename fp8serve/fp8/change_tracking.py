"""Change tracking: dictionaries and tensors of a module that notify listeners when an entry or a tensor is replaced.

torch holds a module's tensors, children and hooks in dictionaries. Code that has joined the tensors of many modules, or
has captured their addresses in a CUDA graph, must know before every call whether a tensor was replaced. A check of all
modules in every decoding step is slow, because their objects are not in the processor's caches. These classes record
changes, so the code checks only after a change.

Writing to a tensor's elements is no change. Two things are not noticed: a storage that is resized
(`tensor.untyped_storage().resize_`), and a dictionary of a module that another dictionary replaces
(`module.__dict__["_buffers"] = ...`). torch does neither to a module that is not sharded.
"""

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from fp8serve.fp8.torch_private import plain_torch_function

_HOOKS = "_forward_hooks", "_forward_pre_hooks"  # attributes of nn.Module
_TRACKED_DICTIONARIES = "_buffers", *_HOOKS
_MODULE_DICTIONARIES = "_modules", "_parameters", *_TRACKED_DICTIONARIES

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


class TrackedTensor(Tensor):
    """A tensor that notifies its listeners when it may have moved to other memory.

    `tensor.data = other` and `torch.utils.swap_tensors` both set an attribute; `set_` and `resize_` are methods. Ops
    treat it as a plain tensor and return plain tensors.
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

    def resize_(self, *args: Any, **options: Any) -> Any:
        _notify(self.listeners)
        return super().resize_(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrackedTensor":
        """Returns a view of the copied tensor, with copied listeners."""
        memo[id(self)] = view = deepcopy(self.detach(), memo).as_subclass(TrackedTensor)
        view.listeners = deepcopy(self.listeners, memo)
        return view


def track_view(tensor: Tensor, listener: Listener) -> TrackedTensor:
    """Returns another view of the tensor's memory: a TrackedTensor that notifies this listener."""
    view = tensor.as_subclass(TrackedTensor)
    view.listeners = [listener]
    return view


def track_tensor(tensor: Tensor, listener: Listener) -> None:
    """Makes the tensor itself a TrackedTensor that notifies this listener, too.

    A tensor of another subclass, such as a parameter, is not changed. A parameter cannot be tracked, because
    `nn.Parameter(x)` rejects an x of a subclass whose `detach` returns a plain tensor.
    """
    if type(tensor) is Tensor:
        tensor.__class__ = TrackedTensor
    if isinstance(tensor, TrackedTensor) and not any(_is_same(listener, other) for other in tensor.listeners):
        object.__setattr__(tensor, "listeners", [*tensor.listeners, listener])  # notifies no listener


def _notify(listeners: Sequence[Listener]) -> None:
    for changed, number in listeners:
        changed.add(number)


def track_children(parent: nn.Module, names: Sequence[str], listener: Listener) -> None:
    """Adds a listener for replaced children of `parent` and for replaced tensors and new hooks of its children `names`.

    It does not track whether a tensor moves to other memory; see `TrackedTensor`.
    """
    track_dictionary(parent, "_modules", listener)
    for name in names:
        for dictionary in _TRACKED_DICTIONARIES:
            track_dictionary(parent._modules[name], dictionary, listener)  # type: ignore[arg-type]  # not None


def track_dictionary(module: nn.Module, name: str, listener: Listener) -> None:
    """Adds a listener for changes of the module's dictionary of this name.

    A dictionary that has hooks already is not changed, because their handles remove them from this very dictionary.
    """
    tracked = module.__dict__[name]
    if not isinstance(tracked, TrackedDict):
        if name in _HOOKS and tracked:
            return
        tracked = module.__dict__[name] = TrackedDict(tracked)
    if not any(_is_same(listener, other) for other in tracked.listeners):
        tracked.listeners = [*tracked.listeners, listener]


def _is_same(one: Listener, other: Listener) -> bool:
    return one[0] is other[0] and one[1] == other[1]


def stop_tracking(tracked: Any, listener: Listener) -> None:
    """Removes a listener of a TrackedDict or TrackedTensor. Anything else is not changed."""
    if isinstance(tracked, TrackedDict | TrackedTensor):
        rest = [other for other in tracked.listeners if not _is_same(listener, other)]
        object.__setattr__(tracked, "listeners", rest)


class CapturedModel:
    """The modules, tensors and hooks of a model at the time of a capture. While this object exists, the memory of the
    tensors is not freed.

    `is_current` compares most of them only after a listener was notified of a change. At every call it compares only
    what cannot notify: the addresses of parameters, of which a served model has few, and the hooks of a module that had
    hooks before the capture.
    """

    def __init__(self, model: nn.Module) -> None:
        self._changed: set[int] = set()
        self._listener = listener = self._changed, 0
        for module, name in itertools.product(model.modules(), _MODULE_DICTIONARIES):
            track_dictionary(module, name, listener)
        tables = [module.__dict__[name] for module, name in itertools.product(model.modules(), _MODULE_DICTIONARIES)]
        values = [value for table in tables for value in table.values()]
        tensors = {id(value): value for value in values if isinstance(value, Tensor)}.values()
        for tensor in tensors:
            track_tensor(tensor, listener)
        self._tables = [(table, dict(table)) for table in tables]
        self._addresses = [(tensor, tensor.data_ptr()) for tensor in tensors]
        self._silent_tables = [pair for pair in self._tables if not isinstance(pair[0], TrackedDict)]
        self._silent_addresses = [pair for pair in self._addresses if not isinstance(pair[0], TrackedTensor)]
        self._storages = [tensor.untyped_storage() for tensor in tensors]  # references that keep the memory allocated

    def is_current(self) -> bool:
        """Returns whether the model still consists of the same modules, tensors and hooks."""
        if not self._changed:
            return _are_same(self._silent_tables, self._silent_addresses)
        if _are_same(self._tables, self._addresses):
            self._changed.clear()
            return True
        for tracked, _ in (*self._tables, *self._addresses):
            stop_tracking(tracked, self._listener)  # an outdated capture stays outdated
        return False


def _are_same(
    tables: Sequence[tuple[Mapping[Any, Any], Mapping[Any, Any]]], addresses: Sequence[tuple[Tensor, int]]
) -> bool:
    """Returns whether each table still has the entries that it is paired with, and each tensor the address."""
    for table, entries in tables:
        if len(table) != len(entries) or any(table.get(key) is not value for key, value in entries.items()):
            return False
    return all(tensor.data_ptr() == address for tensor, address in addresses)
