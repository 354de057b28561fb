"""A model that runs over texts, as many together as fit a step: the common part of embedding and classifying.

Texts follow each other without padding. The result of a text does not depend on the others
(model/building.py), so on a CPU threads divide the texts and not the ops.
Inputs are not watched: there are no live figures about texts.

A pass over an encoder is hundreds of small ops, some of torch's and some of ours. If each op is divided among threads,
they wait for each other hundreds of times, and torch's threads, which spin between its ops, take the cores from ours.
Instead each thread takes some of the texts through the whole model (`TextThreads`), and they wait once. If there is too
little work for every thread, they divide the ops.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Protocol

import torch
from torch import Tensor

from fp8serve.engine.loading import open_device, parse_recipe, separate_rows
from fp8serve.engine.memory import check_length
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Task
from fp8serve.errors import RequestError
from fp8serve.fp8.batch_invariant_linear import has_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.building import hidden_states
from fp8serve.model.checkpoint import load_reader
from fp8serve.model.network.experts import mixtures
from fp8serve.model.text.tokenizer import Tokenizer

LEAST = 64  # tokens of a thread: fewer are bound by reading the weights, which every thread would do
Finish = Callable[[Tensor, Sequence[int]], Tensor]  # hidden [tokens, H] of texts of these lengths -> [texts, ...]


class Compute(Protocol):
    """Texts by their indexes -> a row for each [texts, ...]."""

    def __call__(self, indexes: Sequence[int]) -> Tensor: ...


class TextThreads:
    """As many threads as torch has when this is made; each computes alone."""

    def __init__(self) -> None:
        self._count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._count, "texts")
        if self._count > 1:
            everyone = Barrier(self._count)
            for started in [self._pool.submit(_compute_alone, everyone) for _ in range(self._count)]:
                started.result()
            torch.set_num_threads(self._count)  # for this thread, and for those that start later

    def run(self, lengths: Sequence[int], compute: Compute) -> Tensor:
        """The rows of texts of these lengths, in their order [texts, ...]."""
        if self._count == 1 or len(lengths) < self._count or sum(lengths) < LEAST * self._count:
            return compute(range(len(lengths)))
        parts = shares(lengths, self._count)
        inferring = torch.inference_mode()(compute)  # torch switches gradients off for each thread separately
        rows = torch.cat(list(self._pool.map(inferring, parts)))
        return rows[torch.tensor([i for part in parts for i in part]).argsort()]


def shares(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divides the indexes of texts of these lengths into `count` shares of about equal numbers of tokens: the longest
    text first, each to the share with fewest. Within a share they keep their order."""
    result: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = tokens.index(min(tokens))
        result[least].append(index)
        tokens[least] += lengths[index]
    return [sorted(share) for share in result]


def _compute_alone(everyone: Barrier) -> None:
    """Sets one thread for torch in this thread: torch keeps the number for each thread once it has been read there."""
    torch.set_num_threads(1)
    torch.get_num_threads()
    everyone.wait()


class TextEncoder:
    """A directory's encoder, or its decoder, and tokenizer.

    Raises ModelError, ScalesError and RecipeError, as loading does, and RequestError for an option that is only for
    models that generate.
    """

    def __init__(
        self, model_dir: str | Path, options: EngineOptions, task: Task, max_length: int | None = None
    ) -> None:
        """max_length: tokens of a text at most; None: as many as the model has positions."""
        _check(options, task)
        open_device(options)
        scales = None if options.scales is None else Path(options.scales)
        self.options = options
        self.model = load_reader(model_dir, parse_recipe(options.recipe), scales, options.device)
        self.tokenizer = Tokenizer.from_dir(model_dir)
        self.frozen = {n: m for n, m in self.model.named_modules() if isinstance(m, FrozenLinear)}
        longest = check_length(self.model.config, options)
        self.max_length = min(longest, max_length or longest, options.max_model_len or longest)
        separate_rows(self.model, options.device)
        divides = has_batch_invariant_products(options.device) and not mixtures(
            self.model
        )  # experts count their tokens
        self._threads = TextThreads() if divides else None
        for layer in self.frozen.values():
            layer.is_watched = False

    def check(self, ids: Sequence[int]) -> None:
        """RequestError: there are too few or too many tokens, or one is not in the vocabulary."""
        size = self.model.config.vocab_size
        if not 0 < len(ids) <= self.max_length:
            raise RequestError(f"The text has {len(ids)} tokens; this model reads texts of 1 to {self.max_length}.")
        if odd := [i for i in ids if not 0 <= i < size]:
            raise RequestError(f"Token id {odd[0]} is outside the vocabulary of {size} tokens.")

    def run(
        self, sequences: Sequence[Sequence[int]], finish: Finish, segments: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """The result of `finish` on the hidden states of texts, one row a text. segments: 0 or 1 for every token; None:
        all 0."""
        rows = []
        for group in self._groups([len(ids) for ids in sequences]):
            parts = None if segments is None else [segments[i] for i in group]
            rows.append(self.step([sequences[i] for i in group], finish, parts))
        return torch.cat(rows)

    def step(
        self, sequences: Sequence[Sequence[int]], finish: Finish, segments: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Like `run`, for texts that are computed together."""
        lengths = [len(ids) for ids in sequences]

        def compute(indexes: Sequence[int]) -> Tensor:
            parts = None if segments is None else self._flat([segments[i] for i in indexes])
            ids, own = self._flat([sequences[i] for i in indexes]), [lengths[i] for i in indexes]
            return finish(hidden_states(self.model, ids, own, parts), own)

        return compute(range(len(lengths))) if self._threads is None else self._threads.run(lengths, compute)

    def _groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indexes of texts that are computed together: neighbours, as many as fit a step, and at least one."""
        group: list[int] = []
        for index, length in enumerate(lengths):
            if group and sum(lengths[i] for i in group) + length > self.options.step_tokens:
                yield group
                group = []
            group.append(index)
        yield group

    def _flat(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([i for row in rows for i in row], device=self.options.device)


def _check(options: EngineOptions, task: Task) -> None:
    """RequestError: an option is only for models that generate, or the task is another."""
    if options.task not in (None, task):
        raise RequestError(f"task is {options.task!r}, and the model was opened to {task}; leave one of the two out.")
    if options.drafted_tokens:
        name = "speculative_tokens" if options.draft_model is None else "draft_model"
        raise RequestError(f"A model that is served to {task} generates nothing to draft; leave {name} out.")
    if options.head_dtype != "bf16":
        raise RequestError(f"A model that is served to {task} computes no logits of tokens; leave head_dtype out.")
    if options.cache_dir is not None:
        raise RequestError(f"A model that is served to {task} has no prefix cache to save; leave cache_dir out.")
    if options.roll_history:
        raise RequestError(f"roll_history is for models that generate, and this one is served to {task}; leave it out.")
