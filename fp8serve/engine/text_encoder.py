"""A model that runs over texts, as many together as fit a step: the common part of embedding and classifying.

Texts follow each other without padding. The result of a text does not depend on the others
(model/reading.py), so on a CPU threads divide the texts and not the ops (text_threads.py). Inputs are not watched:
there are no live figures about texts.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fp8serve.engine.accelerator import check_device, use_threads
from fp8serve.engine.loading import parse_recipe, separate_rows
from fp8serve.engine.memory import check_length
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Task
from fp8serve.engine.text_threads import TextThreads
from fp8serve.errors import RequestError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.own_linear import own_products
from fp8serve.model.network.experts import mixtures
from fp8serve.model.reading import hidden_states, load_reader
from fp8serve.model.text.tokenizer import Tokenizer

Finish = Callable[[Tensor, Sequence[int]], Tensor]  # hidden [tokens, H] of texts of these lengths -> [texts, ...]


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
        check_device(options.device)
        use_threads(options)
        scales = None if options.scales is None else Path(options.scales)
        self.options = options
        self.model = load_reader(model_dir, parse_recipe(options.recipe), scales, options.device)
        self.tokenizer = Tokenizer.from_dir(model_dir)
        self.frozen = {n: m for n, m in self.model.named_modules() if isinstance(m, FrozenLinear)}
        longest = check_length(self.model.config, options)
        self.max_length = min(longest, max_length or longest, options.max_model_len or longest)
        separate_rows(self.model, options.device)
        divides = own_products(options.device) and not mixtures(self.model)  # experts count their tokens
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
        raise RequestError(f"A model that is there to {task} writes nothing to draft; leave {name} out.")
    if options.head_dtype != "bf16":
        raise RequestError(f"A model that is there to {task} makes no logits of tokens; leave head_dtype out.")
    if options.cache_dir is not None:
        raise RequestError(f"A model that is there to {task} has no prefix cache to keep; leave cache_dir out.")
    if options.roll_history:
        raise RequestError(f"roll_history is for models that generate, and this one is to {task}; leave it out.")
