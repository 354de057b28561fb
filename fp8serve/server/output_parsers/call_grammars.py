"""Grammars of outputs in which every tool call is valid: the tool is declared and the arguments match its schema.

`CallGrammar.calls_only` requires calls. `CallGrammar.text_with_calls` allows text, but a valid call must follow each
trigger in it. Both grammars are in llguidance's dialect of Lark (engine/grammar.py) and allow reasoning first. A tag
that is a token of the vocabulary is written as its token id, because llguidance does not match special tokens by their
text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8serve.server.output_parsers.family_parsers import ToolSchemas

WHITESPACE = r"\n? {0,24}"
"""White space between the elements of JSON, as in engine/grammar.py. The bound keeps a model from indenting without
end."""


@dataclass(frozen=True)
class CallSyntax:
    """The texts around tool calls whose arguments are JSON.

    An output with calls is `opening`, then calls joined by `separator`, then `closing`. A call is `before_name`, the
    tool's name, `before_arguments`, the arguments, `after_arguments`. `trigger` is the tag at which text ends and calls
    begin, "" if there is none. `is_parallel` says whether an output may have several calls.
    """

    opening: str
    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    is_parallel: bool = True


class ReasoningTags(NamedTuple):
    """The tags that open and close reasoning. `is_open` says whether the prompt ends with an opening tag."""

    openings: Sequence[str]
    closings: Sequence[str]
    is_open: bool


@dataclass(frozen=True)
class CallGrammar:
    """Writes grammars for one syntax and the tools of one request. `token_ids` are the ids of tags that are tokens."""

    syntax: CallSyntax
    tools: ToolSchemas
    token_ids: Mapping[str, int]
    reasoning: ReasoningTags | None = None

    def calls_only(self, parallel: bool = True, or_json: str | None = None) -> str:
        """Returns the grammar of tool calls without text. If `or_json` is a JSON schema, JSON that matches this schema
        is also allowed instead of calls."""
        more = f" ({self._terms(self.syntax.separator)} call)*" if parallel and self.syntax.is_parallel else ""
        calls = f"calls: {self._terms(self.syntax.opening)} call{more} {self._terms(self.syntax.closing)}"
        start = "start: reasoning calls" + ("" if or_json is None else "\n  | reasoning content")
        content = [] if or_json is None else [f"content: {_json(json.loads(or_json))}"]
        return "\n".join([start, calls, *content, *self._reasoning_rules(), *self._call_rules()])

    def text_with_calls(self) -> str:
        """Returns the grammar of text that may contain tool calls. The syntax must have a trigger, with which its
        opening or each of its calls begins."""
        syntax = self.syntax
        if syntax.opening:
            more = f"({self._terms(syntax.separator)} call)*"
            opening = self._terms(syntax.opening.removeprefix(syntax.trigger))
            calls = f"{opening} call {more} {self._terms(syntax.closing)}"
        else:
            calls = f"{self._terms(syntax.before_name.removeprefix(syntax.trigger))} named"
        start, trigger = (
            "start: reasoning (until_trigger calls)* TEXT",
            self._text_until("until_trigger", syntax.trigger),
        )
        return "\n".join([start, trigger, f"calls: {calls}", *self._reasoning_rules(), *self._call_rules()])

    def _call_rules(self) -> list[str]:
        """Returns the rules `call` and `named`. The rule `named` is a call without the text before its name."""
        rules = [f"call: {self._terms(self.syntax.before_name)} named"]
        names = " | ".join(f"named_{i}" for i in range(len(self.tools)))
        rules.append(f"named: {names}")
        for i, (name, schema) in enumerate(self.tools.items()):
            before, after = self._terms(name + self.syntax.before_arguments), self._terms(self.syntax.after_arguments)
            rules.append(f"named_{i}: {before} arguments_{i} {after}")
            rules.append(f"arguments_{i}: {_json({'type': 'object'} | dict(schema))}")
        return [*rules, r"TEXT: /(.|\n)*/"]

    def _reasoning_rules(self) -> list[str]:
        if self.reasoning is None:
            return ['reasoning: ""']
        openings, closings, is_open = self.reasoning
        begin = "" if is_open else f"({' | '.join(self._terms(opening) for opening in openings)})"
        ends = [self._text_until(f"reasoning_end_{i}", closing) for i, closing in enumerate(closings)]
        end = f"({' | '.join(f'reasoning_end_{i}' for i in range(len(ends)))})"
        or_nothing = "" if is_open else '\n  | ""'
        return [rf"reasoning: {begin} {end} /\s{{0,4}}/{or_nothing}", *ends]

    def _text_until(self, rule: str, tag: str) -> str:
        if tag.startswith(tuple(self.token_ids)):
            return f"{rule}: TEXT {self._terms(tag)}"
        return f"{rule}[lazy]: TEXT {_quoted(tag)}"

    def _terms(self, text: str) -> str:
        """Returns `text` as a sequence of strings and token ids."""
        tags = "|".join(re.escape(tag) for tag in sorted(self.token_ids, key=len, reverse=True))
        pieces = re.split(f"({tags})", text) if tags else [text]
        ids = self.token_ids
        terms = [f"<[{ids[piece]}]>" if piece in ids else _quoted(piece) for piece in pieces if piece]
        return " ".join(terms) or '""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    guided = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(guided, ensure_ascii=False)}"
