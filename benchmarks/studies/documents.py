"""Compares two models on the same held-out documents, with confidence intervals.

Documents differ more than their tokens do, so documents are resampled: the bootstrap over documents (Efron and
Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3) gives the middle 95 % of the results for other texts
of this kind. Both models use the same resampled documents, so common effects cancel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fp8serve.calibration.data import IGNORE_INDEX, Batch, Sample, make_batches
from fp8serve.calibration.measure import LOGITS_PER_SLICE, TokenTally
from fp8serve.calibration.passes import forward
from fp8serve.model import building

Logits = Callable[[Tensor], Tensor]  # rows int64 [R] of a sequence -> FP32 [R, vocabulary]
Model = Callable[[Batch], Logits]  # reads one sequence
RESAMPLES = 2000


def of_decoder(decoder: building.Model) -> Model:
    """A model of this process."""

    def read(sequence: Batch) -> Logits:
        hidden = forward(decoder, sequence)
        return lambda rows: decoder.logits(hidden[rows])

    return read


def by_document(samples: Sequence[Sample]) -> list[list[Batch]]:
    """The sequences of every document."""
    ordered = sorted(samples, key=lambda sample: sample.document)
    return [make_batches(list(each), 1) for _, each in groupby(ordered, key=lambda sample: sample.document)]


@torch.no_grad()
def compared(
    documents: Sequence[Sequence[Batch]], model: Model, reference: Model, report: Callable[[int, int], None]
) -> list[TokenTally]:
    """The figures of both models for every document."""
    found = []
    for number, document in enumerate(documents):
        report(number, len(documents))
        found.append(tally := TokenTally())
        for sequence in document:
            _add(tally, sequence, model(sequence), reference(sequence))
    return found


def _add(tally: TokenTally, sequence: Batch, logits: Logits, reference: Logits) -> None:
    scored = (sequence.targets != IGNORE_INDEX).nonzero().squeeze(1)
    for rows in torch.split(scored, LOGITS_PER_SLICE):
        tally.add(sequence.targets[rows], logits(rows), reference(rows))


@dataclass(frozen=True)
class Interval:
    """A figure and the middle 95 % of its values for resampled documents."""

    value: float
    low: float
    high: float


def intervals(tallies: Sequence[TokenTally], seed: int = 0) -> dict[str, Interval]:
    """Over all tokens: "perplexity_percent" above the reference's, "kl" in nats, "top1" the share of tokens for which
    both predict the same next token."""
    columns = [[t.tokens, t.nll, t.reference_nll, t.kl, t.same_top1] for t in tallies]
    sums = torch.tensor(columns, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(tallies), (RESAMPLES, len(tallies)), generator=generator)
    whole, others = _figures(sums.sum(0)), _figures(sums[drawn].sum(1))
    edges = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return {name: Interval(float(whole[name]), *others[name].quantile(edges).tolist()) for name in whole}


def _figures(sums: Tensor) -> dict[str, Tensor]:
    """sums [..., 5] of tokens, two losses, KL, agreement."""
    tokens, nll, reference, kl, agreed = sums.unbind(-1)
    return {
        "perplexity_percent": 100 * torch.expm1((nll - reference) / tokens),
        "kl": (kl / tokens).clamp_min(0),
        "top1": agreed / tokens,
    }
