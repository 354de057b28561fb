"""calibrate: sample data -> amax histories -> scales -> an FP8 directory with the evidence that it is good.

    load       weights memory-mapped in their own file, computed in BF16; linears converted in place, nothing copied
    observe    every calibration batch once, in high precision, amaxes recorded (and gradients, and keys and values)
    round      with rounding="gptq": layer by layer, weights rounded so that errors make up for each other (rounding.py)
    heal       with heal=STEPS: trained in FP8 to say what the model said in high precision (healing.py)
    compare    every held-out batch twice, in high precision and as it will be served, layer by layer and token by token
    rank       forwards and backwards over some held-out tokens: what each layer adds to the KL divergence
    write      the whole directory or nothing
    generate   a few held-out prompts continued by the model and by what was written (generated.py)

Layers are computed one after the other, each over all batches (layerwise.py), so that a BF16 checkpoint larger than
memory is read once in each stage. Peak memory: one layer's weights as mapped pages, which the system may drop (a
checkpoint of another type is converted: 2 bytes per parameter); its FP8 weights; the hidden states of all batches and
one layer's activations of one batch; 256 rows of logits in FP32. The ranking reads the weights twice for each of its
sequences, and with `gradients` observing does so for each batch: they keep that one's activations of all layers.
On a GPU the weights must fit there.

Recipes that scale by content (current, rowwise, block) need no input scales: for them amaxes are observed for the
report, and the directory gets FP8 weights and, if asked for, scales of the KV cache.
"""

import copy
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import fp8serve
from fp8serve.errors import RecipeError
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import Linear, convert
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed, name_of, to_json, trains
from fp8serve.fp8.scaling import ScalingState, fp8_max
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
from .data import Batch, Batches, calibration_batches, data_files, source_names
from .device import check_device
from .generated import Generated, before_and_after
from .healing import Schedule, heal
from .input_scales import PERCENTILE, percentile_amaxes, searched_amaxes
from .lengths import fitting
from .made import call, made
from .observe import Observer, observe, observer_of, settle
from .options import CalibrationOptions
from .page.pages import html_report
from .progress import Progress, Stages
from .recorded import recorded, restore
from .result import CalibrationReport, DataReport, HealingReport, LayerReport, Quality, TensorReport
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
    command: str | None = None,
    **options: Any,
) -> CalibrationReport:
    """Calibrate the Hugging Face directory `model_dir` and write the FP8 directory `out` (docs/formats.md).

    options: the fields of CalibrationOptions. Sequences are as long as the model's context at most; quality is measured
    on an eighth as many. What is held out is never observed, also where `data` repeats it. kv_cache: a scale for the
    keys and one for the values of every layer. gradients: E5M2 scales, by a forward and a backward pass per batch.
    rounding: "gptq" rounds weights so that the errors of a layer's outputs on these samples become small. heal: how
    many steps the model is trained under the recipe towards what it said in high precision (healing.py).
    progress(stage, done, total) is called after every step of a stage: a layer, or a batch. command: how a reader of
    the report repeats it; None: this call.

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
    with Unfinished(out, description(source, recipe, asked, batches, versions()), asked.resume) as unfinished:
        observer = _observe(decoder, linears, batches, recipe, asked, stages, unfinished)
        states = settle(observer, _chosen_amaxes(decoder, linears, batches.calibration, observer, asked, stages))
        gptq = asked.rounding == "gptq"
        once = unfinished.once
        rounded = round_weights(decoder, linears, batches.calibration, recipe, states, stages, once) if gptq else None
        healing = None
        if asked.heal:
            states, rounded, healing = _heal(
                source, decoder, linears, batches, recipe, observer, rounded, asked, stages
            )
        quality, layers = _measure(decoder, linears, batches, recipe, states, rounded, stages)
        kept = stored_states(states, recipe)
        size = weight_bytes(source)
        draft = CalibrationReport(
            model=str(source), out=str(out), recipe=json.loads(to_json(recipe)), format=asked.format,
            device=asked.device, data=_data_report(asked, batches), quality=quality, layers=layers,
            tensors=_tensor_reports(observer, kept),
            bytes_before=size, bytes_after=size, seconds={}, versions=versions(), notes=notes + _on_healing(healing),
            rounding=asked.rounding, healing=healing,
            made=made(command or call("calibrate", source, out=out, recipe=recipe, **options)),
        )  # fmt: skip
        checkpoint = _checkpoint(source, recipe, observer, kept, batches)
        generate = partial(before_and_after, decoder, batches.held_out, asked, stages)
        return _write(source, out, checkpoint, draft, asked, stages, rounded, generate)


def _observe(
    decoder: Decoder,
    linears: Mapping[str, Linear],
    batches: Batches,
    recipe: Recipe,
    asked: CalibrationOptions,
    stages: Stages,
    unfinished: Unfinished,
) -> Observer:
    def now() -> dict[str, Tensor]:
        return recorded(observe(decoder, linears, batches.calibration, recipe, **watched, stages=stages))

    watched = {"kv_cache": asked.kv_cache, "gradients": asked.gradients}
    observer = observer_of(decoder, linears, recipe, **watched)
    restore(observer, unfinished.once("observed", now))
    return observer


def _chosen_amaxes(
    decoder: Decoder,
    linears: Mapping[str, Linear],
    batches: Sequence[Batch],
    observer: Observer,
    asked: CalibrationOptions,
    stages: Stages,
) -> Mapping[str, float]:
    """Of inputs whose scale is not to be made from their history."""
    if asked.input_scales == "percentile":
        return percentile_amaxes(decoder, linears, batches, asked.percentile or PERCENTILE, stages)
    if asked.input_scales == "search":
        return searched_amaxes(decoder, linears, batches, {n: s.amax for n, s in observer.seen.items()}, stages)
    return {}


def _heal(
    source: Path,
    decoder: Decoder,
    linears: Mapping[str, Linear],
    batches: Batches,
    recipe: Recipe,
    observer: Observer,
    rounded: dict[str, FrozenLinear] | None,
    asked: CalibrationOptions,
    stages: Stages,
) -> tuple[dict[str, ScalingState], dict[str, FrozenLinear] | None, HealingReport]:
    """(states, linears as they are served, what happened); without the training if it helped nothing."""
    states, schedule = observer.states(), Schedule(asked.heal, asked.heal_rate)
    old, seen = copy.deepcopy(states), copy.deepcopy(observer.seen)
    held_out = decoder, linears, batches.held_out, recipe
    before = compare(*held_out, states, stages, rounded)[0].kl_divergence
    reference = load_servable(source, "bf16", device=asked.device)
    healed, losses = heal(
        decoder, linears, reference, batches.calibration, recipe, schedule, observer,
        rounded=rounded, seed=asked.seed, stages=stages,
    )  # fmt: skip
    after = compare(*held_out, states, stages, healed)[0].kl_divergence
    report = HealingReport(asked.heal, asked.heal_rate, tuple(losses), before, after)
    if not report.helped:
        observer.seen = seen
        return old, rounded, report
    return states, healed, report


def _on_healing(report: HealingReport | None) -> tuple[str, ...]:
    if report is None:
        return ()
    change = f"KL on the held-out samples from {report.kl_before:.4f} to {report.kl_after:.4f} nats"
    kept = "" if report.helped else ", which is no better: the weights were written as they were before"
    return (f"Healing took {report.steps} steps and moved the {change}{kept}.",)


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
    if asked.heal and (asked.scales_only or asked.input_scales != "history"):
        raise RecipeError("Healing changes weights and lets scales follow them; leave out scales_only, input_scales.")
    if asked.heal and not trains(recipe):
        raise RecipeError(f"Nothing trains under the recipe {name_of(recipe)!r}, so it cannot heal.")
    if asked.input_scales != "history" and delayed(recipe) is None:
        raise RecipeError(f"The recipe {name_of(recipe)!r} stores no scales of inputs; leave out input_scales.")
    if asked.percentile is not None and asked.input_scales != "percentile":
        raise RecipeError("A percentile is used with input_scales 'percentile' only.")
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
    """The states whose scales the directory carries: the cache's, and those by which the recipe scales tensors."""
    kept = tuple(f".{role}" for role, spec in recipe.specs.linear.items() if spec.source == "delayed")
    return {n: s for n, s in states.items() if n.endswith((*kept, ".k", ".v"))}


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


def _write(
    source: Path,
    out: Path,
    checkpoint: ScalingCheckpoint,
    draft: CalibrationReport,
    asked: CalibrationOptions,
    stages: Stages,
    rounded: Mapping[str, FrozenLinear] | None,
    generate: Callable[[Path], Generated],
) -> CalibrationReport:
    """Write `out` whole or not at all; the report as it was written, or would have been."""
    final = [draft]

    def extra_files(folder: Path) -> dict[str, str | bytes]:
        generated, told = generate(folder)
        final[0] = report = replace(
            draft,
            bytes_after=weight_bytes(folder),
            notes=(*draft.notes, *reader_notes(open_checkpoint(folder)), *told),
            generated=generated,
            seconds=stages.seconds | {"total": stages.total()},
        )
        return {"calibration.json": report.to_json() + "\n", "report.html": html_report(report)}

    with stages.stage("write"):
        if not asked.scales_only:
            quantized = {n: (m.weight_q, m.weight_scale_inv) for n, m in (rounded or {}).items()}
            # healed scales are those of weights that `source` does not have
            weights = open_checkpoint(source) if draft.healing else None
            write_calibrated(
                out, source, checkpoint, weights=weights, quantized=quantized, format=draft.format,
                extra_files=extra_files, max_shard_bytes=asked.max_shard_bytes,
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
