"""calibrate: sample data -> amax histories -> scales -> an FP8 directory with the evidence that it is good.

    load       weights memory-mapped in their own file, computed in BF16; linears converted in place, nothing copied
    observe    every calibration batch once, in high precision, amaxes recorded (and gradients, and keys and values)
    round      with rounding="gptq": layer by layer, weights rounded so that errors make up for each other (rounding.py)
    compare    every held-out batch twice, in high precision and as it will be served, layer by layer and token by token
    rank       forwards and backwards over some held-out tokens: what each layer adds to the KL divergence
    write      the whole directory or nothing

Layers are computed one after the other, each over all batches (layerwise.py), so that a BF16 checkpoint larger than
memory is read once in each stage. Peak memory: one layer's weights as mapped pages, which the system may drop (a
checkpoint of another type is converted: 2 bytes per parameter); its FP8 weights; the hidden states of all batches and
one layer's activations of one batch; 256 rows of logits in FP32. The ranking reads the weights twice for each of its
sequences, and with `gradients` observing does so for each batch: they keep that one's activations of all layers.
On a GPU the weights must fit there.

Recipes that scale by content (current, rowwise, block) need no input scales: for them amaxes are observed for the
report, and the directory gets FP8 weights and, if asked for, scales of the KV cache.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import fp8serve
from fp8serve.errors import RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear, convert
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed, name_of, to_json
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.checkpoint import (
    ScalingCheckpoint,
    TensorScale,
    fingerprint,
    linear_names,
    load_servable,
    open_checkpoint,
    save_scales,
)
from fp8serve.model.decoder import Decoder
from fp8serve.model.export import write_calibrated
from fp8serve.model.files import check_absent, whole_directory
from fp8serve.model.quantization_config import quantization_files
from fp8serve.model.readers import reader_notes
from fp8serve.model.scales import FILE_NAME
from fp8serve.model.shards import open_shards
from fp8serve.model.tokenizer import Tokenizer

from .compare import compare, freezer
from .data import Batches, calibration_batches, data_files, source_names
from .device import check_device
from .lengths import fitting
from .observe import Observer, observe, observer_of, settle
from .options import CalibrationOptions
from .progress import Progress, Stages
from .ranks import ALONE, Ranks
from .recorded import recorded, restore
from .report import html_report
from .result import CalibrationReport, DataReport, LayerReport, Quality, TensorReport
from .rounding import round_weights
from .sensitivity import kl_shares
from .unfinished import Unfinished, description

DELAYED = DelayedScaling()


def calibrate(
    model_dir: Path | str,
    *,
    out: Path | str,
    recipe: Recipe = DELAYED,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    **options: Any,
) -> CalibrationReport:
    """Calibrate the Hugging Face directory `model_dir` and write the FP8 directory `out` (docs/formats.md).

    options: the fields of CalibrationOptions. Sequences are as long as the model's context at most; quality is measured
    on an eighth as many. What is held out is never observed, also where `data` repeats it. kv_cache: a scale for the
    keys and one for the values of every layer. gradients: E5M2 scales, by a forward and a backward pass per batch.
    rounding: "gptq" rounds weights so that the errors of a layer's outputs on these samples become small.
    ranks: the processes that calibrate together, each calling this function alike (ranks.py); rank 0 writes.
    progress(stage, done, total) is called after every step of a stage: a layer, or a batch.

    ModelError, DataError, RecipeError, MachineError: an input cannot be used. ScalesError names a tensor that is not
    finite, was never observed or is always zero. In every such case `out` is not written. What was finished before a
    kill or a full disk is kept beside `out` (unfinished.py), and `resume` goes on from there.
    """
    out, source, asked = Path(out), Path(model_dir), CalibrationOptions.of(options)
    _check_settings(out, recipe, asked)
    stages = Stages(progress)
    with stages.stage("load"):
        decoder, linears = load(source, asked.device)
        seq_len, notes = fitting(asked.seq_len, decoder.config)
        asked = replace(asked, seq_len=seq_len)
        batches = _batches(asked, Tokenizer.from_dir(source), decoder.config.vocab_size)
    unfinished = Unfinished(out, description(source, recipe, asked, batches, versions()), asked.resume, ranks)
    observer = _observe(decoder, linears, batches, recipe, asked, stages, unfinished, ranks)
    states = settle(observer)
    rounded, once = None, unfinished.once
    if asked.rounding == "gptq":
        rounded = round_weights(decoder, linears, batches.calibration, recipe, states, stages, once, ranks)
    if not ranks.first:
        return cast(CalibrationReport, ranks.hear())
    quality, layers = _measure(decoder, linears, batches, recipe, states, rounded, stages)
    kept = stored_states(states, recipe)
    size = weight_bytes(source)
    draft = CalibrationReport(
        model=str(source), out=str(out), recipe=json.loads(to_json(recipe)), format=asked.format, device=asked.device,
        data=_data_report(asked, batches), quality=quality, layers=layers, tensors=_tensor_reports(observer, kept),
        bytes_before=size, bytes_after=size, seconds={}, versions=versions(), notes=notes, rounding=asked.rounding,
    )  # fmt: skip
    checkpoint = _checkpoint(source, recipe, observer, kept, batches)
    report = _write(source, out, checkpoint, draft, asked, stages, rounded)
    unfinished.remove()
    return ranks.tell(report)


def _observe(
    decoder: Decoder,
    linears: Mapping[str, Linear],
    batches: Batches,
    recipe: Recipe,
    asked: CalibrationOptions,
    stages: Stages,
    unfinished: Unfinished,
    ranks: Ranks,
) -> Observer:
    def now() -> dict[str, Tensor]:
        return recorded(observe(decoder, linears, batches.calibration, recipe, **watched, stages=stages, ranks=ranks))

    watched = {"kv_cache": asked.kv_cache, "gradients": asked.gradients}
    observer = observer_of(decoder, linears, recipe, **watched)
    restore(observer, unfinished.once("observed", now))
    return observer


def _measure(
    decoder: Decoder,
    linears: Mapping[str, Linear],
    batches: Batches,
    recipe: Recipe,
    states: Mapping[str, ScalingState],
    rounded: Mapping[str, FrozenLinear] | None,
    stages: Stages,
) -> tuple[Quality, tuple[LayerReport, ...]]:
    """What FP8 costs on the batches that were held out: in all, and layer by layer."""
    quality, layers = compare(decoder, linears, batches.held_out, recipe, states, stages, rounded)
    freeze = freezer(recipe, states, rounded)
    shares = kl_shares(
        decoder, linears, batches.held_out, lambda name, linear, x: freeze(name, linears[name])(x), stages=stages
    )
    return quality, tuple(tally.report(name, shares.get(name)) for name, tally in layers.items())


def _batches(asked: CalibrationOptions, tokenizer: Tokenizer, vocab_size: int) -> Batches:
    return calibration_batches(
        data_files(asked.data), tokenizer, vocab_size, samples=asked.samples, seq_len=asked.seq_len,
        batch_size=asked.batch_size, seed=asked.seed, device=asked.device, holdout=data_files(asked.holdout),
    )  # fmt: skip


def _check_settings(out: Path, recipe: Recipe | None, asked: CalibrationOptions) -> None:
    """Everything that can be refused before a weight is read."""
    check_absent(out)
    _ = asked.max_shard_bytes  # DataError when it is no size
    if asked.scales_only and asked.rounding != "nearest":
        raise RecipeError("scales_only writes no weights, so their rounding must be 'nearest'.")
    if recipe is None:
        raise RecipeError(
            "The recipe 'bf16' has no scales, so there is nothing to calibrate; serve the model as it is."
        )
    to_json(recipe)  # RecipeError when it holds a function, which no file can carry
    quantization_files(asked.format, recipe, asked.kv_cache)  # ModelError when the format cannot say it
    if recipe.override_linear_precision[0]:
        raise RecipeError("The recipe keeps the forward pass in high precision, so there is nothing to calibrate.")
    if asked.gradients and delayed(recipe) is None:
        raise RecipeError(
            f"The recipe {name_of(recipe)!r} scales gradients by content; leave out gradient calibration."
        )
    if asked.scales_only and not (asked.kv_cache or delayed(recipe) is not None):
        raise RecipeError(
            f"The recipe {name_of(recipe)!r} stores no scales, so there is nothing to write on their own."
        )
    check_device(asked.device)


def load(source: Path, device: str) -> tuple[Decoder, dict[str, Linear]]:
    """The decoder in BF16 with mapped, frozen weights, and its converted linears by name."""
    decoder = load_servable(source, "bf16", device=device)
    decoder.requires_grad_(False)
    convert(decoder)
    modules = dict(decoder.named_modules())
    return decoder, {name: cast(Linear, modules[name]) for name in linear_names(decoder)}


def _data_report(asked: CalibrationOptions, batches: Batches) -> DataReport:
    return DataReport(
        source=source_names(data_files(asked.data)),
        samples=sum(len(b.lengths) for b in batches.calibration),
        seq_len=asked.seq_len,
        batches=len(batches.calibration),
        tokens=sum(b.tokens for b in batches.calibration),
        held_out_samples=sum(len(b.lengths) for b in batches.held_out),
        held_out_tokens=sum(b.tokens for b in batches.held_out),
        held_out_source=source_names(data_files(asked.holdout)),
        excluded=batches.excluded,
        seed=asked.seed,
    )


def stored_states(states: Mapping[str, ScalingState], recipe: Recipe) -> dict[str, ScalingState]:
    """The states whose scales the directory carries: all for delayed scaling, only the cache's for other recipes."""
    return {n: s for n, s in states.items() if delayed(recipe) is not None or n.endswith((".k", ".v"))}


def _checkpoint(
    source: Path, recipe: Recipe, observer: Observer, kept: Mapping[str, ScalingState], batches: Batches
) -> ScalingCheckpoint:
    return ScalingCheckpoint(
        recipe,
        {name: _tensor_scale(name, state) for name, state in kept.items()},
        model=fingerprint(source),
        observations={
            "batches": len(batches.calibration),
            "tokens": sum(b.tokens for b in batches.calibration),
            "tensors": {name: observer.seen[name].batches for name in kept},
        },
        created_by=f"fp8serve {fp8serve.__version__} calibrate",
    )


def _tensor_scale(name: str, state: ScalingState) -> TensorScale:
    """As it is stored: the cache's scales have no history, nor has anything with a history of the staging slot only."""
    keep = not name.endswith((".k", ".v")) and bool(state.amax_history.any())
    return TensorScale(state.scale.cpu(), state.amax_history.cpu() if keep else None)


def _tensor_reports(observer: Observer, kept: Mapping[str, ScalingState]) -> tuple[TensorReport, ...]:
    return tuple(
        TensorReport(
            name=name,
            amax=seen.amax,
            scale=float(kept[name].scale) if name in kept else None,
            observations=seen.batches,
            history=tuple(float(f"{value:.6g}") for value in seen.newest),
        )
        for name, seen in observer.seen.items()
    )


def weight_bytes(folder: Path) -> int:
    """Size of the safetensors files that hold the model's weights."""
    return sum(file.stat().st_size for file in {entry.file for entry in open_shards(folder).entries.values()})


def _write(
    source: Path,
    out: Path,
    checkpoint: ScalingCheckpoint,
    draft: CalibrationReport,
    asked: CalibrationOptions,
    stages: Stages,
    rounded: Mapping[str, FrozenLinear] | None,
) -> CalibrationReport:
    """Write `out` whole or not at all; the report as it was written, or would have been."""
    final = [draft]

    def extra_files(folder: Path) -> dict[str, str | bytes]:
        seconds = stages.seconds | {"total": stages.total()}
        notes = (*draft.notes, *reader_notes(open_checkpoint(folder)))
        final[0] = report = replace(draft, bytes_after=weight_bytes(folder), seconds=seconds, notes=notes)
        return {"calibration.json": report.to_json() + "\n", "report.html": html_report(report)}

    with stages.stage("write"):
        if not asked.scales_only:
            quantized = {n: (m.weight_q, m.weight_scale_inv) for n, m in (rounded or {}).items()}
            write_calibrated(
                out, source, checkpoint, quantized=quantized, format=draft.format, extra_files=extra_files,
                max_shard_bytes=asked.max_shard_bytes,
            )  # fmt: skip
            return final[0]
        with whole_directory(out) as folder:
            save_scales(folder / FILE_NAME, checkpoint)
    return replace(draft, seconds=stages.seconds | {"total": stages.total()})


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    return {
        "fp8serve": fp8serve.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
