"""Formats figures and names, and makes the tables that the terminal shows after a calibration or an evaluation."""

import re

from rich.table import Table

from fp8serve.calibration.embedding import TOP_K, EmbeddingReport, EncoderEvalReport
from fp8serve.calibration.result import (
    CalibrationReport,
    EvalReport,
    LayerReport,
    Quality,
    by_cost,
    with_outliers,
)

NO_VALUE = "–"
NUM_WORST_LAYERS = 5
LONG_NAME = re.compile(r".*?layers\.(\d+)\.(?:\w+\.)??(\w+)(?:\.(input|weight|grad_output))?")


def format_number(value: float | None) -> str:
    """Returns `value` with four significant digits, or NO_VALUE for None."""
    return NO_VALUE if value is None else f"{value:.4g}"


def format_decibels(value: float | None) -> str:
    """Returns `value` in dB, or "exact" for None, because SQNR is None if there is no error."""
    return "exact" if value is None else f"{value:.1f} dB"


def format_percent(fraction: float | None) -> str:
    """Returns a fraction from 0 to 1 in percent, or NO_VALUE for None."""
    if fraction is None:
        return NO_VALUE
    return "under 0.0001 %" if 0 < fraction < 1e-6 else f"{100 * fraction:.3g} %"


def format_bytes(count: float) -> str:
    """Returns a number of bytes with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def short_name(name: str) -> str:
    """Shortens `model.layers.3.mlp.down_proj.input` to `layer 3 down_proj input`; other names do not change."""
    match = LONG_NAME.fullmatch(name)
    return " ".join(("layer", *filter(None, match.groups()))) if match else name


def pluralize(number: int, noun: str) -> str:
    """Returns the number with its noun: 1 input, 2 inputs."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def perplexity_change(quality: Quality) -> str:
    """Returns the change of perplexity in percent, or an empty string without a reference."""
    if not quality.reference_perplexity:
        return ""
    return f" ({100 * (quality.perplexity / quality.reference_perplexity - 1):+.2f} %)"


def kl_text(layer: LayerReport, quality: Quality) -> str:
    """Returns the KL divergence that quantizing the layer adds, and its share of the model's KL divergence."""
    if layer.kl is None:
        return ""
    total = quality.kl_divergence
    share = f", {format_percent(layer.kl / total)} of the model's" if total else ""
    return f" (KL {layer.kl:.2g} nats{share})"


def sample_counts(samples: int, documents: int) -> str:
    """Returns the number of samples, and of the documents from which they were taken."""
    return f"{pluralize(samples, 'sample')} from {pluralize(documents, 'document')}"


def outlier_text(layer: LayerReport) -> str:
    """Describes the outlier channel of the layer's input; empty if none is known."""
    if (outlier := layer.outlier) is None:
        return ""
    return f"channel {outlier.channel}: {outlier.size:,.4g} times the median, its weights {outlier.weights:.3g} times"


def summary(report: CalibrationReport) -> str:
    """Returns a sentence about the change of perplexity, and one about the layer that adds most KL divergence."""
    quality, data = report.quality, report.data
    before, after = format_number(quality.reference_perplexity), format_number(quality.perplexity)
    worst = "".join(
        f" The layer with the largest error is {w.name}: SQNR {format_decibels(w.sqnr_db)}{kl_text(w, quality)}."
        for w in report.worst_layers[:1]
    )
    return (
        f"Perplexity changed from {before} to {after}{perplexity_change(quality)} "
        f"on {data.held_out_tokens:,} held-out tokens ({', '.join(data.held_out_source)}).{worst}"
    )


def summary_table(report: CalibrationReport) -> Table:
    """Returns the terminal's table after `fp8serve calibrate`: quality, size, and the worst layers."""
    quality, data = report.quality, report.data
    table = Table(title=f"Calibrated {report.model}", title_justify="left", show_header=False)
    before, after = format_number(quality.reference_perplexity), format_number(quality.perplexity)
    table.add_row("perplexity", f"{before} -> {after}{perplexity_change(quality)}")
    table.add_row(
        "same top token", f"{format_percent(quality.top1_agreement)} (KL {format_number(quality.kl_divergence)} nats)"
    )
    table.add_row("weights", f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}")
    excluded = f", without {data.excluded} held-out examples" if data.excluded else ""
    table.add_row("calibrated on", f"{data.tokens:,} tokens of {', '.join(data.source)}{excluded}")
    table.add_row("", sample_counts(data.samples, data.documents))
    table.add_row("measured on", f"{data.held_out_tokens:,} held-out tokens of {', '.join(data.held_out_source)}")
    table.add_row("", sample_counts(data.held_out_samples, data.held_out_documents))
    saturated = max((layer.saturated for layer in report.layers), default=0.0)
    underflowed = max((layer.underflowed for layer in report.layers), default=0.0)
    shares = f"at most {format_percent(saturated)} saturated, at most {format_percent(underflowed)} underflowed"
    table.add_row("input elements", shares)
    for layer in with_outliers(report.layers)[:1]:
        table.add_row("largest outlier channel", f"{layer.name}, {outlier_text(layer)}")
    if report.in_bf16:
        linears = sum(len(group.names) for group in report.in_bf16)
        extra_bytes = format_bytes(sum(group.bytes for group in report.in_bf16))
        table.add_row("stays in BF16", f"{linears} linear layers, {extra_bytes} more than quantized")
    table.add_row("time", f"{report.seconds.get('total', 0):.1f} s on {report.device}", end_section=True)
    for layer in report.worst_layers[:NUM_WORST_LAYERS]:
        table.add_row(layer.name, f"SQNR {format_decibels(layer.sqnr_db)}{kl_text(layer, quality)}")
    for group in report.in_bf16:
        cost = "" if group.kl is None else f" (quantized: KL {group.kl:.2g} nats)"
        table.add_row(" ".join(group.names), f"stays in BF16, {format_bytes(group.bytes)}{cost}")
    table.add_row("written to", report.out)
    return table


def eval_table(report: EvalReport) -> Table:
    """Returns the terminal's table after `fp8serve eval`."""
    quality = report.quality
    table = Table(title=f"{report.model} ({report.runs_as})", title_justify="left", show_header=False)
    table.add_row("perplexity", format_number(quality.perplexity) + f" over {quality.tokens:,} tokens")
    amount = f"{report.tokens:,} tokens of {', '.join(report.source)}"
    table.add_row("read", f"{amount} ({sample_counts(report.samples, report.documents)})")
    if report.against is not None:
        table.add_row("reference", report.against)
        table.add_row("reference perplexity", format_number(quality.reference_perplexity) + perplexity_change(quality))
        table.add_row("KL to the reference", f"{format_number(quality.kl_divergence)} nats per token")
        table.add_row("same top token", format_percent(quality.top1_agreement), end_section=True)
    for layer in by_cost(report.layers)[:NUM_WORST_LAYERS]:
        table.add_row(layer.name, f"SQNR {format_decibels(layer.sqnr_db)}{kl_text(layer, quality)}")
    return table


def embedding_table(report: EmbeddingReport) -> Table:
    """Returns the terminal's table after `fp8serve calibrate` of an encoder."""
    table = Table(title=f"Calibrated {report.model}", title_justify="left", show_header=False)
    table.add_row("cosine to BF16", f"median {report.quality.median:.5f}, minimum {report.quality.minimum:.5f}")
    table.add_row("weights", f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}")
    table.add_row("calibrated on", f"{report.tokens:,} tokens of {', '.join(report.source)}")
    for advice in report.notes[1:]:
        table.add_row("", advice)
    for layer in by_cost(report.layers)[:NUM_WORST_LAYERS]:
        table.add_row(layer.name, f"SQNR {format_decibels(layer.sqnr_db)}")
    for group in report.in_bf16:
        cosine = "" if group.cosine is None else f" (cosine with only these layers quantized: {group.cosine:.5f})"
        table.add_row(" ".join(group.names), f"stays in BF16, {format_bytes(group.bytes)}{cosine}")
    table.add_row("written to", report.out)
    return table


def encoder_eval_table(report: EncoderEvalReport) -> Table:
    """Returns the terminal's table after `fp8serve eval` of an encoder."""
    table = Table(title=f"{report.model} ({report.recipe})", title_justify="left", show_header=False)
    for name, text in evaluation_figures(report).items():
        table.add_row(name, text)
    table.add_row("measured on", f"{report.tokens:,} tokens of {', '.join(report.source)}")
    if report.against is not None:
        table.add_row("against", report.against, end_section=True)
    for note in report.notes:
        table.add_row("", note)
    for layer in by_cost(report.layers)[:NUM_WORST_LAYERS]:
        table.add_row(layer.name, f"SQNR {format_decibels(layer.sqnr_db)}")
    return table


def evaluation_figures(report: EncoderEvalReport) -> dict[str, str]:
    """Returns the results of an encoder's evaluation by label."""
    rows: dict[str, str] = {}
    if (cosine := report.cosine) is not None:
        rows["cosine to BF16"] = (
            f"median {cosine.median:.5f}, 5th percentile {cosine.percentile_5:.5f}, minimum {cosine.minimum:.5f}"
        )
    if (scores := report.scores) is not None:
        rows["score difference"] = f"mean {scores.mean:.5f}, maximum {scores.maximum:.5f}"
        if scores.same_label is not None:
            rows["same label"] = f"{format_percent(scores.same_label)} of {scores.texts} texts"
    if (ranking := report.ranking) is not None:
        reference = (
            ""
            if ranking.reference_top1_accuracy is None
            else f", {format_percent(ranking.reference_top1_accuracy)} in BF16"
        )
        rows["retrieval top-1"] = f"{format_percent(ranking.top1_accuracy)} of {ranking.queries} texts{reference}"
        if ranking.same_top1 is not None and ranking.top_k_overlap is not None:
            rows["same top-1"] = f"{format_percent(ranking.same_top1)} of the texts"
            rows[f"overlap of top-{TOP_K}"] = format_percent(ranking.top_k_overlap)
    return rows
