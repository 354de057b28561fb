"""calibrate: sample data -> amax histories -> scales -> an FP8 directory with the evidence that it is good.

    load       weights memory-mapped in their own file, computed in BF16; linears converted in place, nothing copied
    observe    every calibration batch once, in high precision, amaxes recorded (and gradients, and keys and values)
    compare    every held-out batch twice, in high precision and as it will be served, layer by layer and token by token
    write      the whole directory or nothing

Peak memory: the weights as mapped pages, which the system may drop and read again, so that a BF16 checkpoint larger
than memory works at the speed of its disk (a checkpoint of another type is converted: 2 bytes per parameter); one
layer's FP8 weights; the activations of one batch, of one layer at a time, or of all layers with `gradients`; and 256
rows of logits in FP32. On a GPU the weights must fit there.

Recipes that scale by content (current, rowwise, block) need no input scales: for them amaxes are observed for the
report, and the directory gets FP8 weights and, if asked for, scales of the KV cache.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import torch

import fp8serve
from fp8serve.errors import MachineError, RecipeError
from fp8serve.fp8.linear import Linear, convert
from fp8serve.fp8.recipe import DelayedScaling, Recipe, name_of, to_json
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.checkpoint import linear_names, load_servable
from fp8serve.model.decoder import Decoder
from fp8serve.model.files import check_absent
from fp8serve.model.tokenizer import Tokenizer

from .compare import compare
from .data import Batches, calibration_batches, data_files, source_names
from .observe import Observer, observe, settle
from .progress import Progress, Stages
from .result import CalibrationReport, DataReport, LayerReport, TensorReport

DELAYED = DelayedScaling()
OutputFormat = Literal["compressed-tensors", "fp8", "modelopt"]


def calibrate(
    model_dir: Path | str,
    *,
    out: Path | str,
    recipe: Recipe = DELAYED,
    data: Path | str | Sequence[Path | str] | None = None,
    samples: int = 128,
    seq_len: int = 512,
    batch_size: int = 4,
    format: OutputFormat = "compressed-tensors",  # noqa: A002 - the public name
    seed: int = 0,
    device: str = "cpu",
    kv_cache: bool = False,
    gradients: bool = False,
    scales_only: bool = False,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Calibrate the Hugging Face directory `model_dir` and write the FP8 directory `out` (SPEC 5.2).

    data: .txt, .md or .jsonl files; None for the passages that ship with fp8serve. `samples` sequences of at most
    `seq_len` tokens (and of the model's context) are observed, an eighth as many more are held out to measure quality.
    kv_cache: also a scale for the keys and one for the values of every layer. gradients: also E5M2 scales of the
    gradients, by a forward and a backward pass per batch. scales_only: write `out`/scales.safetensors and nothing else.
    progress(stage, done, total) is called after every batch.

    ModelError, DataError, RecipeError: an input cannot be used. ScalesError names a tensor that is not finite, was
    never observed or is always zero. In every such case nothing is written.
    """
    out, source = Path(out), Path(model_dir)
    _check_settings(out, recipe, device, gradients)
    stages = Stages(progress)
    with stages.stage("load"):
        decoder, linears = load(source, device)
        seq_len = min(seq_len, decoder.config.max_full_attention_len)
        tokenizer, files = Tokenizer.from_dir(source), data_files(data)
        batches = calibration_batches(
            files, tokenizer, samples=samples, seq_len=seq_len, batch_size=batch_size, seed=seed, device=device
        )
    observer = observe(
        decoder, linears, batches.calibration, recipe, kv_cache=kv_cache, gradients=gradients, stages=stages
    )
    states = settle(observer)
    quality, layers = compare(decoder, linears, batches.held_out, recipe, states, stages)
    report = CalibrationReport(
        model=str(source),
        out=str(out),
        recipe=json.loads(to_json(recipe)),
        format=format,
        device=device,
        data=_data_report(files, batches, seq_len, seed),
        quality=quality,
        layers=tuple(LayerReport(name, tally.sqnr_db, tally.saturated_fraction) for name, tally in layers.items()),
        tensors=_tensor_reports(observer, states, recipe),
        bytes_before=0,
        bytes_after=0,
        seconds=stages.seconds | {"total": stages.total()},
        versions=versions(),
    )
    return report


def _check_settings(out: Path, recipe: Recipe, device: str, gradients: bool) -> None:
    """Everything that can be refused before a weight is read."""
    check_absent(out)
    to_json(recipe)  # RecipeError when it holds a function, which no file can carry
    if recipe.override_linear_precision[0]:
        raise RecipeError("The recipe keeps the forward pass in high precision, so there is nothing to calibrate.")
    if gradients and not isinstance(recipe, DelayedScaling):
        raise RecipeError(
            f"The recipe {name_of(recipe)!r} scales gradients by content; leave out gradient calibration."
        )
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise MachineError(f"The device {device!r} was asked for, but this torch sees no GPU; use --device cpu.")


def load(source: Path, device: str) -> tuple[Decoder, dict[str, Linear]]:
    """The decoder in BF16 with mapped, frozen weights, and its converted linears by name."""
    decoder = load_servable(source, "bf16", device=device)
    decoder.requires_grad_(False)
    convert(decoder)
    modules = dict(decoder.named_modules())
    return decoder, {name: cast(Linear, modules[name]) for name in linear_names(decoder)}


def _data_report(files: list[Path] | None, batches: Batches, seq_len: int, seed: int) -> DataReport:
    return DataReport(
        source=source_names(files),
        samples=sum(len(b.lengths) for b in batches.calibration),
        seq_len=seq_len,
        batches=len(batches.calibration),
        tokens=sum(b.tokens for b in batches.calibration),
        held_out_samples=sum(len(b.lengths) for b in batches.held_out),
        held_out_tokens=sum(b.tokens for b in batches.held_out),
        held_out_disjoint=batches.disjoint,
        seed=seed,
    )


def stored_states(states: Mapping[str, ScalingState], recipe: Recipe) -> dict[str, ScalingState]:
    """The states whose scales the directory carries: all for delayed scaling, only the cache's for other recipes."""
    return {n: s for n, s in states.items() if isinstance(recipe, DelayedScaling) or n.endswith((".k", ".v"))}


def _tensor_reports(observer: Observer, states: Mapping[str, ScalingState], recipe: Recipe) -> tuple[TensorReport, ...]:
    stored = stored_states(states, recipe)
    return tuple(
        TensorReport(
            name=name,
            amax=seen.amax,
            scale=float(stored[name].scale) if name in stored else None,
            observations=seen.batches,
            history=tuple(float(f"{value:.6g}") for value in seen.newest),
        )
        for name, seen in observer.seen.items()
    )


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    return {
        "fp8serve": fp8serve.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
