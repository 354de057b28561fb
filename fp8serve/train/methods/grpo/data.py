"""Reads rows as prompts and tokenizes them. All columns of a row go to the reward function. This module needs no torch.

    {"prompt": "...", ...}              text, tokenized without changes
    {"prompt": [...], ...}              messages, rendered by the model's chat template
    {"messages": [...], ...}            messages in OpenAI's format, with or without `tools`

A conversation must end before the assistant's turn, which the model generates. A prompt is dropped and counted if it
leaves no room for a completion within seq_len. A prompt of one token is dropped, too, because it has no target.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8serve.errors import DataError, Fp8ServeError, shown
from fp8serve.model.text.chat_rows import for_template, parse_conversation, parse_tools, valid_unicode
from fp8serve.model.text.examples import parse_row
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import Item, Row, RowCounts
from fp8serve.train.methods.interface import Reader


@dataclass(frozen=True)
class PromptExample:
    """A prompt before tokenization: `text`, or `messages` if `text` is None. `where` is "file:line"."""

    row: Mapping[str, Any]
    where: str
    text: str | None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the token ids that a server computes for this prompt. Raises DataError if the template refuses it."""
        try:
            if self.text is not None:
                return tokenizer.encode(self.text)
            text = tokenizer.chat(for_template(self.messages), variables={"tools": list(self.tools) or None})
            return tokenizer.encode(text, add_special_tokens=False)
        except Fp8ServeError as problem:
            raise DataError(f"{self.where} cannot be tokenized: {problem}") from None


@dataclass(frozen=True)
class Prompt(Item):
    """A tokenized prompt. No token of `row` is in the loss mask."""

    row: Row
    example: PromptExample

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.row,)

    @property
    def extra(self) -> bytes:
        """The row that the reward function receives, as bytes: it is part of the data's fingerprint."""
        return json.dumps(self.example.row, sort_keys=True, default=str).encode()


class GrpoReader(Reader[PromptExample, Prompt]):
    """Reads prompts."""

    requirement = "a prompt of at least two tokens with room for a completion"
    advice = "raise seq_len, lower max_completion_length, or give longer prompts"
    text_problem = "holds no prompts; give rows of `prompt`."

    def __init__(self, max_completion_tokens: int) -> None:
        self.max_completion_tokens = max_completion_tokens

    def parse_row(self, row: str | Mapping[str, Any], where: str) -> PromptExample:
        result = parse_row(row, where)
        present = [name for name in ("prompt", "messages") if result.get(name) is not None]
        if len(present) != 1:
            has = "both `prompt` and `messages`" if present else f"only {shown(sorted(result))}"
            raise DataError(f"{where} has {has}; give one of `prompt` and `messages`.")
        value = result[present[0]]
        if present[0] == "prompt" and isinstance(value, str):
            if not value:
                raise DataError(f"{where}: `prompt` is empty.")
            return PromptExample(result, where, valid_unicode(value, f"{where}: `prompt`"))
        messages = parse_conversation(value, where, present[0])
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: `{present[0]}` ends with the assistant's turn, which the model must generate; remove it."
            )
        return PromptExample(result, where, None, messages, parse_tools(result, where))

    def tokenize(
        self, examples: Iterable[PromptExample], tokenizer: Tokenizer, seq_len: int
    ) -> tuple[list[Prompt], RowCounts]:
        tokenized = [(example, example.ids(tokenizer)) for example in examples]
        max_prompt_tokens = seq_len - self.max_completion_tokens
        prompts = [
            Prompt(Row(np.asarray(ids, np.int32), np.zeros(len(ids), np.bool_)), example)
            for example, ids in tokenized
            if 1 < len(ids) <= max_prompt_tokens
        ]
        tokens, dropped = sum(prompt.tokens for prompt in prompts), len(tokenized) - len(prompts)
        return prompts, RowCounts(len(tokenized), len(prompts), tokens, 0, dropped, 0)

    def encode_fields(self, item: Prompt) -> bytes:
        """Returns the row and its "file:line" as JSON. Raises TypeError for values that JSON changes, such as the dates
        and maps of Parquet files."""
        fields = [item.example.row, item.example.where]
        if json.loads(text := json.dumps(fields)) != fields:
            raise TypeError(f"{item.example.where} has a value that JSON cannot represent exactly.")
        return text.encode()

    def decode_item(self, rows: tuple[Row, ...], fields: bytes) -> Prompt:
        row, where = json.loads(fields)
        return Prompt(rows[0], self.parse_row(row, where))
