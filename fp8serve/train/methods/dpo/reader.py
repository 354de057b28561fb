"""Files become pairs of rows. No torch here.

An answer that is too long for the context is cut at its end, and counted. A pair teaches nothing if one of its answers
has no token left to learn, or if both are the same; such pairs are dropped, and counted.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from fp8serve.model.text.data_files import DataLimits
from fp8serve.model.text.examples import TokenizedExample, tokenize_all
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.data import Row, RowCounts
from fp8serve.train.methods.dpo.pairs import COLUMNS, PairExample, pair_of, read_pairs


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
    def beside(self) -> bytes:
        return b""


class DpoReader:
    """See `interface.Reader`."""

    columns: Collection[str] | None = COLUMNS
    lacks = "two different answers"
    advice = "check that `chosen` and `rejected` differ and raise seq_len if what they share fills it"

    def row(self, row: str | Mapping[str, Any], where: str) -> PairExample:
        return pair_of(row, where)

    def file(self, given: Path | str, limits: DataLimits) -> Iterator[PairExample]:
        return read_pairs(given, limits)

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
