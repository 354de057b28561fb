"""Figures and names in readable form, and the tables that the terminal shows after a calibration or an evaluation."""

import re
from collections.abc import Sequence

from rich.table import Table

from fp8serve.calibration.embedding import EmbeddingReport, EncoderEvalReport
from fp8serve.calibration.result import (
    CalibrationReport,
    DataReport,
    EvalReport,
    LayerReport,
    LinearGroup,
    Quality,
    uneven_first,
    worst_first,
)

NONE = "–"
LONG_NAME = re.compile(r".*?layers\.(\d+)\.(?:\w+\.)??(\w+)(?:\.(input|weight|grad_output))?")


def number(value: float | None) -> str:
    """Four digits."""
    return NONE if value is None else f"{value:.4g}"


def decibels(value: float | None) -> str:
    """None: no error."""
    return "exact" if value is None else f"{value:.1f} dB"


def percent(fraction: float | None) -> str:
    """Of a fraction 0..1."""
    if fraction is None:
        return NONE
    return "under 0.0001 %" if 0 < fraction < 1e-6 else f"{100 * fraction:.3g} %"


def size(count: float) -> str:
    """Bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def short(name: str) -> str:
    """model.layers.3.mlp.down_proj.input -> layer 3 down_proj input."""
    match = LONG_NAME.fullmatch(name)
    return " ".join(("layer", *filter(None, match.groups()))) if match else name


def count(number: int, what: str) -> str:
    """1 input, 2 inputs."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def change(quality: Quality) -> str:
    """Of perplexity, in percent; empty without a reference."""
    if not quality.reference_perplexity:
        return ""
    return f" ({100 * (quality.perplexity / quality.reference_perplexity - 1):+.2f} %)"


def cost(layer: LayerReport, quality: Quality) -> str:
    """What the layer's FP8 adds to the KL divergence, and its share of the total."""
    if layer.kl is None:
        return ""
    part = f", {percent(layer.kl / quality.kl_divergence)} of the model's" if quality.kl_divergence else ""
    return f" (KL {layer.kl:.2g} nats{part})"


def counts(samples: int, documents: int) -> str:
    """Of what was read."""
    return f"{count(samples, 'sample')} from {count(documents, 'document')}"


def outlier_of(layer: LayerReport) -> str:
    """The channel of its input that is farthest from the others; empty where none is known."""
    if (result := layer.outlier) is None:
        return ""
    return f"channel {result.channel}: {result.size:,.4g} times, its weights {result.weights:.3g} times"


def bytes_in_bf16(report: CalibrationReport) -> str:
    """The size of the linears that stay in BF16."""
    return f"{size(sum(retained.bytes for retained in report.kept))} more than in FP8"


def verdict(report: CalibrationReport) -> str:
    """One sentence or two: the change on the held-out samples, and the weakest layer."""
    quality = report.quality
    where = f"{report.data.held_out_tokens:,} tokens that no scale has seen ({', '.join(report.data.held_out_source)})"
    before, after = number(quality.reference_perplexity), number(quality.perplexity)
    weakest = "".join(
        f" What costs most is {w.name} at {decibels(w.sqnr_db)}{cost(w, quality)}." for w in report.worst_layers[:1]
    )
    return f"Perplexity on {where} went from {before} to {after}{change(quality)}.{weakest}"


def _excluded(data: DataReport) -> str:
    return f", without {data.excluded} examples that are held out" if data.excluded else ""


def summary_table(report: CalibrationReport, worst: int = 5) -> Table:
    """What the terminal shows after `fp8serve calibrate`: quality and size, then the `worst` layers."""
    quality, data = report.quality, report.data
    table = Table(title=f"Calibrated {report.model}", title_justify="left", show_header=False)
    table.add_row(
        "perplexity", f"{number(quality.reference_perplexity)} -> {number(quality.perplexity)}{change(quality)}"
    )
    table.add_row("same top token", f"{percent(quality.top1_agreement)} (KL {number(quality.kl_divergence)} nats)")
    table.add_row("weights", f"{size(report.bytes_before)} -> {size(report.bytes_after)}")
    table.add_row("calibrated on", f"{data.tokens:,} tokens of {', '.join(data.source)}{_excluded(data)}")
    table.add_row("", counts(data.samples, data.documents))
    table.add_row("measured on", f"{data.held_out_tokens:,} other tokens, of {', '.join(data.held_out_source)}")
    table.add_row("", counts(data.held_out_samples, data.held_out_documents))
    saturated = max((layer.saturated for layer in report.layers), default=0.0)
    underflowed = max((layer.underflowed for layer in report.layers), default=0.0)
    table.add_row("inputs cut off, lost to zero", f"{percent(saturated)}, {percent(underflowed)} at most")
    for uneven in uneven_first(report.layers)[:1]:
        table.add_row("most uneven input", f"{uneven.name}, {outlier_of(uneven)} the median")
    if report.kept:
        table.add_row(
            "stays in BF16", f"{sum(len(k.names) for k in report.kept)} linear layers, {bytes_in_bf16(report)}"
        )
    table.add_row("time", f"{report.seconds.get('total', 0):.1f} s on {report.device}", end_section=True)
    for layer in report.worst_layers[:worst]:
        table.add_row(layer.name, f"SQNR {decibels(layer.sqnr_db)}{cost(layer, quality)}")
    for retained in report.kept:
        table.add_row(" ".join(retained.names), f"stays in BF16{_group_cost(retained)}")
    table.add_row("written to", report.out)
    return table


def _group_cost(group: LinearGroup) -> str:
    return f", {size(group.bytes)}" + ("" if group.kl is None else f" (FP8: KL {group.kl:.2g} nats)")


def eval_table(report: EvalReport, worst: int = 5) -> Table:
    """What the terminal shows after `fp8serve eval`."""
    quality = report.quality
    table = Table(title=f"{report.model} ({report.runs_as})", title_justify="left", show_header=False)
    table.add_row("perplexity", number(quality.perplexity) + f" over {quality.tokens:,} tokens")
    read = f"{report.tokens:,} tokens of {', '.join(report.source)}"
    table.add_row("read", f"{read} ({counts(report.samples, report.documents)})")
    if report.against is not None:
        table.add_row("reference", report.against)
        table.add_row("reference perplexity", number(quality.reference_perplexity) + change(quality))
        table.add_row("KL to the reference", f"{number(quality.kl_divergence)} nats per token")
        table.add_row("same top token", percent(quality.top1_agreement), end_section=True)
    for layer in worst_first(report.layers)[:worst]:
        table.add_row(layer.name, f"SQNR {decibels(layer.sqnr_db)}{cost(layer, quality)}")
    return table


def embedding_table(report: EmbeddingReport, worst: int = 5) -> Table:
    """What the terminal shows after `fp8serve calibrate` of an encoder."""
    table = Table(title=f"Calibrated {report.model}", title_justify="left", show_header=False)
    table.add_row("cosine to BF16", f"{report.quality.median:.5f} median, {report.quality.least:.5f} at least")
    table.add_row("weights", f"{size(report.bytes_before)} -> {size(report.bytes_after)}")
    table.add_row("calibrated on", f"{report.tokens:,} tokens of {', '.join(report.source)}")
    for advice in report.notes[1:]:
        table.add_row("", advice)
    for layer in worst_first(report.layers)[:worst]:
        table.add_row(layer.name, f"SQNR {decibels(layer.sqnr_db)}")
    for retained in report.kept:
        alone = "" if retained.cosine is None else f" (cosine with FP8 here alone: {retained.cosine:.5f})"
        table.add_row(" ".join(retained.names), f"stays in BF16, {size(retained.bytes)}{alone}")
    table.add_row("written to", report.out)
    return table


def encoder_eval_table(report: EncoderEvalReport, worst: int = 5) -> Table:
    """What the terminal shows after `fp8serve eval` of an encoder."""
    table = Table(title=f"{report.model} ({report.recipe})", title_justify="left", show_header=False)
    for name, text in evaluation_figures(report).items():
        table.add_row(name, text)
    table.add_row("measured on", f"{report.tokens:,} tokens of {', '.join(report.source)}")
    if report.against is not None:
        table.add_row("against", report.against, end_section=True)
    for note in report.notes:
        table.add_row("", note)
    for layer in worst_first(report.layers)[:worst]:
        table.add_row(layer.name, f"SQNR {decibels(layer.sqnr_db)}")
    return table


def evaluation_figures(report: EncoderEvalReport) -> dict[str, str]:
    """The results, one line per figure."""
    results: dict[str, str] = {}
    if (close := report.closeness) is not None:
        results["cosine to BF16"] = (
            f"{close.median:.5f} median, {close.fifth:.5f} 5th percentile, {close.least:.5f} least"
        )
    if (scores := report.scores) is not None:
        results["scores moved by"] = f"{scores.mean:.5f} in the mean, {scores.largest:.5f} at most"
        if scores.same_label is not None:
            results["same label"] = f"{percent(scores.same_label)} of {scores.texts} texts"
    if (ranking := report.ranking) is not None:
        before = "" if ranking.reference_found is None else f", {percent(ranking.reference_found)} in BF16"
        results["other half found first"] = f"{percent(ranking.found)} of {ranking.queries} texts{before}"
        if ranking.same_first is not None:
            results["same first, same ten"] = f"{percent(ranking.same_first)}, {percent(ranking.same_top)}"
    return results
