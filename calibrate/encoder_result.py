"""The result of evaluating a model that embeds or scores, as JSON and for the terminal."""

import json
from dataclasses import asdict, dataclass

from rich.table import Table
from torch import Tensor

from .closeness import Closeness
from .result import LayerReport, Made, worst_first
from .retrieval import Ranking
from .words import decibels, percent


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
    made: Made | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False, ensure_ascii=False)


def figures(report: EncoderEvalReport) -> dict[str, str]:
    """The results, one line per figure."""
    found: dict[str, str] = {}
    if (close := report.closeness) is not None:
        found["cosine to BF16"] = (
            f"{close.median:.5f} median, {close.fifth:.5f} 5th percentile, {close.least:.5f} least"
        )
    if (scores := report.scores) is not None:
        found["scores moved by"] = f"{scores.mean:.5f} in the mean, {scores.largest:.5f} at most"
        if scores.same_label is not None:
            found["same label"] = f"{percent(scores.same_label)} of {scores.texts} texts"
    if (ranking := report.ranking) is not None:
        before = "" if ranking.reference_found is None else f", {percent(ranking.reference_found)} in BF16"
        found["other half found first"] = f"{percent(ranking.found)} of {ranking.queries} texts{before}"
        if ranking.same_first is not None:
            found["same first, same ten"] = f"{percent(ranking.same_first)}, {percent(ranking.same_top)}"
    return found


def encoder_eval_table(report: EncoderEvalReport, worst: int = 5) -> Table:
    """What the terminal shows after `fp8serve eval` of an encoder."""
    table = Table(title=f"{report.model} ({report.recipe})", title_justify="left", show_header=False)
    for name, text in figures(report).items():
        table.add_row(name, text)
    table.add_row("measured on", f"{report.tokens:,} tokens of {', '.join(report.source)}")
    if report.against is not None:
        table.add_row("against", report.against, end_section=True)
    for note in report.notes:
        table.add_row("", note)
    for layer in worst_first(report.layers)[:worst]:
        table.add_row(layer.name, f"SQNR {decibels(layer.sqnr_db)}")
    return table
