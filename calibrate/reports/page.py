"""The HTML pages of reports: which sections a page has, and in which order.

A page is made only from the contents of its report. The page of a calibration takes a few hundred kilobytes.
"""

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from fp8serve.calibration.embedding import EmbeddingReport, EncoderEvalReport
from fp8serve.calibration.reports import sections
from fp8serve.calibration.reports.findings import evaluation_findings, findings
from fp8serve.calibration.reports.html import cards, document, section, table
from fp8serve.calibration.reports.tables import (
    evaluation_figures,
    format_bytes,
    format_decibels,
    format_number,
    format_percent,
    perplexity_change,
    sample_counts,
    summary,
)
from fp8serve.calibration.result import CalibrationReport, EvalReport, LayerReport, by_cost

FACTS = ("model", "out", "against", "format", "recipe", "rounding", "device", "data", "source", "samples", "seq_len",
         "seconds", "versions")  # fmt: skip
Report = CalibrationReport | EvalReport | EmbeddingReport | EncoderEvalReport


def html_report(report: CalibrationReport) -> str:
    title = f"Calibration of {base_name(report.model)}"
    content = [
        sections.heading(title, summary(report), report.notes),
        _cards(report),
        sections.finding_list(findings(report)),
        sections.generated_text(report.generated),
        sections.layer_costs(report.layers, report.tensors),
        sections.in_bf16(report.in_bf16, "KL if quantized, nats", [group.kl for group in report.in_bf16]),
        sections.layer_sqnr(report.layers),
        sections.headroom(report.layers),
        sections.amax_per_batch(report.layers, report.tensors),
        sections.value_distribution(report.layers),
        sections.amax_per_layer(report.tensors),
        sections.smoothing(report.smoothing),
        sections.healing(report.healing),
        _facts(report),
        sections.scale_table(report.tensors),
    ]
    return document(title, content)


def html_evaluation(report: EvalReport) -> str:
    """Returns the page of an evaluation; sections about layers need a reference."""
    title = f"Evaluation of {base_name(report.model)}"
    content = [
        sections.heading(title, _evaluation_summary(report), report.notes),
        _evaluation_cards(report),
        sections.finding_list(evaluation_findings(report)) if report.layers else "",
        sections.layer_costs(report.layers),
        sections.layer_sqnr(report.layers),
        sections.headroom(report.layers),
        sections.value_distribution(report.layers),
        _facts(report),
    ]
    return document(title, content)


def base_name(model: str) -> str:
    """Returns the last part of a path."""
    return model.rstrip("/").rpartition("/")[2] or model


def _cards(report: CalibrationReport) -> str:
    quality, ratio = report.quality, report.bytes_after / max(1, report.bytes_before)
    worst = min((layer.sqnr_db for layer in report.layers if layer.sqnr_db is not None), default=None)
    contents = {
        "Perplexity": (
            f"{format_number(quality.reference_perplexity)} → {format_number(quality.perplexity)}",
            perplexity_change(quality),
        ),
        "Same top token": (format_percent(quality.top1_agreement), f"KL {format_number(quality.kl_divergence)} nats"),
        "Lowest SQNR": (format_decibels(worst), f"{len(report.layers)} quantized layers"),
        "Weights": (
            format_bytes(report.bytes_after),
            f"{format_percent(ratio)} of {format_bytes(report.bytes_before)}",
        ),
        "Calibrated on": (f"{report.data.tokens:,} tokens", sample_counts(report.data.samples, report.data.documents)),
        "Time": (f"{report.seconds.get('total', 0):.1f} s", report.device),
    }
    return cards(contents)


def _evaluation_cards(report: EvalReport) -> str:
    quality = report.quality
    contents = {
        "Perplexity": (format_number(quality.perplexity), f"of {quality.tokens:,} tokens"),
        "Recipe": (report.runs_as, f"{len(report.layers)} quantized layers compared" if report.layers else ""),
        "Time": (f"{report.seconds:.1f} s", f"{report.samples} samples"),
    }
    if report.against is not None:
        contents["Reference"] = (format_number(quality.reference_perplexity), f"perplexity{perplexity_change(quality)}")
        contents["Same top token"] = (
            format_percent(quality.top1_agreement),
            f"KL {format_number(quality.kl_divergence)} nats",
        )
    return cards(contents)


def _evaluation_summary(report: EvalReport) -> str:
    """Returns a sentence about the model, its reference and the text."""
    text = f"{report.quality.tokens:,} tokens of {', '.join(report.source)}"
    if report.against is None:
        return f"Perplexity {format_number(report.quality.perplexity)} on {text}, with the recipe {report.runs_as}."
    return f"{report.model} with the recipe {report.runs_as}, against {report.against} in high precision, on {text}."


def html_encoder_report(report: EmbeddingReport) -> str:
    """Returns the page of an encoder's calibration."""
    cosine = report.quality
    contents = {
        "Cosine to BF16": (f"{cosine.median:.5f}", f"median of {cosine.texts} held-out texts"),
        "5th percentile of cosine": (f"{cosine.percentile_5:.5f}", f"minimum {cosine.minimum:.5f}"),
        "Weights": (format_bytes(report.bytes_after), f"of {format_bytes(report.bytes_before)}"),
        "Calibrated on": (f"{report.tokens:,} tokens", f"{report.samples} samples"),
        "Time": (f"{report.seconds.get('total', 0):.1f} s", report.device),
    }
    title = f"Calibration of {base_name(report.model)}"
    content = [
        sections.heading(title, report.notes[0], report.notes[1:]),
        cards(contents),
        _layers(report.layers),
        sections.in_bf16(
            report.in_bf16, "cosine with only these quantized", [group.cosine for group in report.in_bf16]
        ),
        _facts(report),
    ]
    return document(title, content)


def html_encoder_evaluation(report: EncoderEvalReport) -> str:
    """Returns the page of an encoder's evaluation."""
    title = f"Evaluation of {base_name(report.model)}"
    text = f"on {report.tokens:,} tokens of {', '.join(report.source)}"
    reference = "" if report.against is None else f", against {report.against} in BF16"
    content = [
        sections.heading(title, f"{report.model} with the recipe {report.recipe}{reference}, {text}.", report.notes),
        section(
            "Results",
            "The cosine compares the vectors of a text by both models. For the retrieval test each text is split into "
            "halves, and the first half is the query for the second half. Top-1 is the share of queries for which the "
            "correct half has rank 1.",
            table(("", ""), [[escape(name), escape(value)] for name, value in evaluation_figures(report).items()]),
        ),
        _layers(report.layers),
        _facts(report),
    ]
    return document(title, content)


def _facts(report: Report) -> str:
    return sections.facts(report.origin, {key: value for key, value in asdict(report).items() if key in FACTS})


def _layers(layers: Sequence[LayerReport]) -> str:
    rows = [
        [escape(x.name), *sections.sqnrs(x), format_percent(x.saturated), format_percent(x.underflowed)]
        for x in by_cost(layers)
    ]
    head = ("layer", "SQNR", "SQNR of input", "SQNR of weight", "input saturated", "input underflowed")
    return section(
        "SQNR of each layer",
        "SQNR is the ratio of signal power to rounding-noise power, for the layer's output, its input and its weight. "
        "6 dB are one bit. A tensor that suits E4M3 has about 31 dB.",
        table(head, rows) if rows else "",
    )
