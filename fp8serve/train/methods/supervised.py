"""Supervised fine-tuning: rows of files, and the mean cross-entropy of all tokens that carry loss.

A text longer than the context is cut into windows that overlap by one token: every token is a target once. A prompt or
chat that is longer is truncated, and counted. A row in which no token carries loss teaches nothing and is dropped, and
counted. No torch is loaded before the loss is computed.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8serve.model.text.data_files import DataLimits
from fp8serve.model.text.examples import (
    COLUMNS,
    Example,
    TextExample,
    TokenizedExample,
    example_of,
    read_examples,
    tokenize_all,
)
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row, RowCounts
from fp8serve.train.methods.interface import FromData, Measure

if TYPE_CHECKING:
    from torch import Tensor

    from fp8serve.train.forward import Logits


class SftReader:
    """See `interface.Reader`."""

    columns: Collection[str] | None = COLUMNS
    lacks = "a token to learn from"
    advice = "check that completions or assistant turns are there and raise seq_len if prompts fill it"

    def row(self, row: str | Mapping[str, Any], where: str) -> Example:
        return example_of(row, where)

    def file(self, source: Path | str, limits: DataLimits) -> Iterator[Example]:
        return read_examples([source], limits)

    def items(self, examples: Iterable[Example], tokenizer: Tokenizer, seq_len: int) -> tuple[list[Row], RowCounts]:
        rows: list[Row] = []
        count = truncated = dropped = 0
        for example, whole in tokenize_all(examples, tokenizer, sys.maxsize):
            count += 1
            truncated += not isinstance(example, TextExample) and len(whole.ids) > seq_len + 1
            created = [row for row in _rows(example, whole, seq_len) if row.trainable]
            dropped += not created
            rows += created
        tokens, trainable = sum(r.tokens for r in rows), sum(r.trainable for r in rows)
        return rows, RowCounts(count, len(rows), tokens, trainable, dropped, truncated)

    def kept(self, item: Row) -> bytes:
        return b""

    def recalled(self, rows: tuple[Row, ...], kept: bytes) -> Row:
        return rows[0]


def _rows(example: Example, whole: TokenizedExample, seq_len: int) -> Iterator[Row]:
    ids, loss = np.asarray(whole.ids, dtype=np.int32), np.asarray(whole.loss_mask, dtype=np.bool_)
    windows = range(0, max(1, len(ids) - 1), seq_len) if isinstance(example, TextExample) else [0]
    for start in windows:
        yield Row(ids[start : start + seq_len + 1], loss[start : start + seq_len + 1])


class Sft(FromData):
    """See `interface.Method`. It does not depend on the initial model."""

    measures: tuple[Measure, ...] = (Measure("train_mean_token_accuracy"),)

    def __init__(self, config: TrainConfig) -> None:
        self.device = config.device

    def weight(self, items: Sequence[Row]) -> int:
        return sum(row.trainable for row in items)

    def sums(self, logits: "Logits", items: Sequence[Row]) -> tuple["Tensor", ...]:
        """The sum of the loss, nats for each target, whichever row or microbatch it is in, and of right predictions."""
        from fp8serve.train.forward import collate, summed_loss

        batch = collate(items, self.device)
        return summed_loss(logits(batch), batch.targets)
