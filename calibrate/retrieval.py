"""Whether FP8 changes search results: the second halves of texts are searched with their first halves.

This needs no judgement of relevance: each half has one right answer, its other half, and both models search for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fp8serve.model.text.tokenizer import Tokenizer

TOP = 10


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
        found = float((scores.argmax(1) == right).double().mean())
        if reference is None:
            return cls(queries, candidates, found)
        same = float((scores.argmax(1) == reference.argmax(1)).double().mean())
        both = [{*row.topk(min(TOP, candidates)).indices.tolist()} for row in (*scores, *reference)]
        shared = [len(a & b) / min(TOP, candidates) for a, b in zip(both[:queries], both[queries:], strict=True)]
        other = float((reference.argmax(1) == right).double().mean())
        return cls(queries, candidates, found, other, same, sum(shared) / queries)


def cosines(queries: Tensor, documents: Tensor) -> Tensor:
    """[Q, H] and [D, H] -> [Q, D]."""
    return normalize(queries.double(), dim=1) @ normalize(documents.double(), dim=1).t()


def halves(rows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Each text, given as ids, split in two; texts of less than four tokens are left out."""
    found = []
    for row in rows:
        ids = [i for i in row if i not in tokenizer.special_ids]
        parts = tokenizer.decode(ids[: len(ids) // 2]), tokenizer.decode(ids[len(ids) // 2 :])
        if len(ids) >= 4 and all(part.strip() for part in parts):
            found.append(parts)
    return found


def neighbours(count: int, most: int = TOP) -> Tensor:
    """For each of `count` queries the documents that are scored: its own and the ones after it, [count, candidates]."""
    return (torch.arange(count)[:, None] + torch.arange(min(most, count))) % count
