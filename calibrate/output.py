"""Writes the output directory of a calibration atomically: the FP8 model, its scales, its report and the HTML page."""

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
from fp8serve.calibration.embedding import MIN_MEDIAN_COSINE, CosineSummary, EmbeddingReport
from fp8serve.calibration.generated import generate_samples
from fp8serve.calibration.job import Job
from fp8serve.calibration.observe import Observer
from fp8serve.calibration.options import CalibrationOptions
from fp8serve.calibration.reports.page import html_encoder_report, html_report
from fp8serve.calibration.reports.tables import pluralize
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
from fp8serve.model.compatibility import compatibility_notes
from fp8serve.model.export import write_calibrated
from fp8serve.model.formats.scales import FILE_NAME
from fp8serve.model.storage.files import atomic_directory
from fp8serve.model.storage.shards import open_shards

Report = CalibrationReport | EmbeddingReport


def write_output(
    job: Job, out: Path, quality: Quality | CosineSummary, layers: tuple[LayerReport, ...], origin: Origin
) -> Report:
    """Writes `out` and returns the report. With `scales_only` the report is not written."""
    checkpoint = _checkpoint(job)
    with job.stages.stage("write"):
        if not job.options.scales_only:
            return _write_directory(job, out, checkpoint, quality, layers, origin)
        with atomic_directory(out) as folder:
            save_scales(folder / FILE_NAME, checkpoint)
    return _text_report(job, out, checkpoint, cast(Quality, quality), layers, origin)


def _write_directory(
    job: Job,
    out: Path,
    checkpoint: ScalingCheckpoint,
    quality: Quality | CosineSummary,
    layers: tuple[LayerReport, ...],
    origin: Origin,
) -> Report:
    reports: list[Report] = []

    def extra_files(folder: Path) -> dict[str, str | bytes]:
        report: Report
        if isinstance(quality, CosineSummary):
            report = embedding = _embedding_report(job, out, quality, layers, origin, folder)
            page = html_encoder_report(embedding)
        else:
            report = text = _text_report(job, out, checkpoint, quality, layers, origin, folder)
            page = html_report(text)
        reports.append(report)
        return {"calibration.json": report.to_json() + "\n", "report.html": page}

    rounded = {name: layer for name, layer in (job.rounded or {}).items() if name in job.linears}
    write_calibrated(
        out,
        job.source,
        checkpoint,
        # Smoothing and healing change weights, and with them the scales.
        weights=_changed_weights(job) if job.healing or job.smoothing else None,
        quantized={name: layer.quantized_weight for name, layer in rounded.items()},
        high_precision=[name for group in job.in_bf16 for name in group.names],
        format=job.options.format,
        extra_files=extra_files,
        max_shard_bytes=job.options.max_shard_bytes,
    )
    return reports[0]


def _changed_weights(job: Job) -> Mapping[str, Tensor]:
    """Returns the parameters of the source, with those that smoothing changed in place of the original ones."""
    mappings: Any = (job.smoothed, open_checkpoint(job.source))  # ChainMap's type asks for writable mappings
    return ChainMap(*mappings)


def _text_report(
    job: Job,
    out: Path,
    checkpoint: ScalingCheckpoint,
    quality: Quality,
    layers: tuple[LayerReport, ...],
    origin: Origin,
    folder: Path | None = None,
) -> CalibrationReport:
    """`folder` holds the model until it is moved to `out`; it is None if no weights are written."""
    notes = job.notes + _smoothing_note(job.smoothing) + _healing_note(job.healing)
    generated: tuple[GeneratedReport, ...] = ()
    if folder is not None:
        generated, generation_notes = generate_samples(
            job.decoder, job.batches.held_out, job.options, job.stages, folder
        )
        notes += (*compatibility_notes(open_checkpoint(folder)), *generation_notes)
    return CalibrationReport(
        **_common_fields(job, out, origin, weight_bytes(folder or job.source)),
        data=_data_report(job.options, job.batches),
        quality=quality,
        layers=layers,
        tensors=_tensor_reports(job.observer, checkpoint),
        notes=notes,
        smoothing=job.smoothing,
        healing=job.healing,
        generated=generated,
        experts=tuple(ExpertsReport(name, tuple(n.tolist())) for name, n in job.observer.tokens.items()),
    )


def _common_fields(job: Job, out: Path, origin: Origin, size: int) -> dict[str, Any]:
    """Returns the fields of every report, except its notes. `size` is the number of bytes of the written weights."""
    return {
        "model": str(job.source),
        "out": str(out),
        "recipe": json.loads(to_json(job.recipe)),
        "format": job.options.format,
        "device": job.options.device,
        "bytes_before": weight_bytes(job.source),
        "bytes_after": size,
        "seconds": job.stages.seconds | {"total": job.stages.total()},
        "versions": versions(),
        "rounding": job.options.rounding,
        "in_bf16": tuple(job.in_bf16),
        "origin": origin,
    }


def _smoothing_note(report: SmoothingReport | None) -> tuple[str, ...]:
    if report is None:
        return ()
    helped = f"{len(report.pairs)} of {pluralize(report.tried, 'input')}"
    return (f"Smoothing was applied to the channels of {helped}; for the others it did not reduce the error.",)


def _healing_note(report: HealingReport | None) -> tuple[str, ...]:
    if report is None:
        return ()
    change = f"from {report.kl_before:.4f} to {report.kl_after:.4f} nats"
    discarded = (
        "" if report.is_improvement else "; this is no improvement, so the weights from before healing were written"
    )
    return (f"{report.steps} steps of healing changed the KL divergence on the held-out samples {change}{discarded}.",)


def _embedding_report(
    job: Job, out: Path, quality: CosineSummary, layers: tuple[LayerReport, ...], origin: Origin, folder: Path
) -> EmbeddingReport:
    return EmbeddingReport(
        **_common_fields(job, out, origin, weight_bytes(folder)),
        source=source_names(job.options.data),
        samples=job.batches.samples,
        tokens=job.batches.tokens,
        held_out_source=source_names(job.options.holdout),
        quality=quality,
        layers=layers,
        notes=(quality.summary(), *_advice(job, quality), *quantized_notes(job.source)),
    )


def _advice(job: Job, quality: CosineSummary) -> tuple[str, ...]:
    """Names options that reduce the error, if the median cosine is below MIN_MEDIAN_COSINE."""
    if quality.median >= MIN_MEDIAN_COSINE:
        return ()
    options = [] if job.options.rounding == "gptq" else ["--rounding gptq"]
    options += ["--recipe w8a16"] if job.recipe.specs.linear["input"].is_quantized else []
    options.append(f"--target-cosine {MIN_MEDIAN_COSINE}")
    return (f"These options reduce the error: {', '.join(options)} (docs/embeddings.md).",)


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


def stored_states(
    states: Mapping[str, ScalingState], recipe: Recipe, *, scales_only: bool = False
) -> dict[str, ScalingState]:
    """Returns the states whose scales are written: those of the KV cache, and of tensors with delayed scaling.

    A model also gets those of NVFP4 inputs, for other projects, which read NVFP4 with such a scale.
    Their scales and histories are copied to the CPU, in one transfer from the device.
    """
    linear = recipe.specs.linear
    roles = tuple(f".{role}" for role, spec in linear.items() if spec.source == "delayed")
    roles += (".input",) if linear["input"].is_4bit and not scales_only else ()
    result = {n: s for n, s in states.items() if n.endswith((*roles, ".k", ".v"))}
    if not result:
        return {}
    columns = [column for state in result.values() for column in (state.scale.view(1), state.amax_history)]
    values = iter(torch.split(torch.cat(columns).cpu(), [len(column) for column in columns]))
    return {n: ScalingState(next(values)[0], next(values), s.nonfinite, s.steps) for n, s in result.items()}


def _checkpoint(job: Job) -> ScalingCheckpoint:
    states = stored_states(job.states, job.recipe, scales_only=job.options.scales_only)
    batches = job.batches.calibration
    return ScalingCheckpoint(
        job.recipe,
        {name: _tensor_scale(name, state) for name, state in states.items()},
        model=fingerprint(job.source),
        observations={
            "batches": len(batches),
            "tokens": job.batches.tokens,
            "tensors": {name: job.observer.records[name].batches for name in states},
        },
        created_by=f"fp8serve {fp8serve.__version__} calibrate",
    )


def _tensor_scale(name: str, state: ScalingState) -> TensorScale:
    """Returns the scale, with its amax history unless it belongs to the KV cache or recorded no amax."""
    has_history = not name.endswith((".k", ".v")) and bool(state.amax_history.any())
    return TensorScale(state.scale, state.amax_history if has_history else None)


def _tensor_reports(observer: Observer, checkpoint: ScalingCheckpoint) -> tuple[TensorReport, ...]:
    reports = []
    for name, record in observer.records.items():
        scale = float(checkpoint.tensors[name].scale) if name in checkpoint.tensors else None
        limit = None if scale is None else fp8_max(observer.recipe, name.rpartition(".")[2]) / scale
        history = tuple(float(f"{value:.6g}") for value in record.recent_amaxes)
        reports.append(TensorReport(name, record.amax, scale, record.batches, history, limit))
    return tuple(reports)


def weight_bytes(folder: Path) -> int:
    """Returns the total size of the safetensors files that hold the model's weights."""
    return sum(file.stat().st_size for file in {entry.file for entry in open_shards(folder).entries.values()})


def versions() -> dict[str, str]:
    """Returns the versions of the software and the machine type, on which the numbers depend."""
    return {
        "fp8serve": fp8serve.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def make_origin(command: str) -> Origin:
    """Returns `command` with the current time and this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.machine())  # only Linux gives the processor's name
    machine = f"{platform.system()} on {processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return Origin(command, datetime.now(UTC).isoformat(timespec="seconds"), machine)


def call_text(function: str, model: Path, **arguments: Any) -> str:
    """Returns the source text of a call of `function`, with the arguments that are not None."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
    keywords = ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)
    return f"fp8serve.{function}({', '.join(filter(None, (repr(str(model)), keywords)))})"
