"""Reads preference pairs, a prompt and two completions in TRL's formats or OpenAI's, and tokenizes them.

    {"prompt": "...", "chosen": "...", "rejected": "..."}               text, tokenized without changes
    {"prompt": [...], "chosen": [...], "rejected": [...]}               messages, rendered by the chat template
    {"chosen": ..., "rejected": ...}                                    text or messages with an implicit prompt
    {"input": {"messages": [...], "tools": [...]}, "preferred_output": [...], "non_preferred_output": [...]}

An implicit prompt is the common prefix of both completions: whole messages, or text up to the last common white space,
so that no word is split. If the completions are conversations, a `prompt` that is text is ignored, as in TRL, because
some data sets have such a column. In a conversation, only the assistant's text after the prompt is in the loss mask.

A completion that is too long for the context is truncated and counted. A pair is dropped and counted if a completion
has no token in the loss mask, or if both completions are equal. This module needs no torch.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8serve.errors import DataError, shown
from fp8serve.model.text.chat_rows import decode_json, parse_messages, parse_tools, valid_unicode
from fp8serve.model.text.examples import (
    ChatExample,
    PromptExample,
    TokenizedExample,
    parse_row,
    tokenize_all,
)
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import Item, Row, RowCounts
from fp8serve.train.methods.interface import Reader

COMPLETIONS = ("chosen", "rejected")
OPENAI_COMPLETIONS = ("preferred_output", "non_preferred_output")
COLUMNS = ("prompt", *COMPLETIONS, "input", *OPENAI_COMPLETIONS, "tools", "functions")


@dataclass(frozen=True)
class PairExample:
    """Two examples with the same prompt and different completions."""

    chosen: PromptExample | ChatExample
    rejected: PromptExample | ChatExample


def _from_openai(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    request = row.get("input")
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise DataError(f"{where}: `input` is not an object with a list of `messages`.")
    completions = {name: row[openai_name] for name, openai_name in zip(COMPLETIONS, OPENAI_COMPLETIONS, strict=True)}
    return {"prompt": request["messages"], "tools": request.get("tools"), **completions}


def _text_or_messages(row: Mapping[str, Any], name: str, where: str) -> str | list[Any]:
    """Returns the column `name` as text or as a list of messages. CSV and Parquet files often hold messages as JSON."""
    value = row[name]
    if isinstance(value, str):
        return _parse_messages(value, f"{where}: `{name}`") or valid_unicode(value, f"{where}: `{name}`")
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: `{name}` is {shown(value)}, which is neither text nor a list of messages.")
    return value


def _common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns the length, in characters or messages, of the common prefix of `a` and `b`."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _parse_messages(text: str, where: str) -> list[Any] | None:
    """Returns the messages in JSON text, or None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        result = json.loads(text, parse_int=str)  # `int` refuses numbers with too many digits
    except (ValueError, RecursionError):
        return None
    if not (isinstance(result, list) and result and all(isinstance(m, dict) and "role" in m for m in result)):
        return None
    messages: list[Any] = decode_json(text, where)
    return messages


def _text_pair(prompt: str | list[Any] | None, completions: Sequence[Any], where: str) -> PairExample:
    if isinstance(prompt, list):
        raise DataError(
            f"{where}: `prompt` is a conversation, but `chosen` and `rejected` are text; give messages in all three."
        )
    if prompt is None:
        prefix: str = completions[0][: _common_prefix_length(*completions)]
        prompt = prefix[: max(prefix.rfind(space) for space in " \n\t") + 1].rstrip(" ")
        completions = [completion[len(prompt) :] for completion in completions]
    elif empty := [name for name, completion in zip(COMPLETIONS, completions, strict=True) if not completion]:
        raise DataError(f"{where}: `{empty[0]}` is empty.")
    chosen, rejected = (PromptExample(prompt, completion, where) for completion in completions)
    return PairExample(chosen, rejected)


def _chat_pair(prompt: list[Any] | None, completions: Sequence[Any], tools: tuple[Any, ...], where: str) -> PairExample:
    if prompt is None:
        prompt = completions[0][: min(_common_prefix_length(*completions), *(len(c) - 1 for c in completions))]
        completions = [completion[len(prompt) :] for completion in completions]
    masked_prompt = [{**m, "weight": 0} if isinstance(m, dict) else m for m in prompt]
    chosen, rejected = (
        ChatExample(parse_messages([*masked_prompt, *completion], f"{where}, `{name}`"), where, tools)
        for name, completion in zip(COMPLETIONS, completions, strict=True)
    )
    return PairExample(chosen, rejected)


@dataclass(frozen=True)
class Pair(Item):
    """Two completions of one prompt, each in a row with the prompt. `reference` holds the scores that the initial model
    gives them (chosen, rejected), or None before they are computed."""

    chosen: Row
    rejected: Row
    reference: tuple[float, float] | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.chosen, self.rejected


class DpoReader(Reader[PairExample, Pair]):
    """Reads preference pairs."""

    columns = COLUMNS
    requirement = "two different completions"
    advice = "check that `chosen` and `rejected` differ and raise seq_len if their prompt fills it"
    text_problem = "holds no pairs; give rows of `prompt`, `chosen` and `rejected`."

    def parse_row(self, row: str | Mapping[str, Any], where: str) -> PairExample:
        result = parse_row(row, where)
        is_openai = any(name in result for name in OPENAI_COMPLETIONS)
        if any(result.get(name) is None for name in (OPENAI_COMPLETIONS if is_openai else COMPLETIONS)):
            raise DataError(
                f"{where} has only {shown(sorted(result))}; give `chosen` and `rejected` with or without `prompt`, or "
                "`input`, `preferred_output` and `non_preferred_output`."
            )
        if is_openai:
            result = _from_openai(result, where)
        completions = [_text_or_messages(result, name, where) for name in COMPLETIONS]
        if isinstance(completions[0], str) != isinstance(completions[1], str):
            raise DataError(
                f"{where}: one of `chosen` and `rejected` is text and the other is messages; give both in one format."
            )
        prompt = _text_or_messages(result, "prompt", where) if result.get("prompt") is not None else None
        if isinstance(completions[0], str):
            return _text_pair(prompt, completions, where)
        return _chat_pair(None if isinstance(prompt, str) else prompt, completions, parse_tools(result, where), where)

    def tokenize(
        self, examples: Iterable[PairExample], tokenizer: Tokenizer, seq_len: int
    ) -> tuple[list[Pair], RowCounts]:
        pairs: list[Pair] = []
        count = truncated = 0
        completions = (completion for pair in examples for completion in (pair.chosen, pair.rejected))
        rows = (_row(tokenized) for _, tokenized in tokenize_all(completions, tokenizer, sys.maxsize))
        for chosen, rejected in zip(rows, rows, strict=True):
            count += 1
            truncated += any(row.tokens > seq_len for row in (chosen, rejected))
            pair = Pair(_truncated(chosen, seq_len), _truncated(rejected, seq_len))
            if all(row.trainable_tokens for row in pair.rows) and not np.array_equal(
                pair.chosen.ids, pair.rejected.ids
            ):
                pairs.append(pair)
        tokens, trainable = sum(p.tokens for p in pairs), sum(p.trainable_tokens for p in pairs)
        return pairs, RowCounts(count, len(pairs), tokens, trainable, count - len(pairs), truncated)

    def decode_item(self, rows: tuple[Row, ...], fields: bytes) -> Pair:
        chosen, rejected = rows
        return Pair(chosen, rejected)


def _row(example: TokenizedExample) -> Row:
    return Row(np.asarray(example.ids, dtype=np.int32), np.asarray(example.loss_mask, dtype=np.bool_))


def _truncated(row: Row, seq_len: int) -> Row:
    return Row(row.ids[: seq_len + 1], row.loss[: seq_len + 1])
