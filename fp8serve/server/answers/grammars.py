"""Grammars of answers in which every call is valid: its tool exists, and its arguments fit the tool's schema.

`of_calls`: only calls. `of_strict_calls`: free text, in which a call must follow its schema from its opening mark on.
Both are in llguidance's dialect of Lark (engine/grammar.py), and both let a model think first. A mark
that is one token of the vocabulary must be named by its id: as text, the library does not treat it as that token.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8serve.server.answers.formats import Tools

WHITESPACE = r"\n? {0,24}"
"""Between the parts of a JSON text, as in engine/grammar.py: no model indents for ever."""


@dataclass(frozen=True)
class Shape:
    """The texts around calls: `opening`, then for each call `before`, its name, `then`, its arguments, `after`;
    `between` two calls, and `closing`. `mark`: the mark at which free text ends; "" if there is none. `several`:
    whether an answer may have several calls.
    """

    opening: str
    before: str
    then: str
    after: str
    between: str = ""
    closing: str = ""
    mark: str = ""
    several: bool = True


Thought = tuple[Sequence[str], Sequence[str], bool]
"""The marks that begin and end reasoning, and whether the prompt ends with one that begins it."""


@dataclass(frozen=True)
class CallGrammar:
    """Writes the grammars for one format. `tokens`: the ids of marks that are one token."""

    shape: Shape
    tools: Tools
    tokens: Mapping[str, int]
    thought: Thought | None = None

    def of_calls(self, several: bool = True, or_json: str | None = None) -> str:
        """Only calls, or JSON of the schema `or_json` instead."""
        rest = f" ({self._text(self.shape.between)} call)*" if several and self.shape.several else ""
        calls = f"calls: {self._text(self.shape.opening)} call{rest} {self._text(self.shape.closing)}"
        start = "start: thought calls" + ("" if or_json is None else "\n  | thought content")
        content = [] if or_json is None else [f"content: {_json(json.loads(or_json))}"]
        return "\n".join([start, calls, *content, *self._thinking(), *self._call()])

    def of_strict_calls(self) -> str:
        """Text with calls in it. The shape must have a mark with which its opening, or each of its calls, begins."""
        shape = self.shape
        if shape.opening:
            more = f"({self._text(shape.between)} call)*"
            calls = f"{self._text(shape.opening.removeprefix(shape.mark))} call {more} {self._text(shape.closing)}"
        else:
            calls = f"{self._text(shape.before.removeprefix(shape.mark))} named"
        start = ["start: thought (begun calls)* TEXT", self._until("begun", shape.mark), f"calls: {calls}"]
        return "\n".join([*start, *self._thinking(), *self._call()])

    def _call(self) -> list[str]:
        """The rules `call`, and `named`: a call after the text before its name."""
        rules = [f"call: {self._text(self.shape.before)} named"]
        names = " | ".join(f"named_{i}" for i in range(len(self.tools)))
        rules.append(f"named: {names}")
        for i, (name, schema) in enumerate(self.tools.items()):
            around = self._text(name + self.shape.then), self._text(self.shape.after)
            rules.append(f"named_{i}: {around[0]} arguments_{i} {around[1]}")
            rules.append(f"arguments_{i}: {_json({'type': 'object'} | dict(schema))}")
        return [*rules, r"TEXT: /(.|\n)*/"]

    def _thinking(self) -> list[str]:
        if self.thought is None:
            return ['thought: ""']
        openings, closings, opened = self.thought
        begin = "" if opened else f"({' | '.join(self._text(opening) for opening in openings)})"
        ends = [self._until(f"thought_end_{i}", closing) for i, closing in enumerate(closings)]
        end = f"({' | '.join(f'thought_end_{i}' for i in range(len(ends)))})"
        nothing = "" if opened else '\n  | ""'
        return [rf"thought: {begin} {end} /\s{{0,4}}/{nothing}", *ends]

    def _until(self, rule: str, mark: str) -> str:
        if mark.startswith(tuple(self.tokens)):
            return f"{rule}: TEXT {self._text(mark)}"
        return f"{rule}[lazy]: TEXT {_quoted(mark)}"

    def _text(self, text: str) -> str:
        """As a sequence of texts and tokens."""
        marks = "|".join(re.escape(mark) for mark in sorted(self.tokens, key=len, reverse=True))
        pieces = re.split(f"({marks})", text) if marks else [text]
        parts = [f"<[{self.tokens[piece]}]>" if piece in self.tokens else _quoted(piece) for piece in pieces if piece]
        return " ".join(parts) or '""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    guided = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(guided, ensure_ascii=False)}"
