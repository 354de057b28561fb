"""Rows to answer become prompts, as token ids: a prompt, and the columns that its reward needs. No torch here.

    {"prompt": "...", ...}              text, as it is
    {"prompt": [...], ...}              messages, through the model's chat template
    {"messages": [...], ...}            likewise, with `tools` or without; OpenAI's form

A conversation ends before the assistant's turn, which is the answer. The grader gets all columns. A prompt that leaves
no room for an answer within the longest row, or has one token only, from which the first pass predicts nothing, is
dropped, and counted.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8serve.errors import DataError, Fp8ServeError, shown
from fp8serve.model.text.chat_rows import conversation_of, for_template, tools_of, valid_unicode
from fp8serve.model.text.data_files import LIMITS, DataLimits
from fp8serve.model.text.examples import object_of, read_rows
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import Row, RowCounts


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
            text = tokenizer.chat(for_template(self.messages), variables={"tools": list(self.tools) or None})
            return tokenizer.encode(text, add_special_tokens=False)
        except Fp8ServeError as problem:
            raise DataError(f"{self.where} cannot be tokenized: {problem}") from None


def read_prompts(source: Path | str, limits: DataLimits = LIMITS) -> Iterator[PromptExample]:
    """All prompts of a source (`model.text.data_files`), in order. DataError while iterating: it has none, is too
    large, or has a broken row."""
    return read_rows(source, prompt_of, "holds no prompts; give rows of `prompt`.", None, limits)


def prompt_of(row: str | Mapping[str, Any], where: str) -> PromptExample:
    """The prompt in a row or in a line of JSON; DataError names `where` and what is wrong."""
    result = object_of(row, where)
    present = [name for name in ("prompt", "messages") if result.get(name) is not None]
    if len(present) != 1:
        has = "both `prompt` and `messages`" if present else f"only {shown(sorted(result))}"
        raise DataError(f"{where} has {has}; give one of `prompt` and `messages`.")
    value = result[present[0]]
    if present[0] == "prompt" and isinstance(value, str):
        if not value:
            raise DataError(f"{where}: `prompt` is empty.")
        return PromptExample(result, where, valid_unicode(value, f"{where}: `prompt`"))
    messages = conversation_of(value, where, present[0])
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: `{present[0]}` ends with the assistant's answer, which the model is to write itself."
        )
    return PromptExample(result, where, None, messages, tools_of(result, where))


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer; `row` is the prompt alone, of which nothing is learnt."""

    row: Row
    example: PromptExample

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.row,)

    @property
    def tokens(self) -> int:
        return self.row.tokens

    @property
    def trainable(self) -> int:
        return 0

    @property
    def extra(self) -> bytes:
        """What the reward is told, which also decides the run."""
        return json.dumps(self.example.row, sort_keys=True, default=str).encode()


class GrpoReader:
    """See `interface.Reader`. longest: tokens of an answer."""

    columns: Collection[str] | None = None
    lacks = "a prompt of at least two tokens with room for an answer"
    advice = "raise seq_len, lower max_completion_length, or give longer prompts"

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def row(self, row: str | Mapping[str, Any], where: str) -> PromptExample:
        return prompt_of(row, where)

    def file(self, source: Path | str, limits: DataLimits) -> Iterator[PromptExample]:
        return read_prompts(source, limits)

    def items(
        self, examples: Iterable[PromptExample], tokenizer: Tokenizer, seq_len: int
    ) -> tuple[list[Prompt], RowCounts]:
        results = [(example, example.ids(tokenizer)) for example in examples]
        prompts = [Prompt(_row(ids), example) for example, ids in results if 1 < len(ids) <= seq_len - self.longest]
        tokens, dropped = sum(prompt.tokens for prompt in prompts), len(results) - len(prompts)
        return prompts, RowCounts(len(results), len(prompts), tokens, 0, dropped, 0)

    def kept(self, item: Prompt) -> bytes:
        """The row, which the reward is told, and where it is. Dates and maps of Parquet files are not JSON."""
        reported = [item.example.row, item.example.where]
        if json.loads(text := json.dumps(reported)) != reported:
            raise TypeError(f"{item.example.where} is not the same after it was written as JSON.")
        return text.encode()

    def recalled(self, rows: tuple[Row, ...], kept: bytes) -> Prompt:
        row, where = json.loads(kept)
        return Prompt(rows[0], prompt_of(row, where))


def _row(ids: list[int]) -> Row:
    return Row(np.asarray(ids, np.int32), np.zeros(len(ids), np.bool_))
