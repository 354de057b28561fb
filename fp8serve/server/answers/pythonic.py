"""Tool calls that a model writes as Python: `[get_weather(city="Paris"), roll(sides=6)]`, as Llama 3.2 and 4 do.

A list is read whole, because only Python's own grammar says what is in it; nothing of it is ever run.
"""

import ast
import json
from collections.abc import Collection, Generator
from typing import Any

from fp8serve.server.answers.feed import Arguments, Call, Content, Feed, Part

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
        found = [(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)) for name, arguments in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return found if all(name in names for name, _ in found) else None


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
