"""Texts in, one vector for each out: an embedding model, without a cache and without a scheduler.

Texts of one call are computed together, as many as fit a step, one behind the other and without padding; what a text
gets does not depend on the others (invariant.py, model/network/encoder.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.accelerator import check_device
from fp8serve.engine.invariant import make_row_independent, own_products, use_own_products
from fp8serve.engine.loading import parse_recipe
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import RequestError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.model.checkpoint import load_encoder
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import Pooling, read_pooling
from fp8serve.model.text.tokenizer import Tokenizer

Text = str | Sequence[int]


@dataclass(frozen=True)
class Embedded:
    """vectors FP32 [texts, dimensions]; tokens: how many of each text were read."""

    vectors: Tensor
    tokens: list[int]


class Embedder:
    """An embedding model's directory, ready to embed.

    options: the fields of EngineOptions. Raises ModelError, ScalesError and RecipeError, as loading does, and
    RequestError for drafts: nothing is written.
    """

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        self.options = EngineOptions.of(options)
        if self.options.speculative_tokens:
            raise RequestError("An embedding model writes nothing that could be drafted; leave speculative_tokens out.")
        check_device(self.options.device)
        scales = None if self.options.scales is None else Path(self.options.scales)
        self.model = load_encoder(model_dir, parse_recipe(self.options.recipe), scales, self.options.device)
        self.pooling: Pooling = read_pooling(model_dir)
        self.tokenizer = Tokenizer.from_dir(model_dir)
        self.frozen = {n: m for n, m in self.model.named_modules() if isinstance(m, FrozenLinear)}
        _separate_rows(self.model, self.frozen, self.options)

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""
        most = self.model.config.max_length
        return min(most, self.pooling.max_length or most)

    @property
    def dimensions(self) -> int:
        """Of a vector."""
        return self.model.config.hidden_size

    @torch.inference_mode()
    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Embedded:
        """One vector for each text, or list of token ids, in their order.

        prompt_name: which of the model's prompts is put before the texts, None: its default one, if it has any.
        dimensions: how many of the first are kept. truncate: a text that is too long loses its end, but for the token
        with which the tokenizer ends a text. RequestError: a text is empty or too long, an id or option unknown.
        """
        self._check(texts, dimensions)
        sequences = [self._ids(text, prompt_name, truncate) for text in texts]
        found: list[Tensor] = [torch.empty(0)] * len(sequences)
        for group in self._groups([len(ids) for ids in sequences]):
            for index, vector in zip(group, self._vectors([sequences[i] for i in group], dimensions), strict=True):
                found[index] = vector
        return Embedded(torch.stack(found), [len(ids) for ids in sequences])

    def _check(self, texts: Sequence[Text], dimensions: int | None) -> None:
        if isinstance(texts, str) or not texts or isinstance(texts[0], int):
            raise RequestError("embed takes a list of one or more texts: put the text in a list.")
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise RequestError(f"dimensions is {dimensions}; this model's vectors have 1 to {self.dimensions}.")

    def _ids(self, text: Text, prompt_name: str | None, truncate: bool) -> list[int]:
        ids = self.tokenizer.encode(self.pooling.prompt(prompt_name) + text) if isinstance(text, str) else list(text)
        most, size = self.max_length, self.model.config.vocab_size
        if len(ids) > most and truncate:
            ids = ids[: most - 1] + ids[-1:] if ids[-1] in self.tokenizer.special_ids else ids[:most]
        if not 0 < len(ids) <= most:
            raise RequestError(f"The text has {len(ids)} tokens; this model embeds texts of 1 to {most}.")
        if odd := [i for i in ids if not 0 <= i < size]:
            raise RequestError(f"Token id {odd[0]} is outside the vocabulary of {size} tokens.")
        return ids

    def _groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indexes of texts that are computed together: neighbours, as many as fit a step, and at least one."""
        group: list[int] = []
        for index, length in enumerate(lengths):
            if group and sum(lengths[i] for i in group) + length > self.options.step_tokens:
                yield group
                group = []
            group.append(index)
        yield group

    def _vectors(self, sequences: Sequence[list[int]], dimensions: int | None) -> Tensor:
        lengths = [len(ids) for ids in sequences]
        ids = torch.tensor([i for sequence in sequences for i in sequence], device=self.options.device)
        return self.pooling(self.model(ids, lengths), lengths, dimensions).cpu()


def _separate_rows(model: Encoder, frozen: dict[str, FrozenLinear], options: EngineOptions) -> None:
    """Makes every linear's rows independent of each other; see loading.py for the same of a decoder."""
    for layer in frozen.values():
        layer.make_rows_independent()
    if own_products(options.device):
        use_own_products(model)
    elif torch.device(options.device).type != "cuda":
        plain = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        make_row_independent(model, {**frozen, **plain}, torch.bfloat16, options.step_tokens)
