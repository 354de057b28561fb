"""Rows to answer: a prompt, and the columns that its reward needs. No torch here.

    {"prompt": "...", ...}              text, as it is
    {"prompt": [...], ...}              messages, through the model's chat template
    {"messages": [...], ...}            likewise, with `tools` or without; OpenAI's form

A conversation ends before the assistant's turn, which is the answer. The grader gets all columns.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError, Fp8ServeError, shown
from fp8serve.model.text.chat_rows import conversation_of, for_template, tools_of, valid_unicode
from fp8serve.model.text.data_files import LIMITS, DataLimits
from fp8serve.model.text.examples import object_of, read_rows
from fp8serve.model.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptExample:
    """text: the prompt, unless it is a conversation. where: "file:line"."""

    row: Mapping[str, Any]
    where: str
    text: str | None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """The token ids that a request would have. DataError: the template refuses the conversation."""
        try:
            if self.text is not None:
                return tokenizer.encode(self.text)
            said = tokenizer.chat(for_template(self.messages), variables={"tools": list(self.tools) or None})
            return tokenizer.encode(said, add_special_tokens=False)
        except Fp8ServeError as problem:
            raise DataError(f"{self.where} cannot be tokenized: {problem}") from None


def read_prompts(given: Path | str, limits: DataLimits = LIMITS) -> Iterator[PromptExample]:
    """All prompts of a source (`model.text.data_files`), in order. DataError while iterating: it has none, is too
    large, or has a broken row."""
    return read_rows(given, prompt_of, "holds no prompts; give rows of `prompt`.", None, limits)


def prompt_of(row: str | Mapping[str, Any], where: str) -> PromptExample:
    """The prompt in a row or in a line of JSON; DataError names `where` and what is wrong."""
    found = object_of(row, where)
    given = [name for name in ("prompt", "messages") if found.get(name) is not None]
    if len(given) != 1:
        has = "both `prompt` and `messages`" if given else f"only {shown(sorted(found))}"
        raise DataError(f"{where} has {has}; give one of `prompt` and `messages`.")
    value = found[given[0]]
    if given[0] == "prompt" and isinstance(value, str):
        if not value:
            raise DataError(f"{where}: `prompt` is empty.")
        return PromptExample(found, where, valid_unicode(value, f"{where}: `prompt`"))
    messages = conversation_of(value, where, given[0])
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: `{given[0]}` ends with the assistant's answer, which the model is to write itself.")
    return PromptExample(found, where, None, messages, tools_of(found, where))
