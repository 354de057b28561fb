"""Which rows a step sees: a pure function of (seed, epoch), so that a data cursor is two integers.

Each epoch permutes the rows anew. A microbatch is either `batch_size` consecutive rows of the permutation ("rows"), or
as many whole consecutive rows as fit in a token budget ("tokens"). Rows are never split, padded or dropped: the last
step of an epoch is simply smaller. Nothing here knows about tensors.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8serve.train.config import TrainConfig

Microbatch = tuple[int, ...]  # row numbers
Step = tuple[Microbatch, ...]  # the microbatches whose gradients make one optimizer step


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
