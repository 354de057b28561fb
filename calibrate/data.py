"""Selects the token sequences for a calibration or an evaluation.

A sample is one sequence of 2 to `seq_len` tokens. A short example is one sample. Longer texts are cut into windows,
which are separate samples. Longer prompts and chats are truncated at the end. Short texts are not packed into one long
sequence: in many models the first token of a text has the largest activations, and a packed sequence has one first
token instead of ten. The sequences of a batch are concatenated, [tokens], without padding, so that no padding token
affects an amax.

Examples are read in the order of a seeded hash of their content, and tokenized only until there are enough samples.
So a large file costs no more than a small one, and the result does not depend on the order of files and lines or on
repeated examples. The later windows of a text are used only if the first windows of all texts are too few. A text is
tokenized only up to the length that all samples together can hold.

All of the user's data are used for calibration. Quality is measured on files that the user names, or on the passages
that ship with fp8serve. Without any data, quality is measured on an eighth of these passages. Whole examples are held
out, and an example that is in both sets is not used for calibration. Two examples are equal if their contents are.
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
    tokenize_chunks,
)
from fp8serve.model.text.tokenizer import Tokenizer

PASSAGES = Path(__file__).with_name("passages.jsonl")  # written for this project
IGNORE_INDEX = -100  # target of a token that is not scored; the ignore_index of cross_entropy


@dataclass(frozen=True)
class Sample:
    """One sequence. `scored[i]` says whether the prediction of `ids[i]` is scored; tokens of prompts are not scored."""

    ids: tuple[int, ...]
    scored: tuple[bool, ...]
    document: bytes = b""  # key of the example that this sample was taken from


@dataclass(frozen=True)
class Batch:
    """Several concatenated sequences; `targets[i]` is the id that follows `ids[i]`, or IGNORE_INDEX."""

    ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], from 0 in every sequence
    targets: Tensor  # int64 [tokens]
    lengths: list[int]  # tokens of each sequence

    @property
    def tokens(self) -> int:
        return int(self.ids.numel())


@dataclass(frozen=True)
class Batches:
    """The samples of one calibration."""

    calibration: list[Batch]
    held_out: list[Batch]
    excluded: int = 0  # examples of the data that are held out and therefore not calibrated on
    documents: int = 0  # number of examples from which the calibration samples were taken
    held_out_documents: int = 0

    @property
    def samples(self) -> int:
        """Number of samples to calibrate on."""
        return sum(len(batch.lengths) for batch in self.calibration)

    @property
    def tokens(self) -> int:
        """Number of tokens to calibrate on."""
        return sum(batch.tokens for batch in self.calibration)


def source_names(data: Sequence[Path | str] | None) -> tuple[str, ...]:
    return ("the passages shipped with fp8serve",) if data is None else tuple(map(source_name, data))


def count_documents(samples: Sequence[Sample]) -> int:
    """Returns the number of examples from which the samples were taken."""
    return len({s.document for s in samples})


def load_samples(
    data: Sequence[Path | str] | None, tokenizer: Tokenizer, vocab_size: int, *, count: int, seq_len: int, seed: int
) -> list[Sample]:
    """Loads at most `count` samples of at most `seq_len` tokens from the files `data`, or from the shipped passages.

    Raises DataError if a file cannot be read as examples, or if no example has two tokens. Raises ModelError if the
    tokenizer returns an id that is not less than `vocab_size`.
    """
    source = _Source(data, seed)
    samples = source.samples(source.keys, tokenizer, vocab_size, count, seq_len)[0]
    random.Random(seed).shuffle(samples)  # mixes the first windows of texts with later ones
    return samples


class _Source:
    """The distinct examples of some files by key. Their order depends only on their content and the seed."""

    def __init__(self, data: Sequence[Path | str] | None, seed: int) -> None:
        self._shipped = data is None
        sources = [PASSAGES] if data is None else data
        self.description = ", ".join(map(source_name, sources)) or "no files"
        self._examples = {_key(example, seed): example for example in read_examples(sources)}
        self.keys = sorted(self._examples)

    def samples(
        self, keys: Sequence[bytes], tokenizer: Tokenizer, vocab_size: int, count: int, seq_len: int
    ) -> tuple[list[Sample], int]:
        """Returns at most `count` samples of the examples `keys`, and the number of examples that were read.

        The first windows of as many examples as needed come before all second windows, so that the samples come from
        many texts.
        """
        windows: list[list[Sample]] = []
        examples_read = 0
        for key in keys:
            pieces = self._pieces(self._examples[key], tokenizer, seq_len, count)
            samples = [Sample(tuple(p.ids), tuple(p.loss_mask), key) for p in pieces if len(p.ids) >= 2]
            windows += [samples] if samples else []
            examples_read += 1
            if len(windows) >= count:
                break
        selected = [s for nth in zip_longest(*windows) for s in nth if s is not None][:count]
        if not selected:
            raise DataError(f"The data ({self.description}) have no example of at least two tokens; add more text.")
        _check_vocabulary(selected, vocab_size)
        return selected, examples_read

    def _pieces(self, example: Example, tokenizer: Tokenizer, seq_len: int, count: int) -> list[TokenizedExample]:
        """Tokenizes an example. A shipped conversation becomes plain text if the chat template cannot render it."""
        try:
            return tokenize_chunks(example, tokenizer, seq_len, count)
        except DataError:
            if not (self._shipped and isinstance(example, ChatExample)):
                raise
            return tokenize_chunks(as_text(example), tokenizer, seq_len, count)


def as_text(example: ChatExample) -> TextExample:
    return TextExample("\n\n".join(f"{m['role'].title()}: {m['content']}" for m in example.messages), example.source)


def _key(example: Example, seed: int) -> bytes:
    """Returns a hash of the example's content and the seed.

    `source` is not hashed. Absent tools are not hashed either, so that chats without tools have the same keys as in
    versions that did not support tools, and a seed selects the same samples.
    """
    content = {k: v for k, v in asdict(example).items() if k != "source" and (k != "tools" or v)}
    return hashlib.sha256(f"{seed} {json.dumps(content, sort_keys=True)}".encode()).digest()


def _check_vocabulary(samples: Sequence[Sample], vocab_size: int) -> None:
    largest = max(max(s.ids) for s in samples)
    if largest >= vocab_size:
        raise ModelError(
            f"The tokenizer returned the token id {largest}, but the model has only {vocab_size} tokens; "
            "put the tokenizer.json of this model into its directory."
        )


def make_batches(samples: Sequence[Sample], batch_size: int, device: str = "cpu") -> list[Batch]:
    """Groups samples, in order, into batches of `batch_size` samples; the last batch may be smaller."""
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
    next_tokens = zip(sample.ids[1:], sample.scored[1:], strict=True)
    return [token if scored else IGNORE_INDEX for token, scored in next_tokens] + [IGNORE_INDEX]


def scored_rows(targets: Tensor) -> Tensor:
    """Returns the indices of the targets that are scored."""
    return (targets != IGNORE_INDEX).nonzero().squeeze(1)


def first_sequences(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Returns the first sequences with at most `tokens` tokens in all, at least one, each as a batch of its own."""
    sequences: list[Batch] = []
    for sequence in (s for batch in batches for s in _split(batch)):
        if sequences and sum(s.tokens for s in sequences) + sequence.tokens > tokens:
            break
        sequences.append(sequence)
    return sequences


def join_sequences(sequences: Sequence[Batch], tokens: int) -> list[Batch]:
    """Joins consecutive batches into batches of at most `tokens` tokens; a longer one stays alone."""
    groups: list[list[Batch]] = []
    size = 0
    for sequence in sequences:
        if not groups or size + sequence.tokens > tokens:
            groups.append([])
            size = 0
        groups[-1].append(sequence)
        size += sequence.tokens
    return [_join(group) for group in groups]


def _join(group: Sequence[Batch]) -> Batch:
    ids, positions, targets = (
        torch.cat(parts) for parts in zip(*((b.ids, b.positions, b.targets) for b in group), strict=True)
    )
    return Batch(ids, positions, targets, [length for batch in group for length in batch.lengths])


def _split(batch: Batch) -> Iterator[Batch]:
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
    """Returns at most `samples` samples to calibrate on, and an eighth as many (1 to 16) to measure quality on.

    `holdout` are files to measure quality on, or None for the shipped passages. If `holdout` are other files than
    `data`, none of their examples is used for calibration. If they are the same files or the shipped passages, only the
    examples that are measured are excluded from calibration. Raises DataError like `load_samples`, or if no example
    remains for calibration.
    """
    held_out_count = max(1, min(16, samples // 8))
    source, holdout_source = _Source(data, seed), _Source(holdout, seed)
    held_out, num_read = holdout_source.samples(holdout_source.keys, tokenizer, vocab_size, held_out_count, seq_len)
    held_out_keys = set(holdout_source.keys[:num_read] if holdout in (None, data) else holdout_source.keys)
    keys = [key for key in source.keys if key not in held_out_keys]
    if not keys:
        raise DataError(f"All of the data ({source.description}) are held out; give other data to calibrate on.")
    selected, _ = source.samples(keys, tokenizer, vocab_size, samples, seq_len)
    random.Random(seed).shuffle(selected)
    return Batches(
        make_batches(selected, batch_size, device),
        make_batches(held_out, batch_size, device),
        len(source.keys) - len(keys) if data is not None else 0,
        count_documents(selected),
        count_documents(held_out),
    )
