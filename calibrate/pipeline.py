"""calibrate: sample data -> amax histories -> scales -> an FP8 directory with the evidence that it is good.

    load       weights memory-mapped in their own file, computed in BF16; linears converted in place, nothing copied
    smooth     with smoothing=ALPHA: channels of inputs evened out, where that helps (smoothing.py)
    observe    every calibration batch once, in high precision, amaxes recorded (and gradients, and keys and values)
    round      with rounding="gptq": layer by layer, weights rounded so that errors make up for each other (rounding.py)
    meet       with a target for quality: the fewest layers left in BF16 that meet it (precision.py)
    heal       with heal=STEPS: trained in FP8 to say what the model said in high precision (healing.py)
    compare    every held-out batch twice, in high precision and as it will be served, layer by layer and token by token
    rank       forwards and backwards over some held-out tokens: what each layer adds to the KL divergence
    write      the whole directory or nothing
    generate   a few held-out prompts continued by the model and by what was written (generated.py)

Layers are computed one after the other, each over all batches (layerwise.py), so that a BF16 checkpoint larger than
memory is read once in each stage. Peak memory: one layer's weights as mapped pages, which the system may drop (a
checkpoint of another type is converted: 2 bytes per parameter); its FP8 weights; the hidden states of all batches and
one layer's activations of one batch; 256 rows of logits in FP32. The ranking reads the weights twice for each of its
sequences, and with `gradients` observing reads them twice for each batch; both keep the activations of all layers for
that sequence or batch. On a GPU the weights must fit there.

Recipes that scale by content (current, rowwise, block) need no input scales: for them amaxes are observed for the
report, and the directory gets FP8 weights and, if asked for, scales of the KV cache.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fp8serve.fp8.linear import Linear, convert
from fp8serve.fp8.recipe import DelayedScaling, Recipe
from fp8serve.model.building import Model
from fp8serve.model.checkpoint import load_servable, open_checkpoint
from fp8serve.model.config.decoder import computed_by_note
from fp8serve.model.config.wrappers import left_out_notes
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.ranks import ALONE, Ranks

from .data import Batches, calibration_batches
from .experts import said_of_experts
from .job import Job
from .lengths import fitting, shortfall
from .made import call, made
from .methods import amaxes_of_inputs, heal_weights, meet, smooth_weights
from .observe import observe, observer_of, settle
from .options import CalibrationOptions
from .precision import Target, kept_reports, left_out, restore
from .progress import Progress, Stages
from .recorded import recorded
from .recorded import restore as restore_observer
from .refused import check_model, check_room, check_settings, quantized_notes
from .result import CalibrationReport, LayerReport, Quality
from .rounding import round_weights
from .unfinished import Unfinished, description
from .written import versions, write

DELAYED = DelayedScaling()


def calibrate(
    model_dir: Path | str,
    *,
    out: Path | str,
    recipe: Recipe = DELAYED,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    command: str | None = None,
    **options: Any,
) -> CalibrationReport:
    """Calibrate the Hugging Face directory `model_dir` and write the FP8 directory `out` (docs/formats.md).

    options: the fields of CalibrationOptions. Sequences are at most as long as the model's context; quality is measured
    on an eighth as many. Held-out examples are never observed, even where `data` repeats them. kv_cache: a scale for
    the keys and one for the values of every layer. gradients: E5M2 scales, by a forward and a backward pass per batch.
    smoothing: 0..1; evens out the channels of inputs, the more the larger it is, at the expense of weights; in high
    precision the model does not change. rounding: "gptq" rounds weights so that the errors of a layer's outputs on
    these samples become small. heal: the number of training steps under the recipe towards the output in high precision
    (healing.py). ranks: the processes that calibrate together, each calling this function alike (ranks.py); rank 0
    writes. progress(stage, done, total) is called after every step of a stage: a layer, or a batch. command: the
    command that a reader of the report can repeat; None: this call.

    ModelError, DataError, RecipeError, MachineError: an input cannot be used. ScalesError names a tensor that is not
    finite, was never observed or is always zero. In every such case `out` is not written. Results that were finished
    before a kill or a full disk are kept beside `out` (unfinished.py), and `resume` continues from there.
    """
    out, source, asked = Path(out), Path(model_dir), CalibrationOptions.of(options)
    check_settings(out, recipe, asked, ranks.size)
    if not asked.scales_only:
        check_room(source, out)
    told = command or call("calibrate", source, out=out, recipe=recipe, **options)
    job = _load(source, recipe, asked, Stages(progress))
    about = description(source, recipe, job.asked, job.batches, versions())
    with Unfinished(out, about, asked.resume, ranks) as unfinished:
        if asked.smoothing is not None:
            smooth_weights(job, asked.smoothing, unfinished.once, ranks)
        _observe(job, unfinished, ranks)
        if asked.rounding == "gptq":
            samples = job.batches.calibration
            job.rounded = round_weights(
                job.decoder, job.linears, samples, recipe, job.states, job.stages, unfinished.once, ranks
            )
        if not ranks.first:
            return cast(CalibrationReport, ranks.hear())
        if target := Target.of(asked):
            meet(job, target)
        if asked.heal:
            heal_weights(job)
        return ranks.tell(write(job, out, *_measure(job), made(told)))


def _load(source: Path, recipe: Recipe, asked: CalibrationOptions, stages: Stages) -> Job:
    """The model and the samples; nothing observed yet."""
    with stages.stage("load"):
        decoder, linears = load(source, asked.device)
        check_model(decoder.config, asked)
        kept = kept_reports(decoder, left_out(list(linears), asked.skip or (), asked.only or ()))
        for name in [name for group in kept for name in group.names]:
            restore(decoder, [name])
            del linears[name]
        seq_len, notes = fitting(asked.seq_len, decoder.config)
        asked = replace(asked, seq_len=seq_len)
        batches = _batches(asked, Tokenizer.from_dir(source), decoder.config.vocab_size)
        notes += shortfall(asked.samples, seq_len, batches.samples, batches.tokens)
        notes += quantized_notes(source, scales_only=asked.scales_only) + left_out_notes(
            source, open_checkpoint(source).left_out
        )
        notes += computed_by_note(decoder.config)
        observer = observer_of(decoder, linears, recipe, kv_cache=asked.kv_cache, gradients=asked.gradients)
    return Job(source, recipe, asked, stages, decoder, linears, batches, observer, kept=list(kept), notes=notes)


def _observe(job: Job, unfinished: Unfinished, ranks: Ranks) -> None:
    """The observations of every tensor, from now or from an interrupted run, and the scales from them."""

    def now() -> dict[str, Tensor]:
        asked = job.asked
        watched = {"kv_cache": asked.kv_cache, "gradients": asked.gradients, "all_experts": asked.all_experts}
        samples = job.batches.calibration
        return recorded(
            observe(job.decoder, job.linears, samples, job.recipe, **watched, stages=job.stages, ranks=ranks)
        )

    restore_observer(job.observer, unfinished.once("observed", now))
    job.notes += said_of_experts(job.observer.tokens, all_experts=job.asked.all_experts)
    job.states = settle(job.observer, amaxes_of_inputs(job))


def _measure(job: Job) -> tuple[Quality, tuple[LayerReport, ...]]:
    """The cost of FP8 on the held-out batches: in total, and layer by layer."""
    quality, layers = job.compare()
    shares = job.shares()
    return quality, tuple(tally.report(name, shares.get(name)) for name, tally in layers.items())


def _batches(asked: CalibrationOptions, tokenizer: Tokenizer, vocab_size: int) -> Batches:
    return calibration_batches(
        asked.data, tokenizer, vocab_size, samples=asked.samples, seq_len=asked.seq_len,
        batch_size=asked.batch_size, seed=asked.seed, device=asked.device, holdout=asked.holdout,
    )  # fmt: skip


def load(source: Path, device: str) -> tuple[Model, dict[str, Linear]]:
    """The decoder in BF16 with mapped, frozen weights, and its converted linears by name."""
    decoder = load_servable(source, "bf16", device=device)
    decoder.requires_grad_(False)
    convert(decoder, skip=(decoder.head_name,))
    modules = dict(decoder.named_modules())
    return decoder, {name: cast(Linear, modules[name]) for name in decoder.linear_names()}
