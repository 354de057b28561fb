"""Which reader a model's answers need: chosen by the operator, or found from the model's own chat template.

A template contains the marks that its model was trained to write, because it writes them itself into the conversations
that it renders; the table below begins with the most specific marks. A template that takes no tools
at all gets Hermes' form, which is then described to the model (`model/text/chat.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

from fp8serve.server.answers import formats, thinking
from fp8serve.server.answers.feed import Arguments, Call, Content, Incremental, Part, Reader
from fp8serve.server.answers.formats import Tools
from fp8serve.server.answers.grammars import SHAPES, CallGrammar, Thought
from fp8serve.server.answers.harmony import harmony

ToolFormat = Literal["auto", "hermes", "llama3", "mistral", "granite", "deepseek", "qwen3-coder", "gpt-oss", "none"]
ReasoningFormat = Literal["auto", "think", "mistral", "granite", "gpt-oss", "none"]

CALLS: Mapping[str, Any] = {
    "hermes": formats.hermes,
    "llama3": formats.llama3,
    "mistral": formats.mistral,
    "granite": formats.granite,
    "deepseek": formats.deepseek,
    "qwen3-coder": formats.qwen3_coder,
}
THOUGHTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "think": (("<think>",), ("</think>",)),
    "mistral": (("[THINK]",), ("[/THINK]",)),
    "granite": (
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
}
TOOLS_BY_MARK: tuple[tuple[str, ToolFormat], ...] = (
    ("<|channel|>", "gpt-oss"),
    ("<arg_key>", "none"),  # GLM 4.5 and later: not read yet
    ("<function=", "qwen3-coder"),
    (formats.CALLS, "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("ipython", "llama3"),
    (formats.PYTHON_TAG, "llama3"),
)
REASONING_BY_MARK: tuple[tuple[str, ReasoningFormat], ...] = (
    ("<|channel|>", "gpt-oss"),
    ("[THINK]", "mistral"),
    ("</think>", "think"),
    ("thought process:", "granite"),
)


MARKS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": (formats.PYTHON_TAG,),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "granite": ("<|tool_call|>",),
    "deepseek": (formats.CALLS, formats.CALL, formats.SEPARATOR),
    "qwen3-coder": ("<tool_call>", "</tool_call>"),
    "gpt-oss": ("<|channel|>", "<|message|>"),
}
"""Marks that readers of tool calls look for, and that may be special tokens of a tokenizer."""


@dataclass(frozen=True)
class AnswerFormat:
    """How one model's answers are read."""

    tools: ToolFormat = "none"
    reasoning: ReasoningFormat = "none"

    @property
    def forced(self) -> "AnswerFormat":
        """The form of a required call: Hermes' where the model's own form has no grammar."""
        return self if self.tools in SHAPES else replace(self, tools="hermes")

    def call_grammar(self, tools: Tools, tokens: Mapping[str, int], prompt_end: str) -> CallGrammar:
        """The grammar of answers to a prompt with this end. `tokens`: ids of the vocabulary's added tokens."""
        return CallGrammar(SHAPES[self.tools], tools, tokens, self._thought(prompt_end))

    def _thought(self, prompt_end: str) -> Thought | None:
        if self.tools == "gpt-oss":
            return ("<|channel|>analysis<|message|>",), ("<|end|><|start|>assistant",), False
        if self.reasoning not in THOUGHTS:
            return None
        openings, closings = THOUGHTS[self.reasoning]
        return openings, closings, prompt_end.rstrip().endswith(openings)

    def reader(
        self, tools: Tools | None, prompt_end: str = "", one_call: bool = False, only_calls: bool = False
    ) -> "AnswerReader":
        """The reader of one answer to a request that may declare `tools`, and whose prompt ends with `prompt_end`.
        `one_call`: calls after the first are left out. `only_calls`: a grammar allows nothing else.
        """
        call_reader = None if tools is None or self.tools not in CALLS else partial(CALLS[self.tools], tools=tools)
        return AnswerReader(self._first(prompt_end), call_reader, one_call, only_calls)

    def _first(self, prompt_end: str) -> Reader | None:
        if "gpt-oss" in (self.tools, self.reasoning):
            return harmony
        thought = self._thought(prompt_end)
        return None if thought is None else thinking.between(*thought)

    def marks(self, with_tools: bool) -> set[str]:
        """Marks that must not be left out of the text, even if they are special tokens."""
        thoughts = [mark for pair in THOUGHTS.get(self.reasoning, ()) for mark in pair]
        harmony_marks = MARKS["gpt-oss"] if self.reasoning == "gpt-oss" else ()
        return {*thoughts, *harmony_marks, *(MARKS.get(self.tools, ()) if with_tools else ())}


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
        return [part for part in parts if self._wanted(part)]

    def _wanted(self, part: Part) -> bool:
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
        found: list[Part] = []
        for part in parts:
            found += self._calls.push(part.text) if isinstance(part, Content) else [part]
        return found


def choose(template: str | None, takes_tools: bool, told: AnswerFormat) -> AnswerFormat:
    """`told`, with "auto" decided for a model with this chat template."""
    text = template or ""
    by_mark = next((name for mark, name in TOOLS_BY_MARK if mark in text), "none") if takes_tools else "hermes"
    thought = next((name for mark, name in REASONING_BY_MARK if mark in text), "none")
    return AnswerFormat(
        cast(ToolFormat, by_mark) if told.tools == "auto" else told.tools,
        cast(ReasoningFormat, thought) if told.reasoning == "auto" else told.reasoning,
    )
