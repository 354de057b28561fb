"""Rows and items: what a training step learns from, and their counts. No torch here.

A row is one document as token ids plus a mask of the tokens that carry loss: all of a text, only the completion of a
prompt, only what the assistant says in a chat (`model.examples` decides which, for calibration as for training). An
item of a method is one such row or several (`methods.interface`). Rows are held in memory, 5 bytes a token.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fp8serve.errors import DataError, ModelError
from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.storage.memory import limited_memory
from fp8serve.model.text.data_files import LIMITS, DataLimits
from fp8serve.model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fp8serve.train.methods.interface import Reader


@dataclass(frozen=True, slots=True)
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

    @property
    def rows(self) -> "tuple[Row, ...]":
        """The row itself: it is an item of one row."""
        return (self,)

    @property
    def beside(self) -> bytes:
        """b"": only the row decides what is learnt."""
        return b""


class Item(Protocol):
    """The unit that a step counts; the numbers are those of all its rows."""

    @property
    def tokens(self) -> int: ...

    @property
    def trainable(self) -> int: ...

    @property
    def rows(self) -> tuple[Row, ...]: ...

    @property
    def beside(self) -> bytes:
        """What else decides what is learnt from the item; b"" for nothing."""


@dataclass(frozen=True)
class RowCounts:
    """The contents of the files. tokens: inputs per epoch; trainable_tokens: those whose successor carries loss."""

    examples: int
    rows: int
    tokens: int
    trainable_tokens: int
    dropped_rows: int
    truncated_rows: int

    @property
    def trainable_fraction(self) -> float:
        return self.trainable_tokens / self.tokens if self.tokens else 0.0


def load_items(
    reader: "Reader[Any, Any]", paths: Sequence[str], tokenizer: Tokenizer, seq_len: int, limits: DataLimits = LIMITS
) -> tuple[list[Any], RowCounts]:
    """Read and tokenize `paths`, one example at a time. Raises DataError for a bad file or line, for more than the
    limits, and when no row has a token to learn."""
    examples = (example for path in paths for example in reader.file(path, limits))
    try:
        with nullcontext() if limits.memory is None else limited_memory(limits.memory):
            items, report = reader.items(examples, tokenizer, seq_len)
    except MemoryError:
        files, most = ", ".join(paths), (limits.memory or 0) >> 20
        raise DataError(f"{files} takes more than {most} MiB of memory to read and tokenize; give less.") from None
    if not items:
        raise nothing_to_learn(reader, report.examples, paths, seq_len)
    return items, report


def nothing_to_learn(reader: "Reader[Any, Any]", count: int, paths: Sequence[str], seq_len: int) -> DataError:
    """The error for `count` examples of `paths` that were all dropped."""
    return DataError(
        f"None of the {count} examples in {', '.join(paths)} has {reader.lacks} within seq_len {seq_len}; "
        f"{reader.advice}."
    )


def fingerprint(items: Sequence[Item]) -> str:
    """SHA-256 over every id, mask and `beside`: two runs see the same data when it is equal."""
    digest = hashlib.sha256()
    for item in items:
        for row in item.rows:
            digest.update(len(row.ids).to_bytes(8, "little") + row.ids.tobytes() + row.loss.tobytes())
        digest.update(item.beside)
    return digest.hexdigest()


def check_length(seq_len: int, model: ModelConfig) -> None:
    """Raises ModelError for a row longer than the model's context."""
    if seq_len > model.max_position_embeddings:
        raise ModelError(
            f"seq_len {seq_len} is longer than the {model.max_position_embeddings} tokens of this model's "
            "trained context; lower seq_len."
        )
