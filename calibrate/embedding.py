"""Results of models that embed or score: the change of their vectors, scores and rankings by FP8.

The error of FP8 is measured by the cosine between the vectors that both models return for a text. The ranking test
needs no labelled data. Each text is split into halves. The first halves are the queries, the second halves are the
documents, and the correct document of a query is the other half of the same text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from fp8serve.calibration.result import BaseCalibrationReport, BaseEvalReport, LayerReport
from fp8serve.model.text.tokenizer import Tokenizer

MIN_MEDIAN_COSINE = 0.999  # below this median a report names options that reduce the error
TOP_K = 10  # documents of a ranking that are compared


@dataclass(frozen=True)
class CosineSummary:
    """Statistics of the cosines between the vectors of the same texts by two models."""

    texts: int
    median: float
    percentile_5: float
    minimum: float
    mean: float

    @classmethod
    def of(cls, vectors: Tensor, reference: Tensor) -> "CosineSummary":
        """Compares vectors [texts, dimensions] with reference vectors of the same shape."""
        cosines = cosine_similarity(vectors.double(), reference.double()).clamp(-1, 1)
        return cls(
            len(cosines),
            float(cosines.median()),
            float(cosines.quantile(0.05)),
            float(cosines.min()),
            float(cosines.mean()),
        )

    def summary(self) -> str:
        return f"Cosine to BF16 over {self.texts} texts: median {self.median:.5f}, minimum {self.minimum:.5f}."


@dataclass(frozen=True)
class Ranking:
    """The results of the ranking test. Figures that need a reference model are None without one."""

    queries: int
    candidates: int  # documents that are ranked for each query
    top1_accuracy: float  # fraction of queries with the correct document at rank 1
    reference_top1_accuracy: float | None = None  # the same for the reference model
    same_top1: float | None = None  # fraction of queries for which both models put the same document at rank 1
    top_k_overlap: float | None = None  # mean fraction of the first TOP_K documents that both models share

    @classmethod
    def of(cls, scores: Tensor, correct: Tensor, reference: Tensor | None) -> "Ranking":
        """Compares scores [queries, candidates] with reference scores; `correct` [queries] are the correct columns."""
        queries, candidates = scores.shape
        accuracy = float((scores.argmax(1) == correct).double().mean())
        if reference is None:
            return cls(queries, candidates, accuracy)
        same_top1 = float((scores.argmax(1) == reference.argmax(1)).double().mean())
        k = min(TOP_K, candidates)
        top = [{*row.topk(k).indices.tolist()} for row in (*scores, *reference)]
        shared = [len(a & b) / k for a, b in zip(top[:queries], top[queries:], strict=True)]
        reference_accuracy = float((reference.argmax(1) == correct).double().mean())
        return cls(queries, candidates, accuracy, reference_accuracy, same_top1, sum(shared) / queries)


def cosine_matrix(queries: Tensor, documents: Tensor) -> Tensor:
    """Returns the cosines [Q, D] between queries [Q, H] and documents [D, H]."""
    return normalize(queries.double(), dim=1) @ normalize(documents.double(), dim=1).t()


def split_texts(rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Returns the two halves of each text, given as token ids; texts of less than four tokens are omitted."""
    results = []
    for row in rows:
        ids = [i for i in row if i not in tokenizer.special_ids]
        parts = tokenizer.decode(ids[: len(ids) // 2]), tokenizer.decode(ids[len(ids) // 2 :])
        if len(ids) >= 4 and all(part.strip() for part in parts):
            results.append(parts)
    return results


def candidate_indices(count: int) -> Tensor:
    """Returns the documents to score for each of `count` queries, [count, candidates]: its own and the next ones."""
    return (torch.arange(count)[:, None] + torch.arange(min(TOP_K, count))) % count


@dataclass(frozen=True)
class ScoreDistance:
    """The difference between the label scores of a model and of its reference."""

    texts: int
    labels: int
    mean: float
    maximum: float
    same_label: float | None  # fraction of texts with the same most likely label; None if there is one label

    @classmethod
    def of(cls, scores: Tensor, reference: Tensor) -> "ScoreDistance":
        """Compares scores [texts, labels] with reference scores of the same shape."""
        texts, labels = scores.shape
        difference = (scores.double() - reference.double()).abs()
        same = float((scores.argmax(1) == reference.argmax(1)).double().mean()) if labels > 1 else None
        return cls(texts, labels, float(difference.mean()), float(difference.max()), same)


@dataclass(frozen=True, kw_only=True)
class EncoderEvalReport(BaseEvalReport):
    """The output of `fp8serve eval` for an encoder.

    Without a reference `cosine` and `scores` are None. `scores` is None for a model without labels.
    """

    cosine: CosineSummary | None
    ranking: Ranking | None
    scores: ScoreDistance | None


@dataclass(frozen=True, kw_only=True)
class EmbeddingReport(BaseCalibrationReport):
    """The contents of calibration.json for an encoder."""

    source: tuple[str, ...]
    samples: int
    tokens: int
    held_out_source: tuple[str, ...]
    quality: CosineSummary
    layers: tuple[LayerReport, ...]
