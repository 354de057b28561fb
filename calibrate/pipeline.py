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

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fp8serve.errors import MachineError, RecipeError
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.linear import convert
from fp8serve.fp8.recipe import DelayedScaling, Recipe, name_of, to_json
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.checkpoint import linear_names, load_servable
from fp8serve.model.decoder import Decoder
from fp8serve.model.files import check_absent
from fp8serve.model.tokenizer import Tokenizer

from .data import Batch, Batches, calibration_batches
from .measure import LayerTally, TokenTally, add_logits
from .observe import Observer, check, observing, settle
from .passes import Linears, attention_names, backward, blame, forward, fp8_cache, in_fp8, tracked
from .progress import Progress, Stages
from .result import CalibrationReport, DataReport, LayerReport, Quality, TensorReport

DELAYED = DelayedScaling()


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

    ModelError, DataError, RecipeError: an input cannot be used. ScalesError names a tensor that is not finite, was never
    observed or is always zero. In every such case nothing is written.
    """
    out, source = Path(out), Path(model_dir)
    _check_settings(out, recipe, device, gradients)
    stages = Stages(progress)
    with stages.stage("load"):
        decoder, linears = load(source, device)
        limit = min(seq_len, decoder.config.max_full_attention_len)
        files = None if data is None else [data] if isinstance(data, str | Path) else list(data)
        batches = calibration_batches(
            files, Tokenizer.from_dir(source), samples=samples, seq_len=limit, batch_size=batch_size, seed=seed, device=device
        )
    observer = observe(
        decoder, linears, batches.calibration, recipe, kv_cache=kv_cache, gradients=gradients, stages=stages
    )
    states = settle(observer)
    quality, layers = compare(decoder, linears, batches.held_out, recipe, states, stages)


def _check_settings(out: Path, recipe: Recipe, device: str, gradients: bool) -> None:
    """Everything that can be refused before a weight is read."""
    check_absent(out)
    to_json(recipe)  # RecipeError when it holds a function, which no file can carry
    if recipe.override_linear_precision[0]:
        raise RecipeError("The recipe keeps the forward pass in high precision, so there is nothing to calibrate.")
    if gradients and not isinstance(recipe, DelayedScaling):
        raise RecipeError(f"The recipe {name_of(recipe)!r} scales gradients by content; leave out gradient calibration.")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise MachineError(f"The device {device!r} was asked for, but this torch sees no GPU; use --device cpu.")


def load(source: Path, device: str) -> tuple[Decoder, dict[str, nn.Linear]]:
    """The decoder in BF16 with mapped, frozen weights, and its converted linears by name."""
    decoder = load_servable(source, "bf16", device=device)
    decoder.requires_grad_(False)
    convert(decoder)
    modules = dict(decoder.named_modules())
    return decoder, {name: cast(nn.Linear, modules[name]) for name in linear_names(decoder)}


def observe(
    decoder: Decoder,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    *,
    kv_cache: bool = False,
    gradients: bool = False,
    stages: Stages | None = None,
) -> Observer:
    """Run every batch once in high precision and record. ScalesError: a tensor cannot have a scale, or is not finite."""
    delayed = recipe if isinstance(recipe, DelayedScaling) else DELAYED
    observer = Observer(linears, delayed, gradients=gradients, kv_layers=attention_names(decoder) if kv_cache else ())
    with tracked(decoder) if gradients else torch.no_grad():
        for batch in (stages or Stages()).steps("observe", batches):
            with autocast(enabled=False, calibrating=True, recipe=observer.recipe):
                hidden = forward(decoder, batch, observer.tap)
            if not bool(hidden.isfinite().all()):
                raise blame(decoder, linears, batch)
            if gradients:
                backward(decoder, hidden, batch.targets)
            observer.end_batch()
    needed = observer.seen if isinstance(recipe, DelayedScaling) else observer.kv
    check(observer.seen, needed, len(batches))
    return observer


@torch.no_grad()
def compare(
    decoder: Decoder,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    states: Mapping[str, ScalingState],
    stages: Stages | None = None,
) -> tuple[Quality, dict[str, LayerTally]]:
    """What `recipe` with the scales in `states` costs on `batches`: per token, and per linear."""
    tokens, layers = TokenTally(), {name: LayerTally() for name in linears}
    kv = {name: state.scale for name, state in states.items() if name.endswith((".k", ".v"))}

    def freeze(name: str, linear: nn.Linear) -> FrozenLinear:
        if not isinstance(recipe, DelayedScaling):
            return FrozenLinear.from_linear(linear, recipe)
        return FrozenLinear.from_linear(linear, recipe, states[f"{name}.input"].scale, states[f"{name}.weight"].scale)

    for batch in (stages or Stages()).steps("compare", batches):
        exact = forward(decoder, batch)
        with in_fp8(linears, freeze, layers):
            quantized = forward(decoder, batch, fp8_cache(kv) if kv else None)
        add_logits(tokens, batch.targets, (decoder, quantized), (decoder, exact))
    return tokens.quality(compared=True), layers
