"""The report of an encoder in calibration.json and on the terminal."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from fp8serve.fp8.recipe import to_json

from .closeness import GOAL, Closeness
from .data import source_names
from .encoder_job import EncoderJob
from .refused import quantized_notes
from .result import KeptReport, LayerReport, Made, worst_first
from .words import decibels, size
from .written import versions, weight_bytes


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


def report_of(
    job: EncoderJob, out: Path, folder: Path, quality: Closeness, layers: tuple[LayerReport, ...]
) -> EmbeddingReport:
    """The report of the model that is written to `out` and is now in `folder`."""
    return EmbeddingReport(
        model=str(job.source),
        out=str(out),
        recipe=json.loads(to_json(job.recipe)),
        format=job.asked.format,
        device=job.asked.device,
        source=source_names(job.asked.data),
        samples=job.batches.samples,
        tokens=job.batches.tokens,
        held_out_source=source_names(job.asked.holdout),
        quality=quality,
        layers=layers,
        bytes_before=weight_bytes(job.source),
        bytes_after=weight_bytes(folder),
        seconds=job.stages.seconds | {"total": job.stages.total()},
        versions=versions(),
        rounding=job.asked.rounding,
        kept=tuple(job.kept),
        notes=(quality.text(), *_advice(job, quality), *quantized_notes(job.source)),
        made=job.made,
    )


def _advice(job: EncoderJob, quality: Closeness) -> tuple[str, ...]:
    """Options that lose less, if vectors moved further than necessary."""
    if quality.median >= GOAL:
        return ()
    ways = [] if job.asked.rounding == "gptq" else ["--rounding gptq"]
    ways += ["--recipe w8a16"] if job.recipe.specs.linear["input"].is_fp8 else []
    return (f"Less is lost by {', '.join((*ways, f'--target-cosine {GOAL}'))} (docs/embeddings.md).",)


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
