"""Which token sequences a calibration or evaluation pass sees.

A sample is one sequence of 2 to `seq_len` tokens that starts where its example starts: short examples are kept as they
are, longer texts are cut into windows that are separate samples, longer prompts and chats lose their end. Short texts
are not packed into one long sequence: in many models the first token of a text has the largest activations, and a
packed sequence has one first token instead of ten. Sequences of a batch are concatenated, [tokens], without padding, so
that no padding token ever enters an amax.

Examples are visited in the order of a seeded hash of their content and tokenized only until enough samples are there: a
large file costs no more than a small one, and neither the order of files and lines nor a repetition changes anything.
Later windows of a long text are read only when all texts together have too few first windows, and no text is tokenized
further than all samples together can hold.

All of a user's data are calibration data. Quality is measured on text that the user names, or on the passages that ship
with fp8serve; without any data on an eighth of those passages. Whole examples are held out, and an example that is in
both sets is not calibrated on. Examples are equal if their content is, letter by letter.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.errors import DataError, ModelError
from fp8serve.model.text.data_files import source_name
from fp8serve.model.text.examples import (
    ChatExample,
    Example,
    TextExample,
    TokenizedExample,
    read_examples,
    tokenize_pieces,
)
from fp8serve.model.text.tokenizer import Tokenizer

PASSAGES = Path(__file__).with_name("passages.jsonl")  # written for this project
IGNORED = -100  # the target of a token that is not scored: cross_entropy's ignore_index


@dataclass(frozen=True)
class Sample:
    """One sequence: `ids[i]` is scored as a prediction where `scored[i]` (prompts are read, not scored)."""

    ids: tuple[int, ...]
    scored: tuple[bool, ...]
    document: bytes = b""  # the key of its example


@dataclass(frozen=True)
class Batch:
    """Several sequences, concatenated; `targets[i]` is the id after `ids[i]`, or IGNORED."""

    ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], from 0 in every sequence
    targets: Tensor  # int64 [tokens]
    lengths: list[int]  # of each sequence

    @property
    def tokens(self) -> int:
        return int(self.ids.numel())


@dataclass(frozen=True)
class Batches:
    """The samples of one calibration. `excluded`: examples of the data that were left out because they are held out."""

    calibration: list[Batch]
    held_out: list[Batch]
    excluded: int = 0
    documents: int = 0  # examples that the calibration samples come from
    held_out_documents: int = 0

    @property
    def samples(self) -> int:
        """To calibrate on."""
        return sum(len(batch.lengths) for batch in self.calibration)

    @property
    def tokens(self) -> int:
        """To calibrate on."""
        return sum(batch.tokens for batch in self.calibration)


def source_names(data: Sequence[Path | str] | None) -> tuple[str, ...]:
    return ("the passages shipped with fp8serve",) if data is None else tuple(map(source_name, data))


def documents(samples: Sequence[Sample]) -> int:
    """The number of examples that the samples come from."""
    return len({s.document for s in samples})


def load_samples(
    data: Sequence[Path | str] | None, tokenizer: Tokenizer, vocab_size: int, *, count: int, seq_len: int, seed: int
) -> list[Sample]:
    """At most `count` samples of at most `seq_len` tokens from the files `data`, or from the shipped passages.

    DataError: a file cannot be read as examples, or no example has two tokens. ModelError: the tokenizer gives an id
    that a model of `vocab_size` tokens does not have.
    """
    source = _Source(data, seed)
    samples = source.samples(source.keys, tokenizer, vocab_size, count, seq_len)[0]
    random.Random(seed).shuffle(samples)  # otherwise all first windows would come first
    return samples


class _Source:
    """The different examples of some files by their keys, in an order that only the content and the seed decide."""

    def __init__(self, data: Sequence[Path | str] | None, seed: int) -> None:
        self._shipped = data is None
        sources = [PASSAGES] if data is None else data
        self.named = ", ".join(map(source_name, sources)) or "no files"
        self._examples = {_key(example, seed): example for example in read_examples(sources)}
        self.keys = sorted(self._examples)

    def samples(
        self, keys: Sequence[bytes], tokenizer: Tokenizer, vocab_size: int, count: int, seq_len: int
    ) -> tuple[list[Sample], int]:
        """(at most `count` samples, how many of the examples `keys` were read): first windows of as many examples as
        needed, and only then their second windows, so that the samples come from many texts."""
        windows: list[list[Sample]] = []
        read = 0
        for key in keys:
            pieces = self._pieces(self._examples[key], tokenizer, seq_len, count)
            samples = [Sample(tuple(p.ids), tuple(p.loss_mask), key) for p in pieces if len(p.ids) >= 2]
            windows += [samples] if samples else []
            read += 1
            if len(windows) >= count:
                break
        results = [s for nth in zip_longest(*windows) for s in nth if s is not None][:count]
        if not results:
            raise DataError(f"The data ({self.named}) hold no example of at least two tokens; give more text.")
        _check_vocabulary(results, vocab_size)
        return results, read

    def _pieces(self, example: Example, tokenizer: Tokenizer, seq_len: int, count: int) -> list[TokenizedExample]:
        """A shipped conversation is plain text to a model without a chat template, or with one that refuses it."""
        try:
            return tokenize_pieces(example, tokenizer, seq_len, count)
        except DataError:
            if not (self._shipped and isinstance(example, ChatExample)):
                raise
            return tokenize_pieces(as_text(example), tokenizer, seq_len, count)


def as_text(example: ChatExample) -> TextExample:
    return TextExample("\n\n".join(f"{m['role'].title()}: {m['content']}" for m in example.messages), example.source)


def _key(example: Example, seed: int) -> bytes:
    """A hash of the example's content, not of its place. Absent tools are left out of the hash, so that a chat without
    tools keeps the key from before tools existed, and a seed chooses the same samples."""
    content = {k: v for k, v in asdict(example).items() if k != "source" and (k != "tools" or v)}
    return hashlib.sha256(f"{seed} {json.dumps(content, sort_keys=True)}".encode()).digest()


def _check_vocabulary(samples: Sequence[Sample], vocab_size: int) -> None:
    largest = max(max(s.ids) for s in samples)
    if largest >= vocab_size:
        raise ModelError(
            f"The tokenizer gives the token id {largest}, but the model has only {vocab_size} tokens; "
            "put the tokenizer.json of this model into its directory."
        )


def make_batches(samples: Sequence[Sample], batch_size: int, device: str = "cpu") -> list[Batch]:
    """Groups of `batch_size` samples in order; the last may be smaller."""
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


def first_sequences(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Batches of one sequence, as many of the first as have at most `tokens` together; always one."""
    sequences: list[Batch] = []
    for sequence in (s for batch in batches for s in _sequences(batch)):
        if sequences and sum(s.tokens for s in sequences) + sequence.tokens > tokens:
            break
        sequences.append(sequence)
    return sequences


def _sequences(batch: Batch) -> Iterator[Batch]:
    parts = (torch.split(column, batch.lengths) for column in (batch.ids, batch.positions, batch.targets))
    for ids, positions, targets in zip(*parts, strict=True):
        yield Batch(ids, positions, targets, [len(ids)])


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
    holdout: Sequence[Path | str] | None = None,
) -> Batches:
    """At most `samples` to calibrate on, and an eighth of that (1 to 16) to measure; see the head of this module.

    holdout: files to measure on, None for the shipped passages. All examples of such a file are excluded from
    calibration; of the passages, and of files that are also `data`, only the measured ones. DataError: as
    `load_samples`, or nothing is left.
    """
    held_out_count = max(1, min(16, samples // 8))
    source, measured = _Source(data, seed), _Source(holdout, seed)
    held, read = measured.samples(measured.keys, tokenizer, vocab_size, held_out_count, seq_len)
    held_back = set(measured.keys[:read] if holdout in (None, data) else measured.keys)
    keys = [key for key in source.keys if key not in held_back]
    if not keys:
        raise DataError(f"All of the data ({source.named}) is held out as well; give other data to calibrate on.")
    chosen, _ = source.samples(keys, tokenizer, vocab_size, samples, seq_len)
    random.Random(seed).shuffle(chosen)
    return Batches(
        make_batches(chosen, batch_size, device),
        make_batches(held, batch_size, device),
        len(source.keys) - len(keys) if data is not None else 0,
        documents(chosen),
        documents(held),
    )
