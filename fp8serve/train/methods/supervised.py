"""Supervised fine-tuning: minimises the mean cross-entropy of all tokens in the loss mask.

A text longer than the context is split into windows that overlap by one token, so that every token is a target once. A
prompt with its completion, or a chat, is truncated instead, and counted. A row without a token in the loss mask is
dropped and counted. This module imports torch only to compute the loss.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8serve.model.text.data_files import LIMITS, DataLimits
from fp8serve.model.text.examples import (
    COLUMNS,
    Example,
    TextExample,
    TokenizedExample,
    parse_example,
    read_examples,
    tokenize_all,
)
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row, RowCounts
from fp8serve.train.methods.interface import Method, Metric, Reader

if TYPE_CHECKING:
    from torch import Tensor

    from fp8serve.train.forward import Logits


class SftReader(Reader[Example, Row]):
    """Reads texts, prompts with completions, and chats."""

    columns = COLUMNS
    requirement = "a token to learn from"
    advice = "check that completions or assistant turns are there and raise seq_len if prompts fill it"

    def parse_row(self, row: str | Mapping[str, Any], where: str) -> Example:
        return parse_example(row, where)

    def read_examples(self, source: Path | str, limits: DataLimits = LIMITS) -> Iterator[Example]:
        return read_examples([source], limits)

    def tokenize(self, examples: Iterable[Example], tokenizer: Tokenizer, seq_len: int) -> tuple[list[Row], RowCounts]:
        rows: list[Row] = []
        count = truncated = dropped = 0
        for example, tokenized in tokenize_all(examples, tokenizer, sys.maxsize):
            count += 1
            truncated += not isinstance(example, TextExample) and len(tokenized.ids) > seq_len + 1
            trainable_rows = [row for row in _rows(example, tokenized, seq_len) if row.trainable_tokens]
            dropped += not trainable_rows
            rows += trainable_rows
        tokens, trainable = sum(r.tokens for r in rows), sum(r.trainable_tokens for r in rows)
        return rows, RowCounts(count, len(rows), tokens, trainable, dropped, truncated)

    def decode_item(self, rows: tuple[Row, ...], fields: bytes) -> Row:
        return rows[0]


def _rows(example: Example, tokenized: TokenizedExample, seq_len: int) -> Iterator[Row]:
    ids, loss = np.asarray(tokenized.ids, dtype=np.int32), np.asarray(tokenized.loss_mask, dtype=np.bool_)
    windows = range(0, max(1, len(ids) - 1), seq_len) if isinstance(example, TextExample) else [0]
    for start in windows:
        yield Row(ids[start : start + seq_len + 1], loss[start : start + seq_len + 1])


class Sft(Method[Row]):
    """Supervised fine-tuning."""

    metrics = (Metric("train_mean_token_accuracy"),)

    def __init__(self, config: TrainConfig) -> None:
        self.device = config.device

    def count_loss_terms(self, items: Sequence[Row]) -> int:
        return sum(row.trainable_tokens for row in items)

    def compute_sums(self, logits: "Logits", items: Sequence[Row]) -> tuple["Tensor", ...]:
        """Returns the summed cross-entropy of all target tokens in nats, and the number of correct predictions."""
        from fp8serve.train.forward import collate, summed_loss

        batch = collate(items, self.device)
        return summed_loss(logits(batch), batch.targets)
