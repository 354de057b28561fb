"""Embedding models: computes one vector for each text, without a KV cache and without a scheduler."""

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
    """The vectors of some texts, FP32 [texts, dimensions]. `tokens` has the number of tokens of each text."""

    vectors: Tensor
    tokens: list[int]


class Embedder:
    """An embedding model, loaded from its directory.

    `options` are the fields of EngineOptions. Raises ModelError, ScalesError or RecipeError if the model cannot be
    loaded, and RequestError for an option that only models that generate text have.
    """

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        self.pooling: Pooling = read_pooling(model_dir)
        self.encoder = TextEncoder(model_dir, EngineOptions.of(options), "embed", self.pooling.max_length)
        self.options, self.model = self.encoder.options, self.encoder.model
        self.tokenizer, self.frozen = self.encoder.tokenizer, self.encoder.frozen

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a text."""
        return self.encoder.max_length

    @property
    def dimensions(self) -> int:
        """The number of dimensions of a vector."""
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
        """Returns one vector for each text or list of token ids, in the same order.

        Args:
            prompt_name: the prompt of the model to put before each text; by default the model's default prompt, if any.
            dimensions: the number of dimensions to which the vectors are cut.
            truncate: whether to shorten texts that are too long. A special token at the end of a text is kept.

        Raises RequestError if a text is empty or too long, or a token id or option is unknown.
        """
        self.check(texts, dimensions)
        sequences = [self._ids(text, prompt_name, truncate) for text in texts]
        vectors = self.encoder.run(sequences, lambda hidden, lengths: self.pooling(hidden, lengths, dimensions))
        return Embedded(vectors.cpu(), [len(ids) for ids in sequences])

    def check(self, texts: Sequence[Text], dimensions: int | None) -> None:
        """Raises RequestError if there are no texts, or if the vectors have fewer than `dimensions` dimensions."""
        if isinstance(texts, str) or not texts or isinstance(texts[0], int):
            raise RequestError("embed takes a list of one or more texts: put the text in a list.")
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise RequestError(f"dimensions is {dimensions}; for this model, use 1 to {self.dimensions}.")

    def _ids(self, text: Text, prompt_name: str | None, truncate: bool) -> list[int]:
        ids = self.tokenizer.encode(self.pooling.prompt(prompt_name) + text) if isinstance(text, str) else list(text)
        ids = self.tokenizer.truncate_ids(ids, self.max_length) if truncate else ids
        self.encoder.check(ids)
        return ids
