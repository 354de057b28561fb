"""Calibrates a model: computes scales from sample data, and writes an FP8 directory with a report of its quality.

    load       maps the weights from their file and converts linears in place, without copies; the model runs in BF16
    smooth     with smoothing=ALPHA: reduces large channels of inputs if that reduces the error (smoothing.py)
    observe    runs every calibration batch once in high precision and records amaxes
    round      with rounding="gptq": rounds weights layer by layer with compensation of errors (rounding.py)
    meet       with a quality target: finds the fewest layers that must stay in BF16 (precision.py)
    heal       with heal=STEPS: trains the FP8 model towards the output of the model in high precision (healing.py)
    compare    runs every held-out batch in high precision and as it will be served, layer by layer
    rank       runs held-out tokens forward and backward to measure the KL divergence that each layer adds
    write      writes the directory atomically
    generate   continues a few held-out prompts with the original and with the written model (generated.py)

Each layer runs over all batches before the next layer (passes.py), so that a BF16 checkpoint larger than memory is read
once in each stage. Peak memory is the sum of these: the mapped pages of one layer's weights, which the system may drop
(a checkpoint of another type is converted: 2 bytes per parameter); its FP8 weights; the hidden states of all batches
and the activations of one layer and one batch; 256 rows of logits in FP32. The ranking reads the weights twice for each
of its sequences, and observing with `gradients` reads them twice for each batch. Both hold the activations of all
layers for that sequence or batch. On a GPU the weights must fit into its memory.

A model that embeds has the same stages except smooth, heal and generate (`calibrate_encoder`). Only the measurements
differ, which a judge makes (job.py).

Recipes that scale by content (current, rowwise, block) need no input scales. For them amaxes are observed for the
report, and the directory has FP8 weights and, if requested, scales of the KV cache.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from fp8serve.calibration.checks import (
    check_encoder_options,
    check_model,
    check_settings,
    limit_seq_len,
    missing_samples_note,
    quantized_notes,
)
from fp8serve.calibration.data import Batches, calibration_batches
from fp8serve.calibration.embedding import EmbeddingReport
from fp8serve.calibration.job import CosineJudge, DivergenceJudge, Job
from fp8serve.calibration.observe import (
    final_states,
    make_observer,
    observe,
    share_weight_scales,
    unreached_experts_note,
)
from fp8serve.calibration.options import HEAL_RATE, CalibrationOptions
from fp8serve.calibration.output import call_text, make_origin, versions, write_output
from fp8serve.calibration.progress import Progress, Stages
from fp8serve.calibration.result import CalibrationReport, HealingReport, SmoothingReport
from fp8serve.calibration.stage_results import (
    LoadOrCompute,
    StageResults,
    always_compute,
    load_observer,
    observer_tensors,
    run_description,
)
from fp8serve.calibration.techniques.healing import heal
from fp8serve.calibration.techniques.precision import excluded_linears, input_groups, unmeasured_groups
from fp8serve.calibration.techniques.rounding import round_weights
from fp8serve.calibration.techniques.smoothing import FACTORS, smooth, smoothing_pairs
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.layer_inputs import check_whole_blocks
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling, Recipe, recipe_for_calibration
from fp8serve.model.building import AnyModel, Model
from fp8serve.model.checkpoint import load_any_servable, load_servable, open_checkpoint
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.model_config import AnyConfig, computed_by_notes
from fp8serve.model.config.modules_json import has_pooling
from fp8serve.model.config.wrappers import unused_part_notes
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import Pooling, read_pooling
from fp8serve.model.storage.files import check_writable
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
    """Calibrates the Hugging Face directory `model_dir` and writes the FP8 directory `out` (docs/formats.md).

    Sequences are at most as long as the model's context. Quality is measured on an eighth as many sequences. Held-out
    examples are never observed, even if `data` contains them.

    Args:
        progress: Called with (stage, done, total) after every step of a stage: a layer, or a batch.
        ranks: The processes that calibrate together. Each calls this function with the same arguments; rank 0 writes.
        command: The command that the report shows as its origin; None for this call.
        options: The fields of CalibrationOptions, such as `kv_cache` (scales for keys and values), `gradients` (E5M2
            scales from a backward pass per batch), `smoothing` (from 0 to 1), `rounding="gptq"` and `heal` (steps).

    Raises ModelError, DataError, RecipeError or MachineError if an input cannot be used. Raises ScalesError if a tensor
    is not finite, was never observed or is always zero. In all these cases `out` is not written. After a kill or a full
    disk the results of finished stages are stored beside `out` (stage_results.py), and `resume` continues from them.
    """
    out, source, recipe = Path(out), Path(model_dir), recipe_for_calibration(recipe)
    settings = CalibrationOptions.of(options).on_device(source, ranks.size)
    check_settings(out, recipe, settings, ranks.size)
    if not settings.scales_only:
        check_writable(out, open_checkpoint(source).num_weights)  # at least a byte for each weight
    origin = command or call_text("calibrate", source, out=out, recipe=recipe, **options)
    job = _text_job(source, recipe, settings, Stages(progress))
    this_run = run_description(source, recipe, job.options, job.batches, versions())
    with StageResults(out, this_run, settings.resume, ranks) as results:
        return cast(CalibrationReport, _calibrate(job, out, origin, results.load_or_compute, ranks))


def calibrate_encoder(
    model_dir: Path | str,
    *,
    out: Path | str,
    recipe: Recipe = DELAYED,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    command: str | None = None,
    **options: Any,
) -> EmbeddingReport:
    """Calibrates the encoder, or the embedding decoder, in `model_dir` and writes the FP8 directory `out`.

    The error of FP8 is the cosine of the vectors of held-out texts. The arguments and errors are those of `calibrate`.
    Raises RecipeError for an option of generative models.
    """
    out, source, recipe = Path(out), Path(model_dir), recipe_for_calibration(recipe)
    settings = CalibrationOptions.of(options).on_device(source, ranks.size)
    check_encoder_options(settings)
    check_settings(out, recipe, settings, ranks.size, is_encoder=True)
    check_writable(out, open_checkpoint(source).num_weights)  # at least a byte for each weight
    arguments = {"out": out, "recipe": recipe} | options
    origin = command or call_text("calibration.pipeline.calibrate_encoder", source, **arguments)
    job = _embedding_job(source, recipe, settings, Stages(progress))
    return cast(EmbeddingReport, _calibrate(job, out, origin, ranks=ranks))


def _calibrate(
    job: Job, out: Path, origin: str, load_or_compute: LoadOrCompute = always_compute, ranks: Ranks = ALONE
) -> CalibrationReport | EmbeddingReport:
    """Runs all stages after loading. `load_or_compute` returns the stored result of a stage, if there is one."""
    if job.options.smoothing is not None:
        _smooth(job, job.options.smoothing, load_or_compute, ranks)
    load_observer(job.observer, load_or_compute("observed", lambda: _observe(job, ranks)))
    job.notes += unreached_experts_note(job.observer.tokens, all_experts=job.options.all_experts)
    job.states = final_states(job.observer)
    if job.options.share_scales:
        share_weight_scales(job.states, input_groups(job.linears))
    if job.options.rounding == "gptq":
        job.rounded = round_weights(
            job.model, job.linears, job.batches.calibration, job.recipe, job.states, job.stages, load_or_compute, ranks
        )
    if not ranks.is_first:
        return cast(CalibrationReport, ranks.receive_broadcast())
    job.judge.meet_target(job)
    if job.options.heal:
        _heal(job)
    quality, layers = job.judge.measure(job)
    return ranks.broadcast(write_output(job, out, quality, layers, make_origin(origin)))


def _observe(job: Job, ranks: Ranks) -> Mapping[str, Tensor]:
    batches, all_experts = job.batches.calibration, job.options.all_experts
    return observer_tensors(observe(job.model, job.observer, batches, job.stages, ranks, all_experts=all_experts))


def _text_job(source: Path, recipe: Recipe, options: CalibrationOptions, stages: Stages) -> Job:
    """Loads a model that generates text and its samples into a new job."""
    with stages.stage("load"):
        decoder, linears = load_for_calibration(source, options.device)
        check_model(decoder.config, options)
        seq_len, notes = limit_seq_len(options.seq_len, decoder.config)
        options = replace(options, seq_len=seq_len)
        batches = _batches(options, source, decoder.config)
        notes += missing_samples_note(options.samples, seq_len, batches.samples, batches.tokens)
        notes += quantized_notes(source, scales_only=options.scales_only)
        notes += unused_part_notes(source, open_checkpoint(source).omitted_modules)
        notes += computed_by_notes(decoder.config)
        observer = make_observer(decoder, linears, recipe, kv_cache=options.kv_cache, gradients=options.gradients)
        job = Job(source, recipe, options, stages, decoder, linears, batches, observer, DivergenceJudge(), notes=notes)
        _select_linears(job)
    return job


def _embedding_job(source: Path, recipe: Recipe, options: CalibrationOptions, stages: Stages) -> Job:
    """Loads a model that embeds and its texts into a new job."""
    with stages.stage("load"):
        model = load_any_servable(source, "bf16", device=options.device)
        linears = _convert(model, () if isinstance(model, Encoder) else (model.head_name,))
        batches = _batches(
            replace(options, seq_len=min(options.seq_len, model.config.max_length)), source, model.config
        )
        observer = make_observer(model, linears, recipe)
        judge = CosineJudge(pooling_of(source, model.config))
        job = Job(source, recipe, options, stages, model, linears, batches, observer, judge)
        _select_linears(job)
    return job


def load_for_calibration(source: Path, device: str) -> tuple[Model, dict[str, Linear]]:
    """Loads the decoder in BF16 with mapped weights, and returns it with its converted linears by name."""
    decoder = load_servable(source, "bf16", device=device)
    return decoder, _convert(decoder, (decoder.head_name,))


def _convert(model: AnyModel, skip: tuple[str, ...]) -> dict[str, Linear]:
    convert(model.requires_grad_(False), skip=skip)
    return {name: cast(Linear, model.get_submodule(name)) for name in model.linear_names()}


def _select_linears(job: Job) -> None:
    """Leaves linears in high precision that the options exclude. Raises RecipeError if another has no whole blocks."""
    names = excluded_linears(list(job.linears), job.options.skip or (), job.options.only or ())
    job.leave_in_bf16(unmeasured_groups(job.model, names))
    for name, linear in job.linears.items():
        check_whole_blocks(job.recipe, linear.in_features, name)


def pooling_of(source: Path, config: AnyConfig) -> Pooling:
    """Returns the pooling that the directory states, or a default.

    The default is the last token for a decoder, the vector that the head reads for a classifier, and else the mean.
    """
    if has_pooling(source):
        return read_pooling(source)
    if not isinstance(config, EncoderConfig):
        return Pooling("lasttoken", normalized=False)
    return Pooling("mean" if config.head is None else "cls", normalized=False)


def _batches(options: CalibrationOptions, source: Path, config: AnyConfig) -> Batches:
    return calibration_batches(
        options.data, Tokenizer.from_dir(source), config.vocab_size, samples=options.samples, seq_len=options.seq_len,
        batch_size=options.sequences_per_batch, seed=options.seed, device=options.device, holdout=options.holdout,
    )  # fmt: skip


def _smooth(job: Job, alpha: float, load_or_compute: LoadOrCompute, ranks: Ranks) -> None:
    """Smooths the model's parameters if that reduces the error, and reports the result."""
    samples, config = job.batches.calibration, job.decoder.config
    job.smoothed = smooth(job.decoder, job.linears, samples, job.recipe, alpha, job.stages, load_or_compute, ranks)
    num_pairs = sum(len(smoothing_pairs(config, index, job.linears)) for index in range(config.num_layers))
    helped = tuple(name.removesuffix(FACTORS) for name in job.smoothed if name.endswith(FACTORS))
    job.smoothing = SmoothingReport(alpha, helped, num_pairs)
    if config.offset_norms:
        job.notes += ("The norms were not smoothed: they multiply by 1 + weight, which cannot store a factor exactly.",)


def _heal(job: Job) -> None:
    """Trains the model in FP8, and discards the result if it does not reduce the KL divergence on held-out batches."""
    options, observer, judge = job.options, job.observer, cast(DivergenceJudge, job.judge)
    max_rate = options.heal_rate or HEAL_RATE
    states_before, records_before = copy.deepcopy(job.states), copy.deepcopy(observer.records)
    kl_before = judge.compare(job)[0].kl_divergence
    reference = load_servable(job.source, "bf16", device=options.device)
    healed, losses = heal(
        job.decoder, job.linears, reference, job.batches.calibration, job.recipe, observer,
        steps=options.heal, max_rate=max_rate, rounded=job.rounded,
        shared=input_groups(job.linears) if options.share_scales else (), seed=options.seed, stages=job.stages,
    )  # fmt: skip
    job.states = observer.states()  # healing may have replaced them (fp8/shared_input.py)
    kl_after = judge.compare(job, rounded=healed)[0].kl_divergence
    job.healing = HealingReport(options.heal, max_rate, tuple(losses), kl_before, kl_after)
    if job.healing.is_improvement:
        job.rounded = healed
    else:
        job.states, observer.records = states_before, records_before
