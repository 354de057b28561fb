"""Rows of preferences, a prompt and two answers in TRL's forms and in OpenAI's, become pairs of rows. No torch here.

    {"prompt": "...", "chosen": "...", "rejected": "..."}               text, as it is
    {"prompt": [...], "chosen": [...], "rejected": [...]}               messages, through the model's chat template
    {"chosen": ..., "rejected": ...}                                    either, with an implicit prompt
    {"input": {"messages": [...], "tools": [...]}, "preferred_output": [...], "non_preferred_output": [...]}

An implicit prompt is the common beginning of both answers: whole messages, or text up to the last common white space,
so that no word is split. A text `prompt` beside answers that are conversations is only a note, as in TRL, because data
sets have such columns. Of a conversation, only the assistant's text after the prompt is learnt.

An answer that is too long for the context is cut at its end, and counted. A pair teaches nothing if one of its answers
has no token left to learn, or if both are the same; such pairs are dropped, and counted.
"""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from fp8serve.errors import DataError, shown
from fp8serve.model.text.chat_rows import from_json, messages_of, tools_of, valid_unicode
from fp8serve.model.text.data_files import LIMITS, DataLimits
from fp8serve.model.text.examples import (
    ChatExample,
    PromptExample,
    TokenizedExample,
    object_of,
    read_rows,
    tokenize_all,
)
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import Row, RowCounts

ANSWERS = ("chosen", "rejected")
OPENAI = ("preferred_output", "non_preferred_output")
COLUMNS = ("prompt", *ANSWERS, "input", *OPENAI, "tools", "functions")
"""Those of a row that are read."""


@dataclass(frozen=True)
class PairExample:
    """Two examples that differ only in the learnt part."""

    chosen: PromptExample | ChatExample
    rejected: PromptExample | ChatExample


def read_pairs(source: Path | str, limits: DataLimits = LIMITS) -> Iterator[PairExample]:
    """All pairs of a source (`model.text.data_files`), in order. DataError while iterating: it has none, is too large,
    or has a broken row."""
    return read_rows(
        source, pair_of, "holds no pairs; give rows of `prompt`, `chosen` and `rejected`.", COLUMNS, limits
    )


def pair_of(row: str | Mapping[str, Any], where: str) -> PairExample:
    """The pair in a row or in a line of JSON; DataError names `where` and what is wrong."""
    result = object_of(row, where)
    is_openai = any(name in result for name in OPENAI)
    if any(result.get(name) is None for name in (OPENAI if is_openai else ANSWERS)):
        raise DataError(
            f"{where} has only {shown(sorted(result))}; give `chosen` and `rejected` with or without `prompt`, or "
            "`input`, `preferred_output` and `non_preferred_output`."
        )
    if is_openai:
        result = _from_openai(result, where)
    answers = [_read(result, name, where) for name in ANSWERS]
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise DataError(f"{where}: one of `chosen` and `rejected` is text and the other is not; give both alike.")
    prompt = _read(result, "prompt", where) if result.get("prompt") is not None else None
    if isinstance(answers[0], str):
        return _texts(prompt, answers, where)
    return _chats(None if isinstance(prompt, str) else prompt, answers, tools_of(result, where), where)


def _from_openai(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row in OpenAI's form as one of `prompt`, `chosen` and `rejected`."""
    request = row.get("input")
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise DataError(f"{where}: `input` is not an object with a list of `messages`.")
    answers = {name: row[theirs] for name, theirs in zip(ANSWERS, OPENAI, strict=True)}
    return {"prompt": request["messages"], "tools": request.get("tools"), **answers}


def _read(row: Mapping[str, Any], name: str, where: str) -> str | list[Any]:
    """Text, or a list of messages; columns of CSV and Parquet files often hold lists as JSON text."""
    value = row[name]
    if isinstance(value, str):
        return _messages_in(value, f"{where}: `{name}`") or valid_unicode(value, f"{where}: `{name}`")
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: `{name}` is {shown(value)}, which is neither text nor a list of messages.")
    return value


def _shared(one: Sequence[Any], two: Sequence[Any]) -> int:
    """The number of characters or messages that both have in common at the beginning."""
    pairs = zip(one, two, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def _messages_in(text: str, where: str) -> list[Any] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        result = json.loads(text, parse_int=str)  # of any length
    except (ValueError, RecursionError):
        return None
    if not (isinstance(result, list) and result and all(isinstance(m, dict) and "role" in m for m in result)):
        return None
    messages: list[Any] = from_json(text, where)
    return messages


def _texts(prompt: str | list[Any] | None, answers: Sequence[Any], where: str) -> PairExample:
    if isinstance(prompt, list):
        raise DataError(f"{where}: `prompt` is a conversation and the answers are text; give messages in all three.")
    if prompt is None:
        shared: str = answers[0][: _shared(*answers)]
        prompt = shared[: max(shared.rfind(space) for space in " \n\t") + 1].rstrip(" ")
        answers = [answer[len(prompt) :] for answer in answers]
    elif empty := [name for name, answer in zip(ANSWERS, answers, strict=True) if not answer]:
        raise DataError(f"{where}: `{empty[0]}` is empty.")
    chosen, rejected = (PromptExample(prompt, answer, where) for answer in answers)
    return PairExample(chosen, rejected)


def _chats(prompt: list[Any] | None, answers: Sequence[Any], tools: tuple[Any, ...], where: str) -> PairExample:
    if prompt is None:
        prompt = answers[0][: min(_shared(*answers), *(len(answer) - 1 for answer in answers))]
        answers = [answer[len(prompt) :] for answer in answers]
    context = [{**m, "weight": 0} if isinstance(m, dict) else m for m in prompt]
    chosen, rejected = (
        ChatExample(messages_of([*context, *answer], f"{where}, `{name}`"), where, tools)
        for name, answer in zip(ANSWERS, answers, strict=True)
    )
    return PairExample(chosen, rejected)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt. reference: their log-probabilities before the first step, once they are known."""

    chosen: Row
    rejected: Row
    reference: tuple[float, float] | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.chosen, self.rejected

    @property
    def tokens(self) -> int:
        return self.chosen.tokens + self.rejected.tokens

    @property
    def trainable(self) -> int:
        return self.chosen.trainable + self.rejected.trainable

    @property
    def extra(self) -> bytes:
        return b""


class DpoReader:
    """See `interface.Reader`."""

    columns: Collection[str] | None = COLUMNS
    lacks = "two different answers"
    advice = "check that `chosen` and `rejected` differ and raise seq_len if what they share fills it"

    def row(self, row: str | Mapping[str, Any], where: str) -> PairExample:
        return pair_of(row, where)

    def file(self, source: Path | str, limits: DataLimits) -> Iterator[PairExample]:
        return read_pairs(source, limits)

    def items(
        self, examples: Iterable[PairExample], tokenizer: Tokenizer, seq_len: int
    ) -> tuple[list[Pair], RowCounts]:
        pairs: list[Pair] = []
        count = truncated = 0
        answers = (answer for pair in examples for answer in (pair.chosen, pair.rejected))
        rows = (_row(tokenized) for _, tokenized in tokenize_all(answers, tokenizer, sys.maxsize))
        for whole in starmap(Pair, zip(rows, rows, strict=True)):
            count += 1
            truncated += any(row.tokens > seq_len for row in whole.rows)
            pair = Pair(_cut(whole.chosen, seq_len), _cut(whole.rejected, seq_len))
            if all(row.trainable for row in pair.rows) and not np.array_equal(pair.chosen.ids, pair.rejected.ids):
                pairs.append(pair)
        tokens, trainable = sum(p.tokens for p in pairs), sum(p.trainable for p in pairs)
        return pairs, RowCounts(count, len(pairs), tokens, trainable, count - len(pairs), truncated)

    def kept(self, item: Pair) -> bytes:
        return b""

    def recalled(self, rows: tuple[Row, ...], kept: bytes) -> Pair:
        chosen, rejected = rows
        return Pair(chosen, rejected)


def _row(example: TokenizedExample) -> Row:
    return Row(np.asarray(example.ids, dtype=np.int32), np.asarray(example.loss_mask, dtype=np.bool_))


def _cut(row: Row, seq_len: int) -> Row:
    return Row(row.ids[: seq_len + 1], row.loss[: seq_len + 1])
