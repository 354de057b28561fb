"""Which reader a model's answers need: named by the operator, or recognised by the model's own chat template.

A template contains the marks that its model was trained to write, because it writes them itself into the conversations
that it renders. A family is a row of `TOOL_FAMILIES` or of `REASONING_FAMILIES`; the first row whose mark a template
contains is that of its model. A template that takes no tools at all gets Hermes' form, which is then described to the
model (`model/text/chat.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

from fp8serve.server.answers import formats
from fp8serve.server.answers.feed import Arguments, Call, Content, Incremental, Part, Reader
from fp8serve.server.answers.formats import Tools
from fp8serve.server.answers.grammars import CallGrammar, Shape, Thought

ToolFormat = Literal["auto", "hermes", "llama3", "mistral", "granite", "deepseek", "qwen3-coder", "gpt-oss", "none"]
ReasoningFormat = Literal["auto", "think", "mistral", "granite", "gpt-oss", "none"]


@dataclass(frozen=True)
class ReasoningFamily:
    """How a family of models writes reasoning: between one of `openings` and one of `closings`.

    `template_marks`: texts by which its templates are recognised. `reader`: reads whole answers, where reasoning cannot
    be split off first. `special`: further marks that the reader needs, even if they are special tokens.
    """

    template_marks: tuple[str, ...]
    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    reader: Reader | None = None
    special: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolFamily:
    """How a family of models writes tool calls.

    `template_marks`: texts by which its templates are recognised. `calls`: reads them from text without reasoning.
    `special`: marks that the reader needs, even if they are special tokens. `shape`: of calls whose arguments are JSON,
    for a grammar; for others a call is required in Hermes' form. `reasoning`: that of the family, if it is always the
    same.
    """

    template_marks: tuple[str, ...]
    calls: Callable[..., Any] | None = None
    special: tuple[str, ...] = ()
    shape: Shape | None = None
    reasoning: ReasoningFamily | None = None


CHANNELS = ("<|channel|>", "<|message|>")
HARMONY = ReasoningFamily(
    ("<|channel|>",),
    ("<|channel|>analysis<|message|>",),
    ("<|end|><|start|>assistant",),
    formats.harmony,
    CHANNELS,
)
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
        special=CHANNELS,
        shape=Shape("", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", several=False),
        reasoning=HARMONY,
    ),
    "none": ToolFamily(("<arg_key>",)),  # GLM 4.5 and later: not read yet
    "qwen3-coder": ToolFamily(("<function=",), formats.qwen3_coder, ("<tool_call>", "</tool_call>")),
    "deepseek": ToolFamily(
        (formats.CALLS,),
        formats.deepseek,
        (formats.CALLS, formats.CALL, formats.SEPARATOR),
        Shape(
            formats.CALLS,
            f"{formats.CALL}function{formats.SEPARATOR}",
            "\n```json\n",
            f"\n```{formats.CALL_END}",
            between="\n",
            closing=formats.CALLS_END,
            mark=formats.CALLS,
        ),
    ),
    "mistral": ToolFamily(
        ("[TOOL_CALLS]",),
        formats.mistral,
        ("[TOOL_CALLS]", "[ARGS]"),
        Shape("[TOOL_CALLS] [", '{"name": "', '", "arguments": ', "}", between=", ", closing="]", mark="[TOOL_CALLS]"),
    ),
    "granite": ToolFamily(
        ("<|tool_call|>",),
        formats.granite,
        ("<|tool_call|>",),
        Shape("<|tool_call|>[", '{"name": "', '", "arguments": ', "}", between=", ", closing="]", mark="<|tool_call|>"),
    ),
    "hermes": ToolFamily(
        ("<tool_call>",),
        formats.hermes,
        ("<tool_call>", "</tool_call>"),
        Shape("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n", mark="<tool_call>"),
    ),
    "llama3": ToolFamily(
        ("ipython", formats.PYTHON_TAG),
        formats.llama3,
        (formats.PYTHON_TAG,),
        Shape("", '{"name": "', '", "parameters": ', "}", between="; "),
    ),
}
NO_TOOLS, NO_REASONING = ToolFamily(()), ReasoningFamily(())


@dataclass(frozen=True)
class AnswerFormat:
    """How one model's answers are read."""

    tools: ToolFormat = "none"
    reasoning: ReasoningFormat = "none"

    @property
    def _tool_family(self) -> ToolFamily:
        return TOOL_FAMILIES.get(self.tools, NO_TOOLS)

    @property
    def _reasoning_family(self) -> ReasoningFamily:
        return self._tool_family.reasoning or REASONING_FAMILIES.get(self.reasoning, NO_REASONING)

    @property
    def shape(self) -> Shape | None:
        """The shape of a call in a grammar, if the model's own form has one."""
        return self._tool_family.shape

    @property
    def forced(self) -> "AnswerFormat":
        """The form of a required call: Hermes' where the model's own form has no grammar."""
        return self if self.shape is not None else replace(self, tools="hermes")

    def call_grammar(self, tools: Tools, tokens: Mapping[str, int], prompt_end: str) -> CallGrammar:
        """The grammar of answers to a prompt with this end. `tokens`: ids of the vocabulary's added tokens."""
        shape = self._tool_family.shape
        assert shape is not None, self.tools
        thought = self._thought(prompt_end)
        return CallGrammar(shape, tools, tokens, thought)

    def _thought(self, prompt_end: str) -> Thought | None:
        family = self._reasoning_family
        if not family.openings or (family.reader is not None and self._tool_family.reasoning is None):
            return None
        is_open = family.reader is None and prompt_end.rstrip().endswith(family.openings)
        return family.openings, family.closings, is_open

    def reader(
        self, tools: Tools | None, prompt_end: str = "", one_call: bool = False, only_calls: bool = False
    ) -> "AnswerReader":
        """The reader of one answer to a request that may declare `tools`, and whose prompt ends with `prompt_end`.
        `one_call`: calls after the first are left out. `only_calls`: a grammar allows nothing else.
        """
        calls, thought = self._tool_family.calls, self._thought(prompt_end)
        first = self._reasoning_family.reader or (None if thought is None else formats.between(*thought))
        call_reader = None if tools is None or calls is None else partial(calls, tools=tools)
        return AnswerReader(first, call_reader, one_call, only_calls)

    def marks(self, with_tools: bool) -> set[str]:
        """Marks that must not be left out of the text, even if they are special tokens."""
        family = REASONING_FAMILIES.get(self.reasoning, NO_REASONING)
        around = family.special if family.reader is not None else (*family.openings, *family.closings)
        return {*around, *(self._tool_family.special if with_tools else ())}


class AnswerReader:
    """Splits off reasoning first, and reads calls from the rest."""

    def __init__(
        self, first: Reader | None, calls: Reader | None, one_call: bool = False, only_calls: bool = False
    ) -> None:
        self._one_call, self._begun, self._left_out = one_call, False, False
        self._only_calls = only_calls
        self._first = None if first is None else Incremental(first)
        self._calls = None if calls is None else Incremental(calls)

    def take(self, text: str, ends: bool, is_cut: bool = False) -> list[Part]:
        """The parts that `text` makes certain, and the rest as well if the answer `ends` with it. `is_cut`: a limit
        or a stop string ended it, not the model.
        """
        parts = self.push(text)
        if ends:
            parts += self._cut_off() if is_cut else self.end()
        return [part for part in parts if self._is_returned(part)]

    def _is_returned(self, part: Part) -> bool:
        if isinstance(part, Call):
            self._left_out = self._one_call and self._begun
            self._begun = True
        return not (self._left_out and isinstance(part, Call | Arguments))

    def push(self, text: str) -> list[Part]:
        """The parts of the answer that `text` makes certain."""
        if not text:
            return []
        return self._read_calls([Content(text)] if self._first is None else self._first.push(text))

    def end(self) -> list[Part]:
        """The rest."""
        parts = [] if self._first is None else self._read_calls(self._first.end())
        return parts + ([] if self._calls is None else self._calls.end())

    def _cut_off(self) -> list[Part]:
        """The rest, without a mark or a call that is not complete enough to be read."""
        parts = [] if self._first is None else self._read_calls(self._first.cut_off())
        parts += [] if self._calls is None else self._calls.cut_off()
        return [part for part in parts if not (self._only_calls and isinstance(part, Content))]

    def _read_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        result: list[Part] = []
        for part in parts:
            result += self._calls.push(part.text) if isinstance(part, Content) else [part]
        return result


def choose(template: str | None, takes_tools: bool, options: AnswerFormat) -> AnswerFormat:
    """`options`, with "auto" decided for a model with this chat template."""
    tools = _recognised(TOOL_FAMILIES, template or "") if takes_tools else "hermes"
    reasoning = _recognised(REASONING_FAMILIES, template or "")
    return AnswerFormat(
        cast(ToolFormat, tools) if options.tools == "auto" else options.tools,
        cast(ReasoningFormat, reasoning) if options.reasoning == "auto" else options.reasoning,
    )


def _recognised(families: Mapping[str, ToolFamily] | Mapping[str, ReasoningFamily], template: str) -> str:
    rows = families.items()
    return next((name for name, family in rows if any(mark in template for mark in family.template_marks)), "none")
