"""Writes the output of a calibration: the FP8 directory, whole or not at all, with its scales, its report and the
page."""

import json
import os
import platform
from collections import ChainMap
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import fp8serve
from fp8serve.calibration.checks import quantized_notes
from fp8serve.calibration.data import Batches, source_names
from fp8serve.calibration.embedding import GOAL, Closeness, EmbeddingReport
from fp8serve.calibration.generated import before_and_after
from fp8serve.calibration.job import Job
from fp8serve.calibration.observe import Observer
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.reports.page import html_encoder_report, html_report
from fp8serve.calibration.reports.tables import count
from fp8serve.calibration.result import (
    CalibrationReport,
    DataReport,
    ExpertsReport,
    GeneratedReport,
    HealingReport,
    LayerReport,
    Origin,
    Quality,
    SmoothingReport,
    TensorReport,
)
from fp8serve.fp8.recipe import Recipe, to_json
from fp8serve.fp8.scaling import ScalingState, fp8_max
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, fingerprint, open_checkpoint, save_scales
from fp8serve.model.export import write_calibrated
from fp8serve.model.formats.scales import FILE_NAME
from fp8serve.model.readers import reader_notes
from fp8serve.model.storage.files import whole_directory
from fp8serve.model.storage.shards import open_shards

Report = CalibrationReport | EmbeddingReport


def write(job: Job, out: Path, quality: Quality | Closeness, layers: tuple[LayerReport, ...], origin: Origin) -> Report:
    """Write `out`; returns the report as it was written, or would have been. origin: how the report was made."""
    stored = stored_states(job.states, job.recipe)
    checkpoint = _checkpoint(job, stored)
    with job.stages.stage("write"):
        if not job.options.scales_only:
            return _write_directory(job, out, checkpoint, quality, layers, origin)
        with whole_directory(out) as folder:
            save_scales(folder / FILE_NAME, checkpoint)
    return _text_report(job, out, cast(Quality, quality), layers, origin)


def _write_directory(
    job: Job,
    out: Path,
    checkpoint: ScalingCheckpoint,
    quality: Quality | Closeness,
    layers: tuple[LayerReport, ...],
    origin: Origin,
) -> Report:
    reports: list[Report] = []

    def extra_files(folder: Path) -> dict[str, str | bytes]:
        report: Report
        if isinstance(quality, Closeness):
            report = embedding = _embedding_report(job, out, quality, layers, origin, weight_bytes(folder))
            page = html_encoder_report(embedding)
        else:
            report = text = _text_report(job, out, quality, layers, origin, folder)
            page = html_report(text)
        reports.append(report)
        return {"calibration.json": report.to_json() + "\n", "report.html": page}

    rounded = {name: layer for name, layer in (job.rounded or {}).items() if name in job.linears}
    write_calibrated(
        out,
        job.source,
        checkpoint,
        # scales of smoothed and healed weights are not the source's
        weights=_changed(job) if job.healing or job.smoothing else None,
        quantized={name: (layer.weight_q, layer.weight_scale_inv) for name, layer in rounded.items()},
        high_precision=[name for group in job.in_bf16 for name in group.names],
        format=job.options.format,
        extra_files=extra_files,
        max_shard_bytes=job.options.max_shard_bytes,
    )
    return reports[0]


def _changed(job: Job) -> Mapping[str, Tensor]:
    """The source's parameters, with those that replace some of them."""
    layers: Any = (job.smoothed, open_checkpoint(job.source))  # typed for writing, and only read
    return ChainMap(*layers)


def _seconds(job: Job) -> dict[str, float]:
    return job.stages.seconds | {"total": job.stages.total()}


def _text_report(
    job: Job, out: Path, quality: Quality, layers: tuple[LayerReport, ...], origin: Origin, folder: Path | None = None
) -> CalibrationReport:
    """folder: where the model is now that is written to `out`; None: no weights are written."""
    stored = stored_states(job.states, job.recipe)
    notes = job.notes + _smoothing_note(job.smoothing) + _healing_note(job.healing)
    generated: tuple[GeneratedReport, ...] = ()
    if folder is not None:
        generated, note = before_and_after(job.decoder, job.batches.held_out, job.options, job.stages, folder)
        notes += (*reader_notes(open_checkpoint(folder)), *note)
    return CalibrationReport(
        model=str(job.source),
        out=str(out),
        recipe=json.loads(to_json(job.recipe)),
        format=job.options.format,
        device=job.options.device,
        data=_data_report(job.options, job.batches),
        quality=quality,
        layers=layers,
        tensors=_tensor_reports(job.observer, stored),
        bytes_before=weight_bytes(job.source),
        bytes_after=weight_bytes(folder or job.source),
        seconds=_seconds(job),
        versions=versions(),
        notes=notes,
        rounding=job.options.rounding,
        smoothing=job.smoothing,
        healing=job.healing,
        kept=tuple(job.in_bf16),
        generated=generated,
        experts=tuple(ExpertsReport(name, tuple(n.tolist())) for name, n in job.observer.tokens.items()),
        made=origin,
    )


def _smoothing_note(report: SmoothingReport | None) -> tuple[str, ...]:
    if report is None:
        return ()
    helped = f"{len(report.pairs)} of {count(report.tried, 'input')}"
    return (f"Smoothing evened out the channels of {helped}; the others are better as they are.",)


def _healing_note(report: HealingReport | None) -> tuple[str, ...]:
    if report is None:
        return ()
    change = f"KL on the held-out samples from {report.kl_before:.4f} to {report.kl_after:.4f} nats"
    dropped = "" if report.helped else ", which is no better: the weights were written as they were before"
    return (f"Healing took {report.steps} steps and moved the {change}{dropped}.",)


def _embedding_report(
    job: Job, out: Path, quality: Closeness, layers: tuple[LayerReport, ...], origin: Origin, size: int
) -> EmbeddingReport:
    """size: bytes of the weights that were written."""
    return EmbeddingReport(
        model=str(job.source),
        out=str(out),
        recipe=json.loads(to_json(job.recipe)),
        format=job.options.format,
        device=job.options.device,
        source=source_names(job.options.data),
        samples=job.batches.samples,
        tokens=job.batches.tokens,
        held_out_source=source_names(job.options.holdout),
        quality=quality,
        layers=layers,
        bytes_before=weight_bytes(job.source),
        bytes_after=size,
        seconds=_seconds(job),
        versions=versions(),
        rounding=job.options.rounding,
        kept=tuple(job.in_bf16),
        notes=(quality.text(), *_advice(job, quality), *quantized_notes(job.source)),
        made=origin,
    )


def _advice(job: Job, quality: Closeness) -> tuple[str, ...]:
    """Options that lose less, if vectors moved further than necessary."""
    if quality.median >= GOAL:
        return ()
    ways = [] if job.options.rounding == "gptq" else ["--rounding gptq"]
    ways += ["--recipe w8a16"] if job.recipe.specs.linear["input"].is_fp8 else []
    return (f"Less is lost by {', '.join((*ways, f'--target-cosine {GOAL}'))} (docs/embeddings.md).",)


def _data_report(options: CalibrationOptions, batches: Batches) -> DataReport:
    return DataReport(
        source=source_names(options.data),
        samples=batches.samples,
        seq_len=options.seq_len,
        batches=len(batches.calibration),
        tokens=batches.tokens,
        held_out_samples=sum(len(b.lengths) for b in batches.held_out),
        held_out_tokens=sum(b.tokens for b in batches.held_out),
        held_out_source=source_names(options.holdout),
        excluded=batches.excluded,
        seed=options.seed,
        documents=batches.documents,
        held_out_documents=batches.held_out_documents,
    )


def stored_states(states: Mapping[str, ScalingState], recipe: Recipe) -> dict[str, ScalingState]:
    """The states whose scales the directory carries: the cache's, and those by which the recipe scales tensors."""
    roles = tuple(f".{role}" for role, spec in recipe.specs.linear.items() if spec.source == "delayed")
    return {n: s for n, s in states.items() if n.endswith((*roles, ".k", ".v"))}


def _checkpoint(job: Job, stored: Mapping[str, ScalingState]) -> ScalingCheckpoint:
    batches = job.batches.calibration
    return ScalingCheckpoint(
        job.recipe,
        {name: _tensor_scale(name, state) for name, state in stored.items()},
        model=fingerprint(job.source),
        observations={
            "batches": len(batches),
            "tokens": job.batches.tokens,
            "tensors": {name: job.observer.seen[name].batches for name in stored},
        },
        created_by=f"fp8serve {fp8serve.__version__} calibrate",
    )


def _tensor_scale(name: str, state: ScalingState) -> TensorScale:
    """The state as it is stored: the cache's scales have no history, nor has a state whose history is only the staging
    slot."""
    keep = not name.endswith((".k", ".v")) and bool(state.amax_history.any())
    return TensorScale(state.scale.cpu(), state.amax_history.cpu() if keep else None)


def _tensor_reports(observer: Observer, stored: Mapping[str, ScalingState]) -> tuple[TensorReport, ...]:
    return tuple(
        TensorReport(
            name=name,
            amax=seen.amax,
            scale=float(stored[name].scale) if name in stored else None,
            limit=_limit(name, stored[name], observer.recipe) if name in stored else None,
            observations=seen.batches,
            history=tuple(float(f"{value:.6g}") for value in seen.newest),
        )
        for name, seen in observer.seen.items()
    )


def _limit(name: str, state: ScalingState, recipe: Recipe) -> float:
    """The largest magnitude of a tensor that its scale represents."""
    return fp8_max(recipe, name.rpartition(".")[2]) / float(state.scale)


def weight_bytes(folder: Path) -> int:
    """Size of the safetensors files that hold the model's weights."""
    return sum(file.stat().st_size for file in {entry.file for entry in open_shards(folder).entries.values()})


def versions() -> dict[str, str]:
    """The versions of everything that affects the numbers."""
    return {
        "fp8serve": fp8serve.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def origin_of(command: str) -> Origin:
    """Now and here."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.machine())  # Linux has the name, other systems only the kind
    machine = f"{platform.system()} on {processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return Origin(command, datetime.now(UTC).isoformat(timespec="seconds"), machine)


def call(function: str, model: Path, **arguments: Any) -> str:
    """A call of one of this package's functions, with the arguments that differ from their defaults."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
    listed = ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)
    return f"fp8serve.{function}({', '.join(filter(None, (repr(str(model)), listed)))})"
