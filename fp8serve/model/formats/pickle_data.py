"""Reads pickles as data: an interpreter for the opcodes that build values, which never imports or calls anything.

Python's own unpickler runs what a pickle tells it to; restricting the names it may import still lets the pickle call
what was allowed, set attributes on it, and size the memo. Here a global is a record of its name (`Global`), and an
object is a record of the call that would have made it (`Call`). The reader of the result decides what each record
means. So `os.system` in a pickle stays two strings.

Memory is bounded by the length of the input: lengths that reach beyond it are refused, the memo is a dictionary, and
nothing here recurses. Shared references are kept, so a small input can describe a huge tree: do not walk a result
without a bound. Opcodes that scaling states do not need (INST, OBJ, EXT, sets, out-of-band buffers) are refused.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8serve.errors import ScalesError


@dataclass(frozen=True)
class Global:
    """A name that the pickle wanted imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Call:
    """The call that the pickle asks for: `function(*args)`, an object that is then given `state`."""

    function: Any
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, eq=False)
class Persistent:
    """A reference to something outside of the pickle, such as torch's storages."""

    value: Any


def read_pickle(data: bytes | io.BytesIO) -> Any:
    """The value that one pickle describes, made of None, bool, int, float, str, bytes, tuple, list, dict and records.

    A stream is left where the pickle ends. ScalesError when it is damaged or uses what is not supported here.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.take(opcode.name, argument)
        return machine.result()
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
        raise ScalesError(f"The pickle is damaged ({type(error).__name__}: {str(error)[:120]}).") from None


class _Machine:
    """The stack and the memo of one pickle; `marks` are the heights at which items of a collection begin."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def take(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            self.stack.append(argument)
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in _IGNORED:
            raise ScalesError(f"The pickle holds the opcode {name}, which scaling states do not need; it is not read.")

    def result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise ValueError("the stack does not hold one value at the end")
        return self.stack[0]

    def pop(self) -> Any:
        return self.stack.pop()

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def drop(self, _: Any) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def top(self, kind: type[Any]) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"{type(self.stack[-1]).__name__} where {kind.__name__} was expected")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop_tuple(self) -> tuple[Any, ...]:
        value = self.pop()
        if not isinstance(value, tuple):
            raise ValueError(f"{type(value).__name__} where tuple was expected")
        return value

    def put(self, key: Any) -> None:
        self.memo[int(key)] = self.top(object)

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.top(object)

    def get(self, key: Any) -> None:
        self.stack.append(self.memo[int(key)])

    def named(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(Global(module, name))

    def named_on_stack(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a global whose name is not text")
        self.stack.append(Global(module, name))

    def call(self, _: Any) -> None:
        args = self.pop_tuple()
        self.stack.append(Call(self.pop(), args))

    def build(self, _: Any) -> None:
        state = self.pop()
        self.top(Call).state = state

    def persistent(self, _: Any) -> None:
        self.stack.append(Persistent(self.pop()))

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2 or not all(isinstance(key, str) for key in items[::2]):
            raise ValueError("a dictionary whose keys are not text")
        target.update(zip(items[::2], items[1::2], strict=True))

    def set_item(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def append(self, _: Any) -> None:
        item = self.pop()
        self.top(list).append(item)

    def dictionary(self, _: Any) -> None:
        items = self.pop_to_mark()
        self.stack.append({})
        self.set_items(items)


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_FRESH: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_IGNORED = {"PROTO", "FRAME", "STOP"}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": _Machine.mark,
    "POP": _Machine.drop,
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.append(m.top(object)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "MEMOIZE": _Machine.memoize,
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": _Machine.named_on_stack,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "LIST": lambda m, _: m.stack.append(m.pop_to_mark()),
    "DICT": _Machine.dictionary,
    "APPEND": _Machine.append,
    "APPENDS": lambda m, _: _extend(m),
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
}


def _extend(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    machine.top(list).extend(items)
