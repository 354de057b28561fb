"""Files become prompts, as token ids. No torch here.

A prompt that leaves no room for an answer within the longest row, or has one token only, from which the first pass
predicts nothing, is dropped, and counted.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8serve.model.text.data_files import DataLimits
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import Row, RowCounts
from fp8serve.train.methods.grpo.prompts import PromptExample, prompt_of, read_prompts


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
    def beside(self) -> bytes:
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

    def file(self, given: Path | str, limits: DataLimits) -> Iterator[PromptExample]:
        return read_prompts(given, limits)

    def items(
        self, examples: Iterable[PromptExample], tokenizer: Tokenizer, seq_len: int
    ) -> tuple[list[Prompt], RowCounts]:
        found = [(example, example.ids(tokenizer)) for example in examples]
        prompts = [Prompt(_row(ids), example) for example, ids in found if 1 < len(ids) <= seq_len - self.longest]
        tokens, dropped = sum(prompt.tokens for prompt in prompts), len(found) - len(prompts)
        return prompts, RowCounts(len(found), len(prompts), tokens, 0, dropped, 0)

    def kept(self, item: Prompt) -> bytes:
        """The row, which the reward is told, and where it is. Dates and maps of Parquet files are not JSON."""
        told = [item.example.row, item.example.where]
        if json.loads(text := json.dumps(told)) != told:
            raise TypeError(f"{item.example.where} is not the same after it was written as JSON.")
        return text.encode()

    def recalled(self, rows: tuple[Row, ...], kept: bytes) -> Prompt:
        row, where = json.loads(kept)
        return Prompt(rows[0], prompt_of(row, where))


def _row(ids: list[int]) -> Row:
    return Row(np.asarray(ids, np.int32), np.zeros(len(ids), np.bool_))
