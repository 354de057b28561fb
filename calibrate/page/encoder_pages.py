"""The pages of a model that embeds or scores: the cost of FP8, in total and by layer."""

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from fp8serve.calibration.embedding_report import EmbeddingReport
from fp8serve.calibration.encoder_result import EncoderEvalReport, figures
from fp8serve.calibration.result import KeptReport, LayerReport, worst_first
from fp8serve.calibration.words import NONE, decibels, number, percent, size

from . import texts
from .html import card, document, section, table
from .pages import FACTS, last_of


def html_encoder_report(report: EmbeddingReport) -> str:
    """Of a calibration."""
    close = report.quality
    cards = {
        "Cosine to BF16": (f"{close.median:.5f}", f"median of {close.texts} held-out texts"),
        "Fifth percentile": (f"{close.fifth:.5f}", f"{close.least:.5f} at least"),
        "Weights": (size(report.bytes_after), f"of {size(report.bytes_before)}"),
        "Calibrated on": (f"{report.tokens:,} tokens", f"{report.samples} samples"),
        "Time": (f"{report.seconds.get('total', 0):.1f} s", report.device),
    }
    title = f"Calibration of {last_of(report.model)}"
    content = [
        texts.heading(title, report.notes[0], report.notes[1:]),
        _row(cards),
        _layers(report.layers),
        _kept(report.kept),
        texts.facts(report.made, _facts(asdict(report))),
    ]
    return document(title, content)


def html_encoder_evaluation(report: EncoderEvalReport) -> str:
    """Of an evaluation."""
    title = f"Evaluation of {last_of(report.model)}"
    where = f"on {report.tokens:,} tokens of {', '.join(report.source)}"
    other = "" if report.against is None else f", against {report.against} in BF16"
    content = [
        texts.heading(title, f"{report.model} under the recipe {report.recipe}{other}, {where}.", report.notes),
        section(
            "What was found",
            "The cosine is between both models' vectors of a text. Texts are cut in two, and second halves searched "
            "with first ones: how often the right one comes first, and how often both models put the same ones first.",
            table(("", ""), [[escape(name), escape(text)] for name, text in figures(report).items()]),
        ),
        _layers(report.layers),
        texts.facts(report.made, _facts(asdict(report))),
    ]
    return document(title, content)


def _facts(values: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if key in FACTS}


def _row(cards: dict[str, tuple[str, str]]) -> str:
    return f'<div class="cards">{"".join(card(name, *said) for name, said in cards.items())}</div>'


def _layers(layers: Sequence[LayerReport]) -> str:
    rows = [
        [escape(x.name), decibels(x.sqnr_db), *_casts(x), percent(x.saturated), percent(x.underflowed)]
        for x in worst_first(layers)
    ]
    head = ("layer", "SQNR", "of input", "of weight", "inputs cut off", "inputs lost to zero")
    return section(
        "Signal and noise of every layer",
        "SQNR is the power of a signal over that of its rounding noise: of the layer's output, and of the input "
        "and the weight that it comes from. 6 dB are one bit, and E4M3 leaves about 31 dB of a tensor that suits it.",
        table(head, rows) if rows else "",
    )


def _casts(layer: LayerReport) -> list[str]:
    return [NONE if cast is None else decibels(cast.sqnr_db) for cast in (layer.input, layer.weight)]


def _kept(kept: Sequence[KeptReport]) -> str:
    rows = [[escape(", ".join(k.names)), size(k.bytes), number(k.cosine)] for k in kept]
    return section(
        "Stays in BF16",
        "These layers were left in high precision, because somebody named them or a target for quality asked for it.",
        table(("linear layers", "more than in FP8", "cosine with FP8 here alone"), rows) if rows else "",
    )
