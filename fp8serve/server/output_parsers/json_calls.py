"""Parsers of tool calls that are JSON, such as `{"name": "f", "arguments": {...}}`, alone or in a list.

A call is certain once its name is complete and its arguments begin. From then on the arguments are yielded as the model
writes them, even if they turn out to be invalid JSON. An object with another order of members is read to its end first.
Text that is not a call stays in the buffer, and the caller yields it as content.

Llama also writes calls as Python: `[f(x=1, y="a")]`.
"""

import ast
import json
import re
from collections.abc import Collection, Generator
from typing import Any

from fp8serve.server.output_parsers.incremental import (
    Arguments,
    Content,
    Part,
    TextBuffer,
    ToolCallStart,
    accept,
    parse_until,
    skip,
)

_SEPARATORS = " \t\r\n,;["  # calls may be elements of a list, or be joined by semicolons
_SEPARATORS_AFTER = r"[\s,;\]]*"
_CALL_START = re.compile(
    r'[ \t\r\n,;\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NO_STRUCTURE = re.compile(r'[^"{}\[\]\\\'<>`|()]*')
_STRING = re.compile(r'[^"\\]*')


class NestingDepth:
    """Counts the open objects and lists of a JSON text that arrives in pieces. `is_invalid` is set by a character that
    cannot be JSON."""

    def __init__(self, depth: int = 0) -> None:
        self.depth, self.is_invalid = depth, False
        self._in_string = self._is_escaped = False

    def read(self, text: str) -> tuple[int, bool]:
        """Returns how many characters of `text` belong to the JSON value, and whether the value is complete."""
        at = 0
        while at < len(text) and not self.is_invalid:
            at = self._skip_plain(text, at)
            if at < len(text):
                is_complete = self._read_character(text[at])
                at += not self.is_invalid
                if is_complete:
                    return at, True
        return at, False

    def _skip_plain(self, text: str, at: int) -> int:
        """Returns the index after the characters that cannot change the depth."""
        if self._is_escaped:
            return at
        match = (_STRING if self._in_string else _NO_STRUCTURE).match(text, at)
        return match.end() if match else at

    def _read_character(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = character == "\\"
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            return self.depth <= 0
        else:
            self.is_invalid = True
        return False


def json_calls(
    buffer: TextBuffer, opening: str, closing: str = "", names: Collection[str] | None = None
) -> Generator[Part | None, None, bool]:
    """Parses the calls after the tag `opening`, and consumes the tag `closing` if the model writes it. Returns False if
    there is no call; then `opening` was yielded as content. Only objects with one of `names` are calls, unless `names`
    is None.
    """
    if not (yield from json_call(buffer, closing, names)):
        yield Content(buffer.skipped_space + opening)
        return False
    while (yield from skip(buffer, _SEPARATORS_AFTER)) == "{":
        if not (yield from json_call(buffer, closing, names)):
            return True
    if closing:
        yield from accept(buffer, closing)
    return True


def json_call(
    buffer: TextBuffer, closing: str = "", names: Collection[str] | None = None
) -> Generator[Part | None, None, bool]:
    """Parses one call. Returns False and consumes nothing if the text is not a call."""
    nesting, length_read = NestingDepth(), 0
    while (call_start := _CALL_START.match(buffer.text)) is None:
        if not nesting.depth:
            length_read = len(buffer.text) - len(buffer.text.lstrip(_SEPARATORS))
            if buffer.text[length_read : length_read + 1] not in ("", "{"):
                return False
        length, is_complete = nesting.read(buffer.text[length_read:])
        length_read += length
        if is_complete:
            return (yield from _parse_complete_object(buffer, length_read, names))
        if nesting.is_invalid or buffer.ended:
            return False
        yield None
    name = _loads(call_start[1])
    if not isinstance(name, str) or (names is not None and name not in names):
        return False
    yield ToolCallStart(name)
    buffer.consume(call_start.end())
    if (yield from parse_json_arguments(buffer, closing)):
        yield from _skip_other_members(buffer)
    return True


def _parse_complete_object(
    buffer: TextBuffer, length: int, names: Collection[str] | None
) -> Generator[Part, None, bool]:
    call = _name_and_arguments(_loads(buffer.text[:length].lstrip(_SEPARATORS)))
    if call is None or (names is not None and call[0] not in names):
        return False
    buffer.consume(length)
    yield ToolCallStart(call[0])
    yield Arguments(call[1])
    return True


def parse_json_arguments(buffer: TextBuffer, closing: str = "") -> Generator[Part | None, None, bool]:
    """Yields a JSON value as arguments. Returns False if the value is invalid JSON; then all text up to `closing` was
    yielded as arguments."""
    nesting = NestingDepth()
    while True:
        length, is_complete = nesting.read(buffer.text)
        if length:
            yield Arguments(buffer.consume(length))
        if is_complete:
            return True
        if nesting.is_invalid or buffer.ended:
            yield from parse_until(buffer, Arguments, (closing,) if closing else ())
            return False
        yield None


def _skip_other_members(buffer: TextBuffer) -> Generator[None, None, None]:
    """Skips the rest of a call's object after its arguments, up to its closing brace, which the model may omit."""
    following = yield from skip(buffer)
    if following == "}":
        buffer.consume(1)
    elif following == ",":  # for example an id, which the server replaces by its own
        nesting = NestingDepth(1)
        while True:
            length, is_complete = nesting.read(buffer.text)
            buffer.consume(length)
            if is_complete or nesting.is_invalid or buffer.ended:
                return
            yield None


def _name_and_arguments(call: Any) -> tuple[str, str] | None:
    """Returns the name and the JSON arguments of a parsed call, or None if it is not a call. The call may be wrapped in
    `function`, and its arguments may be a string."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


LITERALS = {"true": True, "false": False, "null": None}
MAX_LIST_CHARACTERS = 65536


def pythonic_calls(buffer: TextBuffer, opening: str, names: Collection[str]) -> Generator[Part | None, None, bool]:
    """Parses a Python list of calls. Returns False if the text is no such list; then only `opening` was yielded."""
    brackets = _BracketMatcher()
    while (
        (end := brackets.find_end(buffer.text)) is None and not buffer.ended and len(buffer.text) < MAX_LIST_CHARACTERS
    ):
        yield None
    calls = _parse_python(buffer.text[:end], names) if end is not None else None
    if calls is None:
        if opening:
            yield Content(opening)
        return False
    buffer.consume(end or 0)
    for name, arguments in calls:
        yield ToolCallStart(name)
        yield Arguments(arguments)
    return True


class _BracketMatcher:
    """Finds the end of a Python list that arrives in pieces."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote, self._is_escaped = "", False

    def find_end(self, text: str) -> int | None:
        """Returns the index after the closing bracket, or None while the list is open. Reads each character once."""
        while self._at < len(text):
            character = text[self._at]
            self._at += 1
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = character == "\\"
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


def _parse_python(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Returns the names and JSON arguments of calls, or None if `text` is not a list of calls of `names`."""
    try:
        parsed = ast.parse(text, mode="eval").body
        if not isinstance(parsed, ast.List) or not parsed.elts:
            return None
        calls = [_python_call(item) for item in parsed.elts]
        pairs = [(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)) for name, arguments in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return pairs if all(name in names for name, _ in pairs) else None


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of a call. Raises ValueError for anything else, and for positional arguments,
    because their names are unknown."""
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
