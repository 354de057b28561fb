"""Files become rows: what a training step may learn from, and how much of it that is. No torch here.

A row is one document as token ids plus a mask of the tokens that carry loss: all of a text, only the completion of a
prompt, only what the assistant says in a chat (`model.examples` decides which, for calibration as for training).

A text longer than the context is cut into windows that overlap by one token: every token is a target once. A prompt or
chat that is longer is truncated, and counted. A row in which no token carries loss teaches nothing and is dropped, and
counted; when that is every row, it is a DataError. Rows are held in memory, 5 bytes a token.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fp8serve.errors import DataError, ModelError
from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.text.examples import Example, TextExample, TokenizedExample, read_examples, tokenize
from fp8serve.model.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Row:
    """ids int32 [n+1]: n inputs and, one to the right, their n targets. loss bool [n+1]: which ids count as targets."""

    ids: npt.NDArray[np.int32]
    loss: npt.NDArray[np.bool_]

    @property
    def tokens(self) -> int:
        return len(self.ids) - 1

    @property
    def trainable(self) -> int:
        return int(self.loss[1:].sum())


@dataclass(frozen=True)
class RowCounts:
    """What the files hold. tokens: inputs per epoch; trainable_tokens: those whose successor carries loss."""

    examples: int
    rows: int
    tokens: int
    trainable_tokens: int
    dropped_rows: int
    truncated_rows: int

    @property
    def trainable_fraction(self) -> float:
        return self.trainable_tokens / self.tokens if self.tokens else 0.0


def load_rows(paths: Sequence[str], tokenizer: Tokenizer, seq_len: int) -> tuple[list[Row], RowCounts]:
    """Read and tokenize `paths`. Raises DataError for a bad file or line, and when no row has a token to learn."""
    examples = read_examples(paths)
    rows, report = rows_of(examples, tokenizer, seq_len)
    if not rows:
        raise DataError(
            f"None of the {report.examples} examples in {', '.join(paths)} has a token to learn from within seq_len "
            f"{seq_len}; check that completions or assistant turns are there and raise seq_len if prompts fill it."
        )
    return rows, report


def rows_of(examples: Sequence[Example], tokenizer: Tokenizer, seq_len: int) -> tuple[list[Row], RowCounts]:
    """The rows that have something to learn, in the order of `examples`, and the count of those that have not."""
    rows: list[Row] = []
    truncated = dropped = 0
    for example in examples:
        whole = tokenize(example, tokenizer, sys.maxsize)
        truncated += not isinstance(example, TextExample) and len(whole.ids) > seq_len + 1
        made = [row for row in _rows(example, whole, seq_len) if row.trainable]
        dropped += not made
        rows += made
    tokens, trainable = sum(r.tokens for r in rows), sum(r.trainable for r in rows)
    return rows, RowCounts(len(examples), len(rows), tokens, trainable, dropped, truncated)


def _rows(example: Example, whole: TokenizedExample, seq_len: int) -> Iterator[Row]:
    ids, loss = np.asarray(whole.ids, dtype=np.int32), np.asarray(whole.loss_mask, dtype=np.bool_)
    windows = range(0, max(1, len(ids) - 1), seq_len) if isinstance(example, TextExample) else [0]
    for start in windows:
        yield Row(ids[start : start + seq_len + 1], loss[start : start + seq_len + 1])


def fingerprint(rows: Sequence[Row]) -> str:
    """SHA-256 over every id and mask: two runs see the same data when it is equal."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.ids).to_bytes(8, "little") + row.ids.tobytes() + row.loss.tobytes())
    return digest.hexdigest()


def check_length(seq_len: int, model: ModelConfig) -> None:
    """Raises ModelError for a row longer than the model's context."""
    if seq_len > model.max_position_embeddings:
        raise ModelError(
            f"seq_len {seq_len} is longer than the {model.max_position_embeddings} tokens of this model's "
            "trained context; lower seq_len."
        )
