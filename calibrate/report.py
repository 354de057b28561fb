"""A calibration or an evaluation in a sentence, and as a table for the terminal. The page is in page/."""

from rich.table import Table

from .result import CalibrationReport, DataReport, EvalReport, KeptReport, uneven_first, worst_first
from .words import change, cost, counts, decibels, kept_bytes, number, outlier_of, percent, size


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
        table.add_row("stays in BF16", f"{sum(len(k.names) for k in report.kept)} linear layers, {kept_bytes(report)}")
    table.add_row("time", f"{report.seconds.get('total', 0):.1f} s on {report.device}", end_section=True)
    for layer in report.worst_layers[:worst]:
        table.add_row(layer.name, f"SQNR {decibels(layer.sqnr_db)}{cost(layer, quality)}")
    for kept in report.kept:
        table.add_row(" ".join(kept.names), f"stays in BF16{_kept_cost(kept)}")
    table.add_row("written to", report.out)
    return table


def _kept_cost(kept: KeptReport) -> str:
    return f", {size(kept.bytes)}" + ("" if kept.kl is None else f" (FP8: KL {kept.kl:.2g} nats)")


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
