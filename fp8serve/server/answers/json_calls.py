"""Tool calls that a model writes as JSON: `{"name": "f", "arguments": {...}}`, one or several, in a list or not.

A call is certain once its name is there and its arguments begin; from then on the arguments are passed on as the
model writes them, even if they turn out not to be JSON. If the members have another order, the object is read whole.
Text that is not a call is left alone: its reader passes it on as content.

Llama also writes calls as Python: `[f(x=1, y="a")]`.
"""

import ast
import json
import re
from collections.abc import Collection, Generator
from typing import Any

from fp8serve.server.answers.feed import Arguments, Call, Content, Feed, Part, accept, skip, until

_BETWEEN = " \t\r\n,;["  # two calls may stand in a list, or be joined by a semicolon
_AFTER = r"[\s,;\]]*"
_BEGUN = re.compile(
    r'[ \t\r\n,;\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OUTSIDE = re.compile(r'[^"{}\[\]\\\'<>`|()]*')
_STRING = re.compile(r'[^"\\]*')


class Nesting:
    """The depth in objects and lists of a JSON text that arrives in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self.depth, self.broken = depth, False
        self._in_string = self._escaped = False

    def read(self, text: str) -> tuple[int, bool]:
        """How many characters of `text` belong to the value, and whether it closes there; stops at invalid JSON."""
        at = 0
        while at < len(text) and not self.broken:
            at = self._run(text, at)
            if at < len(text):
                closed = self._step(text[at])
                at += not self.broken
                if closed:
                    return at, True
        return at, False

    def _run(self, text: str, at: int) -> int:
        """The index after the characters that do not change the depth."""
        if self._escaped:
            return at
        match = (_STRING if self._in_string else _OUTSIDE).match(text, at)
        return match.end() if match else at

    def _step(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._escaped = character == "\\"
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            return self.depth <= 0
        else:
            self.broken = True
        return False


def json_calls(
    feed: Feed, opening: str, closing: str = "", names: Collection[str] | None = None
) -> Generator[Part | None, None, bool]:
    """Reads the calls after the mark `opening`, and `closing` if the model writes it. False when there is no call.

    `names`: the only names that make a call.
    """
    if not (yield from json_call(feed, closing, names)):
        yield Content(feed.space + opening)
        return False
    while (yield from skip(feed, _AFTER)) == "{":
        if not (yield from json_call(feed, closing, names)):
            return True
    if closing:
        yield from accept(feed, closing)
    return True


def json_call(
    feed: Feed, closing: str = "", names: Collection[str] | None = None
) -> Generator[Part | None, None, bool]:
    """Reads one call; returns False and takes nothing when there is none."""
    nesting, read = Nesting(), 0
    while (begun := _BEGUN.match(feed.text)) is None:
        if not nesting.depth:
            read = len(feed.text) - len(feed.text.lstrip(_BETWEEN))
            if feed.text[read : read + 1] not in ("", "{"):
                return False
        length, closed = nesting.read(feed.text[read:])
        read += length
        if closed:
            return (yield from _whole(feed, read, names))
        if nesting.broken or feed.ended:
            return False
        yield None
    name = _loads(begun[1])
    if not isinstance(name, str) or (names is not None and name not in names):
        return False
    yield Call(name)
    feed.take(begun.end())
    if (yield from value(feed, closing)):
        yield from _rest_of_object(feed)
    return True


def _whole(feed: Feed, length: int, names: Collection[str] | None) -> Generator[Part, None, bool]:
    call = call_of(_loads(feed.text[:length].lstrip(_BETWEEN)))
    if call is None or (names is not None and call[0] not in names):
        return False
    feed.take(length)
    yield Call(call[0])
    yield Arguments(call[1])
    return True


def value(feed: Feed, closing: str = "") -> Generator[Part | None, None, bool]:
    """Yields a JSON value as arguments. False when it is not JSON; then everything up to `closing` was yielded."""
    nesting = Nesting()
    while True:
        length, closed = nesting.read(feed.text)
        if length:
            yield Arguments(feed.take(length))
        if closed:
            return True
        if nesting.broken or feed.ended:
            yield from until(feed, Arguments, (closing,) if closing else ())
            return False
        yield None


def _rest_of_object(feed: Feed) -> Generator[None, None, None]:
    """Skips the rest of the object after the arguments, to its brace, which may be missing."""
    following = yield from skip(feed)
    if following == "}":
        feed.take(1)
    elif following == ",":  # such as an id, of which we make our own
        nesting = Nesting(1)
        while True:
            length, closed = nesting.read(feed.text)
            feed.take(length)
            if closed or nesting.broken or feed.ended:
                return
            yield None


def call_of(value: Any) -> tuple[str, str] | None:
    """Name and arguments of a call, however its members are ordered and wrapped."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


LITERALS = {"true": True, "false": False, "null": None}
LONGEST = 65536  # characters


def pythonic_calls(feed: Feed, opening: str, names: Collection[str]) -> Generator[Part | None, None, bool]:
    """Reads the calls of a list that comes next. Returns False and takes nothing when there is none."""
    brackets = _Brackets()
    while (end := brackets.find_end(feed.text)) is None and not feed.ended and len(feed.text) < LONGEST:
        yield None
    calls = _read(feed.text[:end], names) if end is not None else None
    if calls is None:
        if opening:
            yield Content(opening)
        return False
    feed.take(end or 0)
    for name, arguments in calls:
        yield Call(name)
        yield Arguments(arguments)
    return True


class _Brackets:
    """Finds where a Python list that arrives in pieces ends."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote, self._escaped = "", False

    def find_end(self, text: str) -> int | None:
        """The index after the closing bracket; None when it has not come yet. Looks at each character once."""
        while self._at < len(text):
            character = text[self._at]
            self._at += 1
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None


def _read(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Names and arguments of calls; None when `text` is not a list of calls only."""
    try:
        parsed = ast.parse(text, mode="eval").body
        if not isinstance(parsed, ast.List) or not parsed.elts:
            return None
        calls = [_call(item) for item in parsed.elts]
        pairs = [(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)) for name, arguments in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return pairs if all(name in names for name, _ in pairs) else None


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """ValueError when it is not a call, or has positional arguments, whose names are unknown."""
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("not a call by keywords")
    return ast.unparse(node.func), {str(k.arg): _literal(k.value) for k in node.keywords}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in LITERALS:
        return LITERALS[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {str(ast.literal_eval(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k}
    return ast.literal_eval(node)
