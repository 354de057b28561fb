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

Layers are computed one after the other, each over all batches (passes.py), so that a BF16 checkpoint larger than
memory is read once in each stage. Peak memory: one layer's weights as mapped pages, which the system may drop (a
checkpoint of another type is converted: 2 bytes per parameter); its FP8 weights; the hidden states of all batches and
one layer's activations of one batch; 256 rows of logits in FP32. The ranking reads the weights twice for each of its
sequences, and with `gradients` observing reads them twice for each batch; both keep the activations of all layers for
that sequence or batch. On a GPU the weights must fit there.

A model that embeds goes the same way without the stages for predictions: smooth, heal and generate
(`calibrate_encoder`). Who measures is the one difference between the two (job.py).

Recipes that scale by content (current, rowwise, block) need no input scales: for them amaxes are observed for the
report, and the directory gets FP8 weights and, if asked for, scales of the KV cache.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fp8serve.calibration.checks import (
    check_encoder_options,
    check_model,
    check_room,
    check_settings,
    fitting,
    quantized_notes,
    shortfall,
)
from fp8serve.calibration.data import Batches, calibration_batches
from fp8serve.calibration.embedding import EmbeddingReport
from fp8serve.calibration.job import Cosine, Divergence, Job
from fp8serve.calibration.observe import Observer, experts_note, observer_of, settle
from fp8serve.calibration.options import HEAL_RATE, CalibrationOptions
from fp8serve.calibration.output import call, origin_of, versions, write
from fp8serve.calibration.progress import Progress, Stages
from fp8serve.calibration.result import CalibrationReport, HealingReport, SmoothingReport
from fp8serve.calibration.techniques.healing import Schedule, heal
from fp8serve.calibration.techniques.input_scales import searched_amaxes
from fp8serve.calibration.techniques.precision import groups_of, left_out
from fp8serve.calibration.techniques.rounding import round_weights
from fp8serve.calibration.techniques.smoothing import FACTORS, pairs, smooth
from fp8serve.calibration.unfinished import Once, Unfinished, description, every_time, record_observer
from fp8serve.calibration.unfinished import restore_observer as restore_observer
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.checkpoint import load_reader, load_servable, open_checkpoint
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.model_config import AnyConfig, computed_by_note
from fp8serve.model.config.sentence import has_pooling
from fp8serve.model.config.wrappers import left_out_notes
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import Pooling, read_pooling
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.ranks import ALONE, Ranks

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
    out, source, settings = Path(out), Path(model_dir), CalibrationOptions.of(options)
    check_settings(out, recipe, settings, ranks.size)
    if not settings.scales_only:
        check_room(source, out)
    origin = command or call("calibrate", source, out=out, recipe=recipe, **options)
    job = _text_job(source, recipe, settings, Stages(progress))
    about = description(source, recipe, job.options, job.batches, versions())
    with Unfinished(out, about, settings.resume, ranks) as unfinished:
        return cast(CalibrationReport, _calibrate(job, out, origin, unfinished.once, ranks))


def calibrate_encoder(
    model_dir: Path | str,
    *,
    out: Path | str,
    recipe: Recipe = DELAYED,
    progress: Progress | None = None,
    command: str | None = None,
    **options: Any,
) -> EmbeddingReport:
    """Calibrate the encoder, or the decoder that embeds, in `model_dir` and write the FP8 directory `out`.

    The cosine of the vectors of held-out texts measures the cost of FP8. options: fields of CalibrationOptions;
    RecipeError for an option of language models only. command: the command that a reader of the report can repeat;
    None: this call. Otherwise raises as `calibrate` does.
    """
    out, source, settings = Path(out), Path(model_dir), CalibrationOptions.of(options)
    check_encoder_options(settings)
    check_settings(out, recipe, settings, is_encoder=True)
    check_room(source, out)
    arguments = {"out": out, "recipe": recipe} | options
    origin = command or call("calibration.pipeline.calibrate_encoder", source, **arguments)
    job = _embedding_job(source, recipe, settings, Stages(progress))
    return cast(EmbeddingReport, _calibrate(job, out, origin))


def _calibrate(
    job: Job, out: Path, origin: str, once: Once = every_time, ranks: Ranks = ALONE
) -> CalibrationReport | EmbeddingReport:
    """All stages after loading. once: stores the result of a stage, or returns that of an earlier run."""
    if job.options.smoothing is not None:
        _smooth(job, job.options.smoothing, once, ranks)
    restore_observer(job.observer, once("observed", lambda: record_observer(job.judge.observe(job, ranks))))
    job.notes += experts_note(job.observer.tokens, all_experts=job.options.all_experts)
    job.states = settle(job.observer, _searched_amaxes(job))
    if job.options.rounding == "gptq":
        samples = job.batches.calibration
        job.rounded = round_weights(job.model, job.linears, samples, job.recipe, job.states, job.stages, once, ranks)
    if not ranks.first:
        return cast(CalibrationReport, ranks.hear())
    job.judge.meet_target(job)
    if job.options.heal:
        _heal(job)
    quality, layers = job.judge.measure(job)
    return ranks.tell(write(job, out, quality, layers, origin_of(origin)))


def _text_job(source: Path, recipe: Recipe, options: CalibrationOptions, stages: Stages) -> Job:
    """A model that writes text, and samples; nothing observed yet."""
    with stages.stage("load"):
        decoder, linears = load(source, options.device)
        check_model(decoder.config, options)
        seq_len, notes = fitting(options.seq_len, decoder.config)
        options = replace(options, seq_len=seq_len)
        batches = _batches(options, source, decoder.config)
        notes += shortfall(options.samples, seq_len, batches.samples, batches.tokens)
        notes += quantized_notes(source, scales_only=options.scales_only)
        notes += left_out_notes(source, open_checkpoint(source).left_out)
        notes += computed_by_note(decoder.config)
        observer = observer_of(decoder, linears, recipe, kv_cache=options.kv_cache, gradients=options.gradients)
        job = Job(source, recipe, options, stages, decoder, linears, batches, observer, Divergence(), notes=notes)
        _leave_out(job)
    return job


def _embedding_job(source: Path, recipe: Recipe, options: CalibrationOptions, stages: Stages) -> Job:
    """A model that embeds, and texts; nothing observed yet."""
    with stages.stage("load"):
        model = load_reader(source, "bf16", device=options.device)
        linears = _convert(model, () if isinstance(model, Encoder) else (model.head_name,))
        batches = _batches(
            replace(options, seq_len=min(options.seq_len, model.config.max_length)), source, model.config
        )
        observer = Observer(linears, delayed(recipe) or DelayedScaling())
        judge = Cosine(pooling_of(source, model.config))
        job = Job(source, recipe, options, stages, model, linears, batches, observer, judge)
        _leave_out(job)
    return job


def load(source: Path, device: str) -> tuple[Model, dict[str, Linear]]:
    """The decoder in BF16 with mapped, frozen weights, and its converted linears by name."""
    decoder = load_servable(source, "bf16", device=device)
    return decoder, _convert(decoder, (decoder.head_name,))


def _convert(model: AnyModel, skip: tuple[str, ...]) -> dict[str, Linear]:
    convert(model.requires_grad_(False), skip=skip)
    return {name: cast(Linear, model.get_submodule(name)) for name in model.linear_names()}


def _leave_out(job: Job) -> None:
    """The linears that `skip` and `only` name stay in high precision."""
    names = left_out(list(job.linears), job.options.skip or (), job.options.only or ())
    job.leave_in_bf16(groups_of(job.model, names))


def pooling_of(source: Path, config: AnyConfig) -> Pooling:
    """The pooling that the directory states; without one, the vector that a head reads, or the mean for models without
    a head."""
    if has_pooling(source):
        return read_pooling(source)
    if not isinstance(config, EncoderConfig):
        return Pooling("lasttoken", normalized=False)
    return Pooling("mean" if config.head is None else "cls", normalized=False)


def _batches(options: CalibrationOptions, source: Path, config: AnyConfig) -> Batches:
    return calibration_batches(
        options.data, Tokenizer.from_dir(source), config.vocab_size, samples=options.samples, seq_len=options.seq_len,
        batch_size=options.batch_size, seed=options.seed, device=options.device, holdout=options.holdout,
    )  # fmt: skip


def _searched_amaxes(job: Job) -> Mapping[str, float]:
    """Amaxes of inputs whose scale does not come from their history."""
    if job.options.input_scales != "search":
        return {}
    seen = {name: seen.amax for name, seen in job.observer.seen.items()}
    return searched_amaxes(job.decoder, job.linears, job.batches.calibration, seen, job.stages)


def _smooth(job: Job, alpha: float, once: Once, ranks: Ranks) -> None:
    """Changes the model's parameters where an input has uneven channels and evening them out helps."""
    samples, config = job.batches.calibration, job.decoder.config
    job.smoothed = smooth(job.decoder, job.linears, samples, job.recipe, alpha, job.stages, once, ranks)
    tried = sum(len(pairs(config, index, job.linears)) for index in range(config.num_layers))
    helped = tuple(name.removesuffix(FACTORS) for name in job.smoothed if name.endswith(FACTORS))
    job.smoothing = SmoothingReport(alpha, helped, tried)
    if config.offset_norms:
        job.notes += ("Smoothing left the norms alone: they multiply by 1 + weight, which holds no factor exactly.",)


def _heal(job: Job) -> None:
    """Trains the model in FP8; the result is dropped if it is no better on the held-out batches."""
    options, observer, judge = job.options, job.observer, cast(Divergence, job.judge)
    schedule = Schedule(options.heal, options.heal_rate or HEAL_RATE)
    old, seen = copy.deepcopy(job.states), copy.deepcopy(observer.seen)
    before = judge.compare(job)[0].kl_divergence
    reference = load_servable(job.source, "bf16", device=options.device)
    healed, losses = heal(
        job.decoder, job.linears, reference, job.batches.calibration, job.recipe, schedule, observer,
        rounded=job.rounded, seed=options.seed, stages=job.stages,
    )  # fmt: skip
    after = judge.compare(job, rounded=healed)[0].kl_divergence
    job.healing = HealingReport(options.heal, schedule.learning_rate, tuple(losses), before, after)
    if job.healing.helped:
        job.rounded = healed
    else:
        job.states, observer.seen = old, seen
