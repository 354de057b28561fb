"""The report of an encoder in calibration.json and on the terminal."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from .closeness import Closeness
from .result import KeptReport, LayerReport, Made, worst_first
from .words import decibels, size


@dataclass(frozen=True)
class EmbeddingReport:
    """The contents of calibration.json for an encoder."""

    model: str
    out: str
    recipe: Mapping[str, Any]
    format: str
    device: str
    source: tuple[str, ...]
    samples: int
    tokens: int
    held_out_source: tuple[str, ...]
    quality: Closeness
    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int
    seconds: Mapping[str, float]
    versions: Mapping[str, str]
    rounding: str
    kept: tuple[KeptReport, ...] = ()  # what stays in high precision
    notes: tuple[str, ...] = ()
    made: Made | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)


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
    for kept in report.kept:
        alone = "" if kept.cosine is None else f" (cosine with FP8 here alone: {kept.cosine:.5f})"
        table.add_row(" ".join(kept.names), f"stays in BF16, {size(kept.bytes)}{alone}")
    table.add_row("written to", report.out)
    return table
