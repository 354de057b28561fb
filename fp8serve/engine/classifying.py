"""Texts, or pairs of texts, in; a score for every label out: classifiers, and cross-encoders, which have one label."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8serve.engine.labels import labelled
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.text_encoder import TextEncoder
from fp8serve.errors import RequestError
from fp8serve.model.config.encoder import Head
from fp8serve.model.network.scores import scored

Pair = tuple[str, str]


@dataclass(frozen=True)
class Classified:
    """logits and scores FP32 [texts, labels]; tokens: how many of each text were read."""

    logits: Tensor
    scores: Tensor
    tokens: list[int]


class Classifier:
    """A directory of a model with a head of labels (`BertForSequenceClassification`), or of a decoder that judges.

    options: the fields of EngineOptions. Raises what `Embedder` raises, and ModelError if the model has no labels.
    """

    def __init__(self, model_dir: str | Path, **options: Any) -> None:
        self.encoder = TextEncoder(model_dir, EngineOptions.of(options), "classify")
        self.labelled = labelled(self.encoder.model, self.encoder.tokenizer, Path(model_dir))
        self.head: Head = self.labelled.head

    def classify(self, texts: Sequence[str | Pair]) -> Classified:
        """The scores of each text, or pair of texts. RequestError: one is too long."""
        if isinstance(texts, str) or not texts:
            raise RequestError("classify takes a list of one or more texts, or pairs of texts.")
        pairs = [self.labelled.asked(*((text, None) if isinstance(text, str) else text)) for text in texts]
        read = [self.encoder.tokenizer.encode_pair(*pair) for pair in pairs]
        return self.classify_ids([ids for ids, _ in read], [segments for _, segments in read])

    @torch.inference_mode()
    def classify_ids(self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> Classified:
        """The scores of token ids. segments: 0 for tokens of the first text, 1 for the second. RequestError:
        `check`."""
        self.check(sequences, segments)
        logits = self.encoder.run(sequences, self.labelled.logits, segments).cpu()
        return Classified(logits, scored(logits, self.head.activation), [len(ids) for ids in sequences])

    def check(self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]) -> None:
        """RequestError: a text is empty or too long, an id is unknown, or the segments do not match the tokens."""
        kinds = self.labelled.segments
        for ids, parts in zip(sequences, segments, strict=True):
            self.encoder.check(ids)
            if len(ids) != len(parts) or not all(0 <= part < kinds for part in parts):
                raise RequestError(f"Segments must be one for each token, of 0 to {kinds - 1}.")
