"""Which token sequences a calibration or evaluation pass sees.

A sample is one sequence of 2 to `seq_len` tokens that starts where its example starts: short examples are kept as they
are, longer texts are cut into windows that count as samples of their own, longer prompts and chats lose their end. We
do not pack short texts into one long sequence: the largest activations of many models sit on the first token of a text,
and a packed sequence has one first token instead of ten. Sequences of a batch lie one behind the other, [tokens],
without padding, so that no padding token ever enters an amax.

Examples are visited in the order of a seeded shuffle and tokenized only until enough samples are there: a large file
costs no more than a small one. Held-out samples (for perplexity) are never calibration samples, unless the data are a
single sample.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.errors import DataError, ModelError
from fp8serve.model.examples import Example, read_examples, tokenize_whole
from fp8serve.model.tokenizer import Tokenizer

PASSAGES = Path(__file__).with_name("passages.jsonl")  # written for this project; no text of others
IGNORED = -100  # the target of a token that is not scored: cross_entropy's ignore_index


@dataclass(frozen=True)
class Sample:
    """One sequence: `ids[i]` is scored as a prediction where `scored[i]` (prompts are read, not scored)."""

    ids: tuple[int, ...]
    scored: tuple[bool, ...]


@dataclass(frozen=True)
class Batch:
    """Several sequences one behind the other; `targets[i]` is the id after `ids[i]`, or IGNORED."""

    ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], from 0 in every sequence
    targets: Tensor  # int64 [tokens]
    lengths: list[int]  # of each sequence

    @property
    def tokens(self) -> int:
        return int(self.ids.numel())


@dataclass(frozen=True)
class Batches:
    """What one calibration sees. `disjoint` is False when there was only one sample for both purposes."""

    calibration: list[Batch]
    held_out: list[Batch]
    disjoint: bool


def data_files(data: Path | str | Sequence[Path | str] | None) -> list[Path] | None:
    """One file, several, or None for the shipped passages."""
    if data is None:
        return None
    return [Path(data)] if isinstance(data, str | Path) else [Path(d) for d in data]


def source_names(files: list[Path] | None) -> tuple[str, ...]:
    return ("the passages shipped with fp8serve",) if files is None else tuple(str(f) for f in files)


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise DataError(f"{name} must be at least {least}, not {value}.")


def load_samples(
    data: Sequence[Path | str] | None, tokenizer: Tokenizer, vocab_size: int, *, count: int, seq_len: int, seed: int
) -> list[Sample]:
    """At most `count` samples of at most `seq_len` tokens from the files `data`, or from the shipped passages.

    DataError: a file cannot be read as examples, or no example has two tokens. ModelError: the tokenizer gives an id
    that a model of `vocab_size` tokens does not have.
    """
    at_least("samples", count, 1)
    at_least("seq_len", seq_len, 2)
    paths = [PASSAGES] if data is None else [Path(p) for p in data]
    examples = read_examples(paths)
    rng = random.Random(seed)
    rng.shuffle(examples)
    samples = _collect(examples, tokenizer, count, seq_len)
    if not samples:
        named = ", ".join(str(p) for p in paths) or "no files"
        raise DataError(f"The data ({named}) hold no example of at least two tokens; give more text.")
    _check_vocabulary(samples, vocab_size)
    rng.shuffle(samples)  # a long example that gave many windows must not fill the front alone
    return samples[:count]


def _collect(examples: Sequence[Example], tokenizer: Tokenizer, count: int, seq_len: int) -> list[Sample]:
    samples: list[Sample] = []
    for example in examples:
        pieces = tokenize_whole(example, tokenizer, seq_len)
        samples += [Sample(tuple(p.ids), tuple(p.loss_mask)) for p in pieces if len(p.ids) >= 2]
        if len(samples) >= count:
            break
    return samples


def _check_vocabulary(samples: Sequence[Sample], vocab_size: int) -> None:
    largest = max(max(s.ids) for s in samples)
    if largest >= vocab_size:
        raise ModelError(
            f"The tokenizer gives the token id {largest}, but the model has only {vocab_size} tokens; "
            "put the tokenizer.json of this model into its directory."
        )


def make_batches(samples: Sequence[Sample], batch_size: int, device: str = "cpu") -> list[Batch]:
    """Groups of `batch_size` samples in order; the last may be smaller."""
    at_least("batch_size", batch_size, 1)
    groups = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
    return [_batch(group, device) for group in groups]


def _batch(samples: Sequence[Sample], device: str) -> Batch:
    def column(rows: list[list[int]]) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.int64, device=device)

    return Batch(
        ids=column([list(s.ids) for s in samples]),
        positions=column([list(range(len(s.ids))) for s in samples]),
        targets=column([_targets(s) for s in samples]),
        lengths=[len(s.ids) for s in samples],
    )


def _targets(sample: Sample) -> list[int]:
    after = zip(sample.ids[1:], sample.scored[1:], strict=True)
    return [token if scored else IGNORED for token, scored in after] + [IGNORED]


def calibration_batches(
    data: Sequence[Path | str] | None,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    samples: int,
    seq_len: int,
    batch_size: int,
    seed: int,
    device: str = "cpu",
) -> Batches:
    """`samples` to calibrate on and an eighth of that (1 to 16) held out; fewer of both where the data are short."""
    at_least("samples", samples, 1)
    wanted = max(1, min(16, samples // 8))
    found = load_samples(data, tokenizer, vocab_size, count=samples + wanted, seq_len=seq_len, seed=seed)
    held = min(wanted, max(1, len(found) // 8))
    disjoint = len(found) > 1
    calibration = found[held:] if disjoint else found
    return Batches(
        make_batches(calibration, batch_size, device), make_batches(found[:held], batch_size, device), disjoint
    )
