"""Texts in, one vector for each out: an embedding model, without a cache and without a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.options import EngineOptions
from fp8serve.engine.text_encoder import TextEncoder
from fp8serve.errors import RequestError
from fp8serve.model.network.pooling import Pooling, read_pooling

Text = str | Sequence[int]


@dataclass(frozen=True)
class Embedded:
    """vectors FP32 [texts, dimensions]; tokens: how many of each text were read."""

    vectors: Tensor
    tokens: list[int]


class Embedder:
    """An embedding model's directory, ready to embed.

    options: the fields of EngineOptions. Raises ModelError, ScalesError and RecipeError, as loading does, and
    RequestError for options of generation.
    """

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        self.pooling: Pooling = read_pooling(model_dir)
        self.encoder = TextEncoder(model_dir, EngineOptions.of(options), "embed", self.pooling.max_length)
        self.options, self.model = self.encoder.options, self.encoder.model
        self.tokenizer, self.frozen = self.encoder.tokenizer, self.encoder.frozen

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""
        return self.encoder.max_length

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

        prompt_name: which of the model's prompts is put before the texts; None: its default one, if it has any.
        dimensions: how many of a vector's first numbers are kept. truncate: a text that is too long is cut at the end,
        before the token with which the tokenizer ends a text. RequestError: a text is empty or too long, or an id or
        option is unknown.
        """
        self.check(texts, dimensions)
        sequences = [self._ids(text, prompt_name, truncate) for text in texts]
        vectors = self.encoder.run(sequences, lambda hidden, lengths: self.pooling(hidden, lengths, dimensions))
        return Embedded(vectors.cpu(), [len(ids) for ids in sequences])

    def check(self, texts: Sequence[Text], dimensions: int | None) -> None:
        """RequestError: there are no texts, or too many dimensions are asked for."""
        if isinstance(texts, str) or not texts or isinstance(texts[0], int):
            raise RequestError("embed takes a list of one or more texts: put the text in a list.")
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise RequestError(f"dimensions is {dimensions}; this model's vectors have 1 to {self.dimensions}.")

    def _ids(self, text: Text, prompt_name: str | None, truncate: bool) -> list[int]:
        ids = self.tokenizer.encode(self.pooling.prompt(prompt_name) + text) if isinstance(text, str) else list(text)
        ids = self.tokenizer.first_of(ids, self.max_length) if truncate else ids
        self.encoder.check(ids)
        return ids
