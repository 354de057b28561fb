"""Writes the output of a calibration: the FP8 directory, whole or not at all, with its scales, its report and the
page."""

import json
import platform
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8serve
from fp8serve.fp8.recipe import Recipe, to_json
from fp8serve.fp8.scaling import ScalingState, fp8_max
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, fingerprint, open_checkpoint, save_scales
from fp8serve.model.export import write_calibrated
from fp8serve.model.formats.scales import FILE_NAME
from fp8serve.model.readers import reader_notes
from fp8serve.model.storage.files import whole_directory
from fp8serve.model.storage.shards import open_shards

from .data import Batches, source_names
from .generated import before_and_after
from .job import Job
from .methods import said_of_healing, said_of_smoothing
from .observe import Observer
from .options import CalibrationOptions
from .page.pages import html_report
from .result import CalibrationReport, DataReport, ExpertsReport, LayerReport, Made, Quality, TensorReport


def write(job: Job, out: Path, quality: Quality, layers: tuple[LayerReport, ...], origin: Made) -> CalibrationReport:
    """Write `out`; returns the report as it was written, or would have been. origin: how the report was made."""
    stored = stored_states(job.states, job.recipe)
    draft = replace(_draft(job, out, stored, quality, layers), made=origin)
    checkpoint = _checkpoint(job, stored)
    with job.stages.stage("write"):
        if not job.asked.scales_only:
            return _write_directory(job, out, checkpoint, draft)
        with whole_directory(out) as folder:
            save_scales(folder / FILE_NAME, checkpoint)
    return replace(draft, seconds=job.stages.seconds | {"total": job.stages.total()})


def _write_directory(job: Job, out: Path, checkpoint: ScalingCheckpoint, draft: CalibrationReport) -> CalibrationReport:
    final = [draft]

    def extra_files(folder: Path) -> dict[str, str | bytes]:
        generated, told = before_and_after(job.decoder, job.batches.held_out, job.asked, job.stages, folder)
        final[0] = report = replace(
            draft,
            bytes_after=weight_bytes(folder),
            notes=(*draft.notes, *reader_notes(open_checkpoint(folder)), *told),
            generated=generated,
            seconds=job.stages.seconds | {"total": job.stages.total()},
        )
        return {"calibration.json": report.to_json() + "\n", "report.html": html_report(report)}

    rounded = {name: layer for name, layer in (job.rounded or {}).items() if name in job.linears}
    write_calibrated(
        out,
        job.source,
        checkpoint,
        # scales of smoothed and healed weights are not the source's
        weights=_changed(job) if job.healing or job.smoothing else None,
        quantized={name: (layer.weight_q, layer.weight_scale_inv) for name, layer in rounded.items()},
        kept=[name for group in job.kept for name in group.names],
        format=draft.format,
        extra_files=extra_files,
        max_shard_bytes=job.asked.max_shard_bytes,
    )
    return final[0]


def _changed(job: Job) -> Mapping[str, Tensor]:
    """The source's parameters, with those that replace some of them."""
    found: Any = (job.smoothed, open_checkpoint(job.source))  # typed for writing, and only read
    return ChainMap(*found)


def _draft(
    job: Job,
    out: Path,
    stored: Mapping[str, ScalingState],
    quality: Quality,
    layers: tuple[LayerReport, ...],
) -> CalibrationReport:
    """The report without the figures that need the written directory."""
    size = weight_bytes(job.source)
    return CalibrationReport(
        model=str(job.source),
        out=str(out),
        recipe=json.loads(to_json(job.recipe)),
        format=job.asked.format,
        device=job.asked.device,
        data=_data_report(job.asked, job.batches),
        quality=quality,
        layers=layers,
        tensors=_tensor_reports(job.observer, stored),
        bytes_before=size,
        bytes_after=size,
        seconds={},
        versions=versions(),
        notes=job.notes + said_of_smoothing(job.smoothing) + said_of_healing(job.healing),
        rounding=job.asked.rounding,
        smoothing=job.smoothing,
        healing=job.healing,
        kept=tuple(job.kept),
        experts=tuple(ExpertsReport(name, tuple(n.tolist())) for name, n in job.observer.tokens.items()),
    )


def _data_report(asked: CalibrationOptions, batches: Batches) -> DataReport:
    return DataReport(
        source=source_names(asked.data),
        samples=batches.samples,
        seq_len=asked.seq_len,
        batches=len(batches.calibration),
        tokens=batches.tokens,
        held_out_samples=sum(len(b.lengths) for b in batches.held_out),
        held_out_tokens=sum(b.tokens for b in batches.held_out),
        held_out_source=source_names(asked.holdout),
        excluded=batches.excluded,
        seed=asked.seed,
        documents=batches.documents,
        held_out_documents=batches.held_out_documents,
    )


def stored_states(states: Mapping[str, ScalingState], recipe: Recipe) -> dict[str, ScalingState]:
    """The states whose scales the directory carries: the cache's, and those by which the recipe scales tensors."""
    kept = tuple(f".{role}" for role, spec in recipe.specs.linear.items() if spec.source == "delayed")
    return {n: s for n, s in states.items() if n.endswith((*kept, ".k", ".v"))}


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


def _tensor_reports(observer: Observer, kept: Mapping[str, ScalingState]) -> tuple[TensorReport, ...]:
    return tuple(
        TensorReport(
            name=name,
            amax=seen.amax,
            scale=float(kept[name].scale) if name in kept else None,
            limit=_limit(name, kept[name], observer.recipe) if name in kept else None,
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
