"""Which sections the page of a report has, and in which order: what FP8 cost, then where, then why.

A page is drawn only from the contents of calibration.json. A calibration's takes some hundreds of kilobytes.
"""

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from fp8serve.calibration.embedding import EmbeddingReport, EncoderEvalReport
from fp8serve.calibration.reports import sections
from fp8serve.calibration.reports.findings import evaluation_findings, findings
from fp8serve.calibration.reports.html import cards, document, section, table
from fp8serve.calibration.reports.tables import (
    change,
    counts,
    decibels,
    evaluation_figures,
    number,
    percent,
    size,
    verdict,
)
from fp8serve.calibration.result import CalibrationReport, EvalReport, LayerReport, worst_first

FACTS = ("model", "out", "against", "format", "recipe", "rounding", "device", "data", "source", "samples", "seq_len",
         "seconds", "versions")  # fmt: skip
Report = CalibrationReport | EvalReport | EmbeddingReport | EncoderEvalReport


def html_report(report: CalibrationReport) -> str:
    title = f"Calibration of {last_of(report.model)}"
    content = [
        sections.heading(title, verdict(report), report.notes),
        _cards(report),
        sections.what_to_know(findings(report)),
        sections.before_and_after(report.generated),
        sections.costs(report.layers, report.tensors),
        sections.in_bf16(report.kept, "KL that their FP8 would add, nats", [k.kl for k in report.kept]),
        sections.noise(report.layers),
        sections.room(report.layers),
        sections.batches(report.layers, report.tensors),
        sections.grid(report.layers),
        sections.largest(report.tensors),
        sections.smoothing(report.smoothing),
        sections.healing(report.healing),
        _facts(report),
        sections.scales(report.tensors),
    ]
    return document(title, content)


def html_evaluation(report: EvalReport) -> str:
    """The page of an evaluation; sections about layers need a reference."""
    title = f"Evaluation of {last_of(report.model)}"
    content = [
        sections.heading(title, _measured(report), report.notes),
        _evaluation_cards(report),
        sections.what_to_know(evaluation_findings(report)) if report.layers else "",
        sections.costs(report.layers),
        sections.noise(report.layers),
        sections.room(report.layers),
        sections.grid(report.layers),
        _facts(report),
    ]
    return document(title, content)


def last_of(model: str) -> str:
    """The last part of a path."""
    return model.rstrip("/").rpartition("/")[2] or model


def _cards(report: CalibrationReport) -> str:
    quality, ratio = report.quality, report.bytes_after / max(1, report.bytes_before)
    worst = min((layer.sqnr_db for layer in report.layers if layer.sqnr_db is not None), default=None)
    contents = {
        "Perplexity": (f"{number(quality.reference_perplexity)} → {number(quality.perplexity)}", change(quality)),
        "Same top token": (percent(quality.top1_agreement), f"KL {number(quality.kl_divergence)} nats"),
        "Lowest SQNR": (decibels(worst), f"{len(report.layers)} FP8 layers"),
        "Weights": (size(report.bytes_after), f"{percent(ratio)} of {size(report.bytes_before)}"),
        "Calibrated on": (f"{report.data.tokens:,} tokens", counts(report.data.samples, report.data.documents)),
        "Time": (f"{report.seconds.get('total', 0):.1f} s", report.device),
    }
    return cards(contents)


def _evaluation_cards(report: EvalReport) -> str:
    quality = report.quality
    contents = {
        "Perplexity": (number(quality.perplexity), f"of {quality.tokens:,} tokens"),
        "Recipe": (report.runs_as, f"{len(report.layers)} FP8 layers compared" if report.layers else ""),
        "Time": (f"{report.seconds:.1f} s", f"{report.samples} samples"),
    }
    if report.against is not None:
        contents["Reference"] = (number(quality.reference_perplexity), f"perplexity{change(quality)}")
        contents["Same top token"] = (percent(quality.top1_agreement), f"KL {number(quality.kl_divergence)} nats")
    return cards(contents)


def _measured(report: EvalReport) -> str:
    """One sentence: on what, and against what."""
    where = f"{report.quality.tokens:,} tokens of {', '.join(report.source)}"
    if report.against is None:
        return f"Perplexity {number(report.quality.perplexity)} on {where}, under the recipe {report.runs_as}."
    return f"{report.model} under the recipe {report.runs_as}, against {report.against} in high precision, on {where}."


def html_encoder_report(report: EmbeddingReport) -> str:
    """Of a calibration."""
    close = report.quality
    contents = {
        "Cosine to BF16": (f"{close.median:.5f}", f"median of {close.texts} held-out texts"),
        "Fifth percentile": (f"{close.fifth:.5f}", f"{close.least:.5f} at least"),
        "Weights": (size(report.bytes_after), f"of {size(report.bytes_before)}"),
        "Calibrated on": (f"{report.tokens:,} tokens", f"{report.samples} samples"),
        "Time": (f"{report.seconds.get('total', 0):.1f} s", report.device),
    }
    title = f"Calibration of {last_of(report.model)}"
    content = [
        sections.heading(title, report.notes[0], report.notes[1:]),
        cards(contents),
        _layers(report.layers),
        sections.in_bf16(report.kept, "cosine with FP8 here alone", [k.cosine for k in report.kept]),
        _facts(report),
    ]
    return document(title, content)


def html_encoder_evaluation(report: EncoderEvalReport) -> str:
    """Of an evaluation."""
    title = f"Evaluation of {last_of(report.model)}"
    where = f"on {report.tokens:,} tokens of {', '.join(report.source)}"
    other = "" if report.against is None else f", against {report.against} in BF16"
    content = [
        sections.heading(title, f"{report.model} under the recipe {report.recipe}{other}, {where}.", report.notes),
        section(
            "What was found",
            "The cosine is between both models' vectors of a text. Texts are cut in two, and second halves searched "
            "with first ones: how often the right one comes first, and how often both models put the same ones first.",
            table(("", ""), [[escape(name), escape(text)] for name, text in evaluation_figures(report).items()]),
        ),
        _layers(report.layers),
        _facts(report),
    ]
    return document(title, content)


def _facts(report: Report) -> str:
    return sections.facts(report.made, {key: value for key, value in asdict(report).items() if key in FACTS})


def _layers(layers: Sequence[LayerReport]) -> str:
    rows = [
        [escape(x.name), *sections.sqnrs(x), percent(x.saturated), percent(x.underflowed)] for x in worst_first(layers)
    ]
    head = ("layer", "SQNR", "of input", "of weight", "inputs cut off", "inputs lost to zero")
    return section(
        "Signal and noise of every layer",
        "SQNR is the power of a signal over that of its rounding noise: of the layer's output, and of the input "
        "and the weight that it comes from. 6 dB are one bit, and E4M3 leaves about 31 dB of a tensor that suits it.",
        table(head, rows) if rows else "",
    )
