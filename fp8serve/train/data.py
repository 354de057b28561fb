"""Rows and items: what a training step learns from, and in which order. No torch here.

A row is one document as token ids plus a mask of the tokens that carry loss: all of a text, only the completion of a
prompt, only what the assistant says in a chat (`model.text.examples` decides which, for calibration as for training).
An item of a method is one such row or several (`methods.interface`). Rows are held in memory, 5 bytes a token.

The order is a pure function of (seed, epoch), so that a data cursor is two integers. Each epoch permutes the rows anew.
A microbatch is either `batch_size` consecutive rows of the permutation ("rows"), or as many whole consecutive rows as
fit in a token budget ("tokens"). Rows are never split, padded or dropped: the last step of an epoch is simply
smaller.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fp8serve.errors import DataError, ModelError
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.storage.memory import limited_memory
from fp8serve.model.text.data_files import LIMITS, DataLimits
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.config import TrainConfig

if TYPE_CHECKING:
    from fp8serve.train.methods.interface import Reader

Microbatch = tuple[int, ...]  # row numbers
Step = tuple[Microbatch, ...]  # the microbatches whose gradients make one optimizer step


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
    def extra(self) -> bytes:
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
    def extra(self) -> bytes:
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
    """SHA-256 over every id, mask and `extra`: two runs see the same data when it is equal."""
    digest = hashlib.sha256()
    for item in items:
        for row in item.rows:
            digest.update(len(row.ids).to_bytes(8, "little") + row.ids.tobytes() + row.loss.tobytes())
        digest.update(item.extra)
    return digest.hexdigest()


def check_length(seq_len: int, model: ModelConfig) -> None:
    """Raises ModelError for a row longer than the model's context."""
    if seq_len > model.max_position_embeddings:
        raise ModelError(
            f"seq_len {seq_len} is longer than the {model.max_position_embeddings} tokens of this model's "
            "trained context; lower seq_len."
        )


@dataclass(frozen=True)
class Cursor:
    """The next step to take: `step_in_epoch` of `epoch`, both from zero."""

    epoch: int = 0
    step_in_epoch: int = 0


def permutation(rows: int, seed: int, epoch: int) -> list[int]:
    """Seeding with a string goes through SHA-512, so neighbouring seeds and epochs are unrelated."""
    order = list(range(rows))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def epoch_steps(lengths: Sequence[int], config: TrainConfig, epoch: int) -> list[Step]:
    """The optimizer steps of one epoch. `lengths`: tokens per row."""
    order = permutation(len(lengths), config.seed, epoch)
    if config.packing == "tokens":
        microbatches = _fill(order, lengths, config.batch_size * config.seq_len)
    else:
        microbatches = [tuple(order[i : i + config.batch_size]) for i in range(0, len(order), config.batch_size)]
    return [tuple(microbatches[i : i + config.accumulate]) for i in range(0, len(microbatches), config.accumulate)]


def _fill(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[Microbatch]:
    """Next-fit: keeps the order, so a row's neighbours depend on nothing but the permutation."""
    full: list[Microbatch] = []
    current: list[int] = []
    used = 0
    for row in order:
        if current and used + lengths[row] > budget:
            full.append(tuple(current))
            current, used = [], 0
        current.append(row)
        used += lengths[row]
    return [*full, tuple(current)] if current else full


def total_steps(lengths: Sequence[int], config: TrainConfig) -> int:
    if config.max_steps is not None:
        return config.max_steps
    return sum(len(epoch_steps(lengths, config, epoch)) for epoch in range(config.epochs))


def walk(lengths: Sequence[int], config: TrainConfig, start: Cursor, count: int) -> Iterator[tuple[Step, Cursor]]:
    """`count` steps from `start` on, each with the cursor that follows it; continues into further epochs as needed."""
    epoch, position = start.epoch, start.step_in_epoch
    while count > 0:
        steps = epoch_steps(lengths, config, epoch)
        for index in range(position, len(steps))[:count]:
            last = index + 1 == len(steps)
            yield steps[index], Cursor(epoch + 1, 0) if last else Cursor(epoch, index + 1)
        count -= max(0, len(steps) - position)
        epoch, position = epoch + 1, 0
