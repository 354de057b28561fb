"""Results of models that embed or score: how far FP8 moved their vectors and scores, and whether searches change.

The cosine of a text's vectors by both models measures the cost of FP8. A search needs no judgement of relevance here:
the second halves of texts are searched with their first halves. Each half has one right answer, its other half, and
both models search for it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from fp8serve.calibration.result import LayerReport, LinearGroup, Origin
from fp8serve.model.text.tokenizer import Tokenizer

GOAL = 0.999  # median below which a report names options that lose less
TOP = 10


@dataclass(frozen=True)
class Closeness:
    """Cosine of the vectors of the same text by two models."""

    texts: int
    median: float
    fifth: float  # percentile
    least: float
    mean: float

    @classmethod
    def of(cls, one: Tensor, other: Tensor) -> "Closeness":
        """Both [texts, dimensions]."""
        cosines = cosine_similarity(one.double(), other.double()).clamp(-1, 1)
        return cls(
            len(cosines),
            float(cosines.median()),
            float(cosines.quantile(0.05)),
            float(cosines.min()),
            float(cosines.mean()),
        )

    def text(self) -> str:
        return f"Cosine to BF16 {self.median:.5f} in the median of {self.texts} texts, {self.least:.5f} at least."


@dataclass(frozen=True)
class Ranking:
    """Fractions of the queries. found: the other half comes first; same_first: both models put the same text first;
    same_top: how many of the first ten are the same. None without a reference."""

    queries: int
    candidates: int
    found: float
    reference_found: float | None = None
    same_first: float | None = None
    same_top: float | None = None

    @classmethod
    def of(cls, scores: Tensor, right: Tensor, reference: Tensor | None) -> "Ranking":
        """scores and reference [queries, candidates]; right [queries]: which is the other half."""
        queries, candidates = scores.shape
        result = float((scores.argmax(1) == right).double().mean())
        if reference is None:
            return cls(queries, candidates, result)
        same = float((scores.argmax(1) == reference.argmax(1)).double().mean())
        both = [{*row.topk(min(TOP, candidates)).indices.tolist()} for row in (*scores, *reference)]
        shared = [len(a & b) / min(TOP, candidates) for a, b in zip(both[:queries], both[queries:], strict=True)]
        other = float((reference.argmax(1) == right).double().mean())
        return cls(queries, candidates, result, other, same, sum(shared) / queries)


def cosines(queries: Tensor, documents: Tensor) -> Tensor:
    """[Q, H] and [D, H] -> [Q, D]."""
    return normalize(queries.double(), dim=1) @ normalize(documents.double(), dim=1).t()


def halves(rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Each text, given as ids, split in two; texts of less than four tokens are left out."""
    results = []
    for row in rows:
        ids = [i for i in row if i not in tokenizer.special_ids]
        parts = tokenizer.decode(ids[: len(ids) // 2]), tokenizer.decode(ids[len(ids) // 2 :])
        if len(ids) >= 4 and all(part.strip() for part in parts):
            results.append(parts)
    return results


def neighbours(count: int, most: int = TOP) -> Tensor:
    """For each of `count` queries the documents that are scored: its own and the ones after it, [count, candidates]."""
    return (torch.arange(count)[:, None] + torch.arange(min(most, count))) % count


@dataclass(frozen=True)
class ScoreDistance:
    """How far scores of labels are from the reference's, and how many texts have the same most likely label."""

    texts: int
    labels: int
    mean: float
    largest: float
    same_label: float | None  # None: there is one label

    @classmethod
    def of(cls, got: Tensor, exact: Tensor) -> "ScoreDistance":
        """Both [texts, labels]."""
        apart = (got.double() - exact.double()).abs()
        same = float((got.argmax(1) == exact.argmax(1)).double().mean()) if got.shape[1] > 1 else None
        return cls(len(got), got.shape[1], float(apart.mean()), float(apart.max()), same)


@dataclass(frozen=True)
class EncoderEvalReport:
    """What `fp8serve eval` prints for an encoder. closeness, scores and layers: None or empty without a reference; a
    model without labels has no scores."""

    model: str
    against: str | None
    recipe: str
    source: tuple[str, ...]
    samples: int
    documents: int
    seq_len: int
    tokens: int
    closeness: Closeness | None
    ranking: Ranking | None
    scores: ScoreDistance | None
    layers: tuple[LayerReport, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    made: Origin | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True)
class EmbeddingReport:
    """The contents of calibration.json for an encoder."""

    model: str
    out: str
    recipe: Mapping[str, Any]
    format: str
    device: str
    source: tuple[str, ...]
    samples: int
    tokens: int
    held_out_source: tuple[str, ...]
    quality: Closeness
    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int
    seconds: Mapping[str, float]
    versions: Mapping[str, str]
    rounding: str
    kept: tuple[LinearGroup, ...] = ()  # what stays in high precision
    notes: tuple[str, ...] = ()
    made: Origin | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)
