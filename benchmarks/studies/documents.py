"""Compares two models on the same held-out documents, with confidence intervals.

The tokens of one document are not independent, so whole documents are resampled (bootstrap; Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, section 13.3). The interval holds the middle 95 % of the results over resamples,
an estimate of the spread for other texts of this kind. Both models are evaluated on the same resamples, so effects that
they share cancel.
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

Logits = Callable[[Tensor], Tensor]  # positions int64 [R] of a sequence -> their logits FP32 [R, vocabulary]
Model = Callable[[Batch], Logits]  # runs on one sequence; returns a function for its logits
RESAMPLES = 2000


def of_decoder(decoder: building.Model) -> Model:
    """Returns a decoder in this process, as a `Model`."""

    def read(sequence: Batch) -> Logits:
        hidden = forward(decoder, sequence)
        return lambda rows: decoder.logits(hidden[rows])

    return read


def by_document(samples: Sequence[Sample]) -> list[list[Batch]]:
    """Returns the sequences of each document, a batch for each sequence."""
    ordered = sorted(samples, key=lambda sample: sample.document)
    return [make_batches(list(each), 1) for _, each in groupby(ordered, key=lambda sample: sample.document)]


@torch.no_grad()
def compared(
    documents: Sequence[Sequence[Batch]], model: Model, reference: Model, report: Callable[[int, int], None]
) -> list[TokenTally]:
    """Runs both models on every document. Returns a tally for each document: the sums over its tokens of both models'
    losses, the KL divergence and the agreement."""
    tallies = []
    for number, document in enumerate(documents):
        report(number, len(documents))
        tallies.append(tally := TokenTally())
        for sequence in document:
            _add(tally, sequence, model(sequence), reference(sequence))
    return tallies


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
    """The figures over all tokens. "perplexity_percent": by how much the perplexity exceeds the reference's; "kl": the
    KL divergence in nats per token; "top1": the share of tokens for which both models predict the same next token."""
    columns = [[t.tokens, t.nll, t.reference_nll, t.kl, t.same_top1] for t in tallies]
    sums = torch.tensor(columns, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(len(tallies), (RESAMPLES, len(tallies)), generator=generator)
    values, resampled = _figures(sums.sum(0)), _figures(sums[indices].sum(1))
    edges = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return {name: Interval(float(values[name]), *resampled[name].quantile(edges).tolist()) for name in values}


def _figures(sums: Tensor) -> dict[str, Tensor]:
    """sums [..., 5]: of tokens, the model's loss, the reference's loss, KL divergence, agreement."""
    tokens, nll, reference, kl, agreed = sums.unbind(-1)
    return {
        "perplexity_percent": 100 * torch.expm1((nll - reference) / tokens),
        "kl": (kl / tokens).clamp_min(0),
        "top1": agreed / tokens,
    }
