"""Selects the parser of a model's output: the operator names it, or the model's chat template reveals it.

A chat template renders earlier turns with the tags that the model was trained to write. A family of models is a row of
`TOOL_FAMILIES` or of `REASONING_FAMILIES`. The first row with one of its `template_tags` in the template is used. A
template without tools gets the Hermes format, which the prompt then describes to the model (`model/text/chat.py`).

A `CallGrammar` writes grammars of outputs in which every tool call is valid: the tool is declared and the arguments
match its schema. They are in llguidance's dialect of Lark (engine/grammar.py) and allow reasoning first. A tag that is
a token of the vocabulary is written as its token id, because llguidance does not match special tokens by their text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from fp8serve.server.output_parsers import family_parsers as parsers
from fp8serve.server.output_parsers.family_parsers import ToolSchemas
from fp8serve.server.output_parsers.incremental import (
    Arguments,
    Content,
    IncrementalParser,
    Parser,
    Part,
    ToolCallStart,
)

ToolFormat = Literal["auto", "hermes", "llama3", "mistral", "granite", "deepseek", "qwen3-coder", "gpt-oss", "none"]
ReasoningFormat = Literal["auto", "think", "mistral", "granite", "gpt-oss", "none"]
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


@dataclass(frozen=True)
class ReasoningFamily:
    """How a family of models writes reasoning: between one of `openings` and one of `closings`.

    Args:
        template_tags: texts that identify the family's chat templates.
        openings, closings: the tags around reasoning.
        parser: parses the complete output, for formats in which reasoning does not only come first.
        special_tokens: further special tokens that the parser needs in the text.
    """

    template_tags: tuple[str, ...]
    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    parser: Parser | None = None
    special_tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolFamily:
    """How a family of models writes tool calls.

    Args:
        template_tags: texts that identify the family's chat templates.
        parser: parses text without reasoning; None if calls are not parsed, or if `reasoning.parser` parses them.
        special_tokens: tags that the parser needs in the text, even if they are special tokens.
        syntax: the syntax of calls with JSON arguments, for grammars. Without it, required calls are in Hermes format.
        reasoning: the reasoning format, if the family has only one.
    """

    template_tags: tuple[str, ...]
    parser: Callable[..., Any] | None = None
    special_tokens: tuple[str, ...] = ()
    syntax: CallSyntax | None = None
    reasoning: ReasoningFamily | None = None


CHANNELS = ("<|channel|>", "<|message|>")
HARMONY = ReasoningFamily(
    ("<|channel|>",), ("<|channel|>analysis<|message|>",), ("<|end|><|start|>assistant",), parsers.harmony, CHANNELS
)
_JSON_CALL = ('{"name": "', '", "arguments": ', "}")
REASONING_FAMILIES: Mapping[str, ReasoningFamily] = {
    "gpt-oss": HARMONY,
    "mistral": ReasoningFamily(("[THINK]",), ("[THINK]",), ("[/THINK]",)),
    "think": ReasoningFamily(("</think>",), ("<think>",), ("</think>",)),
    "granite": ReasoningFamily(
        ("thought process:",),
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
}
TOOL_FAMILIES: Mapping[str, ToolFamily] = {
    "gpt-oss": ToolFamily(
        ("<|channel|>",),
        special_tokens=CHANNELS,
        syntax=CallSyntax(
            "", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", is_parallel=False
        ),
        reasoning=HARMONY,
    ),
    "none": ToolFamily(("<arg_key>",)),  # GLM 4.5 and later; there is no parser for its calls
    "qwen3-coder": ToolFamily(("<function=",), parsers.qwen3_coder, ("<tool_call>", "</tool_call>")),
    "deepseek": ToolFamily(
        (parsers.CALLS,),
        parsers.deepseek,
        (parsers.CALLS, parsers.CALL, parsers.SEPARATOR),
        CallSyntax(
            parsers.CALLS,
            f"{parsers.CALL}function{parsers.SEPARATOR}",
            "\n```json\n",
            f"\n```{parsers.CALL_END}",
            separator="\n",
            closing=parsers.CALLS_END,
            trigger=parsers.CALLS,
        ),
    ),
    "mistral": ToolFamily(
        ("[TOOL_CALLS]",),
        parsers.mistral,
        ("[TOOL_CALLS]", "[ARGS]"),
        CallSyntax("[TOOL_CALLS] [", *_JSON_CALL, separator=", ", closing="]", trigger="[TOOL_CALLS]"),
    ),
    "granite": ToolFamily(
        ("<|tool_call|>",),
        parsers.granite,
        ("<|tool_call|>",),
        CallSyntax("<|tool_call|>[", *_JSON_CALL, separator=", ", closing="]", trigger="<|tool_call|>"),
    ),
    "hermes": ToolFamily(
        ("<tool_call>",),
        parsers.hermes,
        ("<tool_call>", "</tool_call>"),
        CallSyntax(
            "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n", trigger="<tool_call>"
        ),
    ),
    "llama3": ToolFamily(
        ("ipython", parsers.PYTHON_TAG),
        parsers.llama3,
        (parsers.PYTHON_TAG,),
        CallSyntax("", '{"name": "', '", "parameters": ', "}", separator="; "),
    ),
}
NO_TOOLS, NO_REASONING = ToolFamily(()), ReasoningFamily(())


@dataclass(frozen=True)
class OutputFormat:
    """How a model writes tool calls and reasoning."""

    tools: ToolFormat = "none"
    reasoning: ReasoningFormat = "none"

    @property
    def _tool_family(self) -> ToolFamily:
        return TOOL_FAMILIES.get(self.tools, NO_TOOLS)

    @property
    def _reasoning_family(self) -> ReasoningFamily:
        return self._tool_family.reasoning or REASONING_FAMILIES.get(self.reasoning, NO_REASONING)

    @property
    def call_syntax(self) -> CallSyntax | None:
        """The syntax of a call in a grammar, or None if the format has no grammar."""
        return self._tool_family.syntax

    @property
    def for_required_calls(self) -> "OutputFormat":
        """The format in which calls can be enforced: this format, or Hermes' if this format has no grammar."""
        return self if self.call_syntax is not None else replace(self, tools="hermes")

    def call_grammar(self, tools: ToolSchemas, token_ids: Mapping[str, int], prompt_end: str) -> CallGrammar:
        """Returns the grammar of the output after a prompt that ends with `prompt_end`. `token_ids` are the ids of the
        vocabulary's added tokens."""
        syntax = self._tool_family.syntax
        assert syntax is not None, self.tools
        return CallGrammar(syntax, tools, token_ids, self._reasoning_tags(prompt_end))

    def _reasoning_tags(self, prompt_end: str) -> ReasoningTags | None:
        family = self._reasoning_family
        if not family.openings or (family.parser is not None and self._tool_family.reasoning is None):
            return None
        is_open = family.parser is None and prompt_end.rstrip().endswith(family.openings)
        return ReasoningTags(family.openings, family.closings, is_open)

    def parser(
        self, tools: ToolSchemas | None, prompt_end: str = "", single_call: bool = False, calls_only: bool = False
    ) -> "OutputParser":
        """Returns a parser for one output.

        Args:
            tools: the declared tools; None if calls are not parsed.
            prompt_end: the end of the prompt, in which reasoning may have been opened.
            single_call: whether calls after the first are dropped.
            calls_only: whether a grammar allowed nothing but calls, so that a truncated output has no content.
        """
        call_parser, tags = self._tool_family.parser, self._reasoning_tags(prompt_end)
        reasoning_parser = self._reasoning_family.parser
        if reasoning_parser is None and tags is not None:
            reasoning_parser = parsers.tagged_reasoning(*tags)
        tool_parser = None if tools is None or call_parser is None else partial(call_parser, tools=tools)
        return OutputParser(reasoning_parser, tool_parser, single_call, calls_only)

    def tags(self, with_tools: bool) -> set[str]:
        """Returns the tags that must be decoded into the text even if they are special tokens."""
        family = REASONING_FAMILIES.get(self.reasoning, NO_REASONING)
        tags = family.special_tokens if family.parser is not None else (*family.openings, *family.closings)
        return {*tags, *(self._tool_family.special_tokens if with_tools else ())}


class OutputParser:
    """Parses one output: reasoning first, then tool calls in the remaining text."""

    def __init__(
        self, reasoning: Parser | None, calls: Parser | None, single_call: bool = False, calls_only: bool = False
    ) -> None:
        self._single_call, self._has_call, self._drops_call = single_call, False, False
        self._calls_only = calls_only
        self._reasoning = None if reasoning is None else IncrementalParser(reasoning)
        self._calls = None if calls is None else IncrementalParser(calls)

    @property
    def is_passthrough(self) -> bool:
        """Whether all text is content."""
        return self._reasoning is None and self._calls is None

    def parse(self, text: str, is_last: bool, is_truncated: bool = False) -> list[Part]:
        """Returns the parts that `text` makes certain, and all remaining parts if `text` is the last of the output.
        `is_truncated` says that a limit or a stop string ended the output, not the model.
        """
        parts = self.push(text)
        if is_last:
            parts += self._finish_truncated() if is_truncated else self.finish()
        return [part for part in parts if self._is_returned(part)]

    def _is_returned(self, part: Part) -> bool:
        if isinstance(part, ToolCallStart):
            self._drops_call = self._single_call and self._has_call
            self._has_call = True
        return not (self._drops_call and isinstance(part, ToolCallStart | Arguments))

    def push(self, text: str) -> list[Part]:
        """Returns the parts that `text` makes certain."""
        if not text:
            return []
        return self._parse_calls([Content(text)] if self._reasoning is None else self._reasoning.push(text))

    def finish(self) -> list[Part]:
        """Returns the remaining parts of an output that the model ended."""
        parts = [] if self._reasoning is None else self._parse_calls(self._reasoning.finish())
        return parts + ([] if self._calls is None else self._calls.finish())

    def _finish_truncated(self) -> list[Part]:
        """Returns the remaining parts of a truncated output, without an incomplete tag or tool call."""
        parts = [] if self._reasoning is None else self._parse_calls(self._reasoning.finish_truncated())
        parts += [] if self._calls is None else self._calls.finish_truncated()
        return [part for part in parts if not (self._calls_only and isinstance(part, Content))]

    def _parse_calls(self, parts: list[Part]) -> list[Part]:
        """Replaces content by the calls and the content that the tool parser finds in it."""
        if self._calls is None:
            return parts
        result: list[Part] = []
        for part in parts:
            result += self._calls.push(part.text) if isinstance(part, Content) else [part]
        return result


def detect_format(template: str | None, takes_tools: bool, configured: OutputFormat) -> OutputFormat:
    """Returns the configured format, with "auto" replaced by what the chat template reveals."""
    tools = _detect_family(TOOL_FAMILIES, template or "") if takes_tools else "hermes"
    reasoning = _detect_family(REASONING_FAMILIES, template or "")
    return OutputFormat(
        cast(ToolFormat, tools) if configured.tools == "auto" else configured.tools,
        cast(ReasoningFormat, reasoning) if configured.reasoning == "auto" else configured.reasoning,
    )


def _detect_family(families: Mapping[str, ToolFamily] | Mapping[str, ReasoningFamily], template: str) -> str:
    rows = families.items()
    return next((name for name, family in rows if any(tag in template for tag in family.template_tags)), "none")
