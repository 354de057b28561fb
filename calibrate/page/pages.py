"""Which sections the page of a report has, and in which order: what FP8 cost, then where, then why."""

from dataclasses import asdict

from fp8serve.calibration.report import verdict
from fp8serve.calibration.result import CalibrationReport, EvalReport
from fp8serve.calibration.words import change, counts, decibels, number, percent, size

from . import layers, tensors, texts
from .findings import evaluation_findings, findings
from .html import card, document

FACTS = ("model", "out", "against", "format", "recipe", "rounding", "device", "data", "source", "samples", "seq_len",
         "seconds", "versions")  # fmt: skip


def html_report(report: CalibrationReport) -> str:
    """The page of a calibration: some hundreds of kilobytes."""
    title = f"Calibration of {last_of(report.model)}"
    facts = {key: value for key, value in asdict(report).items() if key in FACTS}
    content = [
        texts.heading(title, verdict(report), report.notes),
        _cards(report),
        texts.what_to_know(findings(report)),
        texts.before_and_after(report.generated),
        layers.costs(report.layers, report.tensors),
        texts.in_bf16(report.kept),
        layers.noise(report.layers),
        layers.room(report.layers),
        tensors.batches(report.layers, report.tensors),
        layers.grid(report.layers),
        tensors.largest(report.tensors),
        texts.smoothing(report.smoothing),
        texts.healing(report.healing),
        texts.facts(report.made, facts),
        tensors.scales(report.tensors),
    ]
    return document(title, content)


def html_evaluation(report: EvalReport) -> str:
    """The page of an evaluation; sections about layers need a reference."""
    title = f"Evaluation of {last_of(report.model)}"
    facts = {key: value for key, value in asdict(report).items() if key in FACTS}
    content = [
        texts.heading(title, _measured(report), report.notes),
        _evaluation_cards(report),
        texts.what_to_know(evaluation_findings(report)) if report.layers else "",
        layers.costs(report.layers),
        layers.noise(report.layers),
        layers.room(report.layers),
        layers.grid(report.layers),
        texts.facts(report.made, facts),
    ]
    return document(title, content)


def last_of(model: str) -> str:
    """The last part of a path."""
    return model.rstrip("/").rpartition("/")[2] or model


def _cards(report: CalibrationReport) -> str:
    quality, ratio = report.quality, report.bytes_after / max(1, report.bytes_before)
    worst = min((layer.sqnr_db for layer in report.layers if layer.sqnr_db is not None), default=None)
    cards = {
        "Perplexity": (f"{number(quality.reference_perplexity)} → {number(quality.perplexity)}", change(quality)),
        "Same top token": (percent(quality.top1_agreement), f"KL {number(quality.kl_divergence)} nats"),
        "Lowest SQNR": (decibels(worst), f"{len(report.layers)} FP8 layers"),
        "Weights": (size(report.bytes_after), f"{percent(ratio)} of {size(report.bytes_before)}"),
        "Calibrated on": (f"{report.data.tokens:,} tokens", counts(report.data.samples, report.data.documents)),
        "Time": (f"{report.seconds.get('total', 0):.1f} s", report.device),
    }
    return _row(cards)


def _evaluation_cards(report: EvalReport) -> str:
    quality = report.quality
    cards = {
        "Perplexity": (number(quality.perplexity), f"of {quality.tokens:,} tokens"),
        "Recipe": (report.runs_as, f"{len(report.layers)} FP8 layers compared" if report.layers else ""),
        "Time": (f"{report.seconds:.1f} s", f"{report.samples} samples"),
    }
    if report.against is not None:
        cards["Reference"] = (number(quality.reference_perplexity), f"perplexity{change(quality)}")
        cards["Same top token"] = (percent(quality.top1_agreement), f"KL {number(quality.kl_divergence)} nats")
    return _row(cards)


def _row(cards: dict[str, tuple[str, str]]) -> str:
    return f'<div class="cards">{"".join(card(name, *texts) for name, texts in cards.items())}</div>'


def _measured(report: EvalReport) -> str:
    """One sentence: on what, and against what."""
    where = f"{report.quality.tokens:,} tokens of {', '.join(report.source)}"
    if report.against is None:
        return f"Perplexity {number(report.quality.perplexity)} on {where}, under the recipe {report.runs_as}."
    return f"{report.model} under the recipe {report.runs_as}, against {report.against} in high precision, on {where}."
