"""The rows and items that a run trains on, and the order of its steps. This module needs no torch.

A row is one document as token ids with a loss mask. The mask covers all tokens of a text, only the completion after a
prompt, or only the assistant's text in a chat (`model.text.examples`). An item of a method consists of one or more rows
(`methods.interface`). Rows are held in memory and take 5 bytes a token.

The order is a pure function of (seed, epoch), so a data cursor is two integers. Each epoch uses another permutation of
the items. With packing="rows" a microbatch is `batch_size` consecutive items of the permutation. With packing="tokens"
it is as many consecutive items as fit in a token budget. Items are never split, padded or dropped, so the last step of
an epoch may be smaller.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

Microbatch = tuple[int, ...]  # indices of items
Step = tuple[Microbatch, ...]  # the microbatches of one optimizer step


class Item(ABC):
    """The unit of which microbatches consist: one or more rows, which go through the model."""

    __slots__ = ()

    @property
    @abstractmethod
    def rows(self) -> "tuple[Row, ...]": ...

    @property
    def tokens(self) -> int:
        """The number of inputs of all rows."""
        return sum(row.tokens for row in self.rows)

    @property
    def trainable_tokens(self) -> int:
        """The number of targets in the loss mask."""
        return sum(row.trainable_tokens for row in self.rows)

    @property
    def extra(self) -> bytes:
        """Content besides the rows that changes the training, as bytes for the fingerprint of the data."""
        return b""


@dataclass(frozen=True, slots=True)
class Row(Item):
    """A tokenized document: `ids` int32 [n+1] and the loss mask `loss` bool [n+1]. Input ids[i] has target ids[i+1]."""

    ids: npt.NDArray[np.int32]
    loss: npt.NDArray[np.bool_]

    @property
    def tokens(self) -> int:
        return len(self.ids) - 1

    @property
    def trainable_tokens(self) -> int:
        return int(self.loss[1:].sum())

    @property
    def rows(self) -> "tuple[Row, ...]":
        return (self,)


@dataclass(frozen=True)
class RowCounts:
    """Counts of the data. `tokens` are the inputs of an epoch, `trainable_tokens` the targets in the loss mask."""

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
    """Reads and tokenizes `paths`. Raises DataError for an invalid file or line, for data beyond the limits, and if no
    row has a trainable token."""
    examples = (example for path in paths for example in reader.read_examples(path, limits))
    try:
        with nullcontext() if limits.memory is None else limited_memory(limits.memory):
            items, counts = reader.tokenize(examples, tokenizer, seq_len)
    except MemoryError:
        files, limit = ", ".join(paths), (limits.memory or 0) >> 20
        raise DataError(f"{files} takes more than {limit} MiB of memory to read and tokenize; give less.") from None
    if not items:
        raise no_trainable_row_error(reader, counts.examples, paths, seq_len)
    return items, counts


def no_trainable_row_error(reader: "Reader[Any, Any]", count: int, paths: Sequence[str], seq_len: int) -> DataError:
    """Returns the error for `count` examples of `paths` that were all dropped."""
    return DataError(
        f"None of the {count} examples in {', '.join(paths)} has {reader.requirement} within seq_len {seq_len}; "
        f"{reader.advice}."
    )


def fingerprint(items: Sequence[Item]) -> str:
    """Returns the SHA-256 over the ids, loss masks and `extra` of all items, in hex."""
    digest = hashlib.sha256()
    for item in items:
        for row in item.rows:
            digest.update(len(row.ids).to_bytes(8, "little") + row.ids.tobytes() + row.loss.tobytes())
        digest.update(item.extra)
    return digest.hexdigest()


def check_length(seq_len: int, model: ModelConfig) -> None:
    """Raises ModelError if `seq_len` is longer than the model's context."""
    if seq_len > model.max_position_embeddings:
        raise ModelError(
            f"seq_len {seq_len} is longer than the {model.max_position_embeddings} tokens of this model's "
            "trained context; lower seq_len."
        )


@dataclass(frozen=True)
class Cursor:
    """The position of the next step in the data: `step_in_epoch` of `epoch`, both from zero."""

    epoch: int = 0
    step_in_epoch: int = 0


def permutation(count: int, seed: int, epoch: int) -> list[int]:
    """Returns the order of `count` items in an epoch."""
    order = list(range(count))
    # A string is hashed with SHA-512, so the orders of neighbouring seeds and epochs are unrelated.
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def epoch_steps(lengths: Sequence[int], config: TrainConfig, epoch: int) -> list[Step]:
    """Returns the optimizer steps of one epoch. `lengths` holds the tokens of each item."""
    order = permutation(len(lengths), config.seed, epoch)
    if config.packing == "tokens":
        microbatches = _pack_tokens(order, lengths, config.batch_size * config.seq_len)
    else:
        microbatches = [tuple(order[i : i + config.batch_size]) for i in range(0, len(order), config.batch_size)]
    return [tuple(microbatches[i : i + config.accumulate]) for i in range(0, len(microbatches), config.accumulate)]


def _pack_tokens(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[Microbatch]:
    """Packs items into microbatches of at most `budget` tokens, next-fit, which keeps their order."""
    microbatches: list[Microbatch] = []
    current: list[int] = []
    tokens = 0
    for item in order:
        if current and tokens + lengths[item] > budget:
            microbatches.append(tuple(current))
            current, tokens = [], 0
        current.append(item)
        tokens += lengths[item]
    return [*microbatches, tuple(current)] if current else microbatches


def total_steps(lengths: Sequence[int], config: TrainConfig) -> int:
    if config.max_steps is not None:
        return config.max_steps
    return sum(len(epoch_steps(lengths, config, epoch)) for epoch in range(config.epochs))


def iterate_steps(
    lengths: Sequence[int], config: TrainConfig, start: Cursor, count: int
) -> Iterator[tuple[Step, Cursor]]:
    """Yields `count` steps from `start` on, across epochs, each with the cursor of the step after it."""
    epoch, position = start.epoch, start.step_in_epoch
    while count > 0:
        steps = epoch_steps(lengths, config, epoch)
        for index in range(position, len(steps))[:count]:
            is_last = index + 1 == len(steps)
            yield steps[index], Cursor(epoch + 1, 0) if is_last else Cursor(epoch, index + 1)
        count -= max(0, len(steps) - position)
        epoch, position = epoch + 1, 0
