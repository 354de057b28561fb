"""Runs a model over batches of texts: the part that embedding models and classifiers share.

The texts of a batch are concatenated without padding, up to the token limit of a step. The result of a text does not
depend on the other texts (model/building.py). The inputs of the layers are not monitored.

On a CPU, the texts of a batch are divided among threads, and each thread runs its texts through the whole model
(`TextThreads`). Parallel ops would be slower: a pass consists of hundreds of small ops, and after each op the threads
would wait for each other. torch's threads also spin between ops, which keeps the cores from this project's kernels. If
there is too little work for every thread, each op runs in parallel as usual.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import torch
from torch import Tensor

from fp8serve.engine.defaults import step_limits
from fp8serve.engine.loading import open_device, parse_recipe, prepare_for_serving
from fp8serve.engine.memory import check_length, gpu_memory_info
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Task
from fp8serve.errors import RequestError
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.building import hidden_states
from fp8serve.model.checkpoint import load_any_servable
from fp8serve.model.network.experts import mixtures
from fp8serve.model.text.tokenizer import Tokenizer

MIN_THREAD_TOKENS = 64  # with fewer tokens, a thread spends most of its time on reading the weights
Compute = Callable[[Sequence[int]], Tensor]  # maps the indexes of texts of a batch to their rows, [texts, ...]
Pool = Callable[[Tensor, Sequence[int]], Tensor]  # maps hidden states [tokens, H] and text lengths to [texts, ...]


class TextThreads:
    """A pool of as many threads as torch uses. Within each thread of the pool, torch computes with one thread."""

    def __init__(self) -> None:
        self._count = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(self._count, "texts")
        if self._count > 1:
            barrier = Barrier(self._count)
            for future in [self._executor.submit(_use_one_thread, barrier) for _ in range(self._count)]:
                future.result()
            torch.set_num_threads(self._count)  # for this thread, and for threads that start later

    def run(self, lengths: Sequence[int], compute: Compute) -> Tensor:
        """Returns the rows of texts of these lengths, [texts, ...], in the order of the texts."""
        if self._count == 1 or len(lengths) < self._count or sum(lengths) < MIN_THREAD_TOKENS * self._count:
            return compute(range(len(lengths)))
        parts = partition(lengths, self._count)
        inference = torch.inference_mode()(compute)  # inference mode is a setting of each thread
        rows = torch.cat(list(self._executor.map(inference, parts)))
        return rows[torch.tensor([i for part in parts for i in part]).argsort()]


def partition(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divides the indexes of texts of these lengths into `count` sorted lists with similar numbers of tokens. The texts
    are assigned from the longest to the shortest, each to the list that has the fewest tokens so far."""
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        smallest = tokens.index(min(tokens))
        parts[smallest].append(index)
        tokens[smallest] += lengths[index]
    return [sorted(part) for part in parts]


def _use_one_thread(barrier: Barrier) -> None:
    """Makes torch compute with one thread in the calling thread. torch fixes the number for a thread when the number
    is first read there. The barrier makes every thread of the pool run this function once."""
    torch.set_num_threads(1)
    torch.get_num_threads()
    barrier.wait()


class TextEncoder:
    """The encoder (or decoder) and the tokenizer of a model directory.

    Raises ModelError, ScalesError or RecipeError if the model cannot be loaded, and RequestError for an option that
    only models that generate text have.
    """

    def __init__(
        self, model_dir: str | Path, options: EngineOptions, task: Task, max_length: int | None = None
    ) -> None:
        """`max_length` is the largest number of tokens of a text. If it is None, the model's positions are the
        limit."""
        _check_options(options, task)
        options = open_device(Path(model_dir), options)
        device = torch.device(options.device)
        if options.invariant and device.type != "cpu":
            raise RequestError(f"On a GPU, invariant is for models that generate; leave it out to {task}.")
        self.options = step_limits(options, gpu_memory_info(device)[1]) if device.type == "cuda" else options
        scales = None if options.scales is None else Path(options.scales)
        self.model = load_any_servable(model_dir, parse_recipe(options.recipe), scales, options.device)
        self.tokenizer = Tokenizer.from_dir(model_dir)
        self.frozen = {n: m for n, m in self.model.named_modules() if isinstance(m, FrozenLinear)}
        longest = check_length(self.model.config, options)
        self.max_length = min(longest, max_length or longest, options.max_model_len or longest)
        prepare_for_serving(self.model, options.device)
        # the counters of a mixture of experts are shared by all threads
        uses_threads = has_batch_invariant_products(options.device) and not mixtures(self.model)
        self._threads = TextThreads() if uses_threads else None
        for layer in self.frozen.values():
            layer.is_watched = False

    def check(self, ids: Sequence[int]) -> None:
        """Raises RequestError if the text is empty or too long, or a token is not in the vocabulary."""
        size = self.model.config.vocab_size
        if not 0 < len(ids) <= self.max_length:
            raise RequestError(f"The text has {len(ids)} tokens; this model reads texts of 1 to {self.max_length}.")
        if unknown := [i for i in ids if not 0 <= i < size]:
            raise RequestError(f"Token id {unknown[0]} is outside the vocabulary of {size} tokens.")

    def run(
        self, sequences: Sequence[Sequence[int]], pool: Pool, segments: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Runs texts through the model, in as many steps as necessary, and returns the rows that `pool` computes from
        their hidden states, one row a text. `segments` is 0 or 1 for every token; None means 0 for all tokens."""
        rows = []
        for batch in self._batches([len(ids) for ids in sequences]):
            batch_segments = None if segments is None else [segments[i] for i in batch]
            rows.append(self.step([sequences[i] for i in batch], pool, batch_segments))
        return torch.cat(rows)

    def step(
        self, sequences: Sequence[Sequence[int]], pool: Pool, segments: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Runs texts through the model in one step; see `run`."""
        lengths = [len(ids) for ids in sequences]

        def compute(indexes: Sequence[int]) -> Tensor:
            token_types = None if segments is None else self._flatten([segments[i] for i in indexes])
            ids, text_lengths = self._flatten([sequences[i] for i in indexes]), [lengths[i] for i in indexes]
            return pool(hidden_states(self.model, ids, text_lengths, token_types), text_lengths)

        return compute(range(len(lengths))) if self._threads is None else self._threads.run(lengths, compute)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yields the indexes of the texts of each step: consecutive texts, as many as fit, and at least one."""
        batch: list[int] = []
        for index, length in enumerate(lengths):
            if batch and sum(lengths[i] for i in batch) + length > self.options.step_tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def _flatten(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([i for row in rows for i in row], device=self.options.device)


def _check_options(options: EngineOptions, task: Task) -> None:
    if options.task not in (None, task):
        raise RequestError(f"task is {options.task!r}, but the model is loaded to {task}; leave the option task out.")
    if options.drafted_tokens:
        name = "speculative_tokens" if options.draft_model is None else "draft_model"
        raise RequestError(f"A model that is served to {task} does not generate tokens; leave {name} out.")
    if options.head_dtype != "bf16":
        raise RequestError(f"A model that is served to {task} computes no logits of tokens; leave head_dtype out.")
    if options.tensor_parallel > 1:
        raise RequestError(f"A model that is served to {task} runs in one process; leave tensor_parallel out.")
    if options.cache_dir is not None:
        raise RequestError(f"A model that is served to {task} has no prefix cache to save; leave cache_dir out.")
    if options.roll_history:
        raise RequestError(f"roll_history is for models that generate, and this one is served to {task}; leave it out.")
