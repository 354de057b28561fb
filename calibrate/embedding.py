"""calibrate, for a model that embeds: amaxes from whole texts, and the effect of FP8 on the directions of their
vectors.

There are no next tokens and so no perplexity: both models embed each held-out text, and the cosine of the two vectors
measures the cost of FP8 (closeness.py). Weights are rounded like those of a decoder (rounding.py). An encoder is small,
so the choice of layers that stay in BF16 is measured: every choice alone in FP8, with one pass for each
(encoder_job.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

import fp8serve
from fp8serve.errors import RecipeError
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.linear import Linear
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, fingerprint, write_calibrated
from fp8serve.model.config.either import AnyConfig
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.sentence import has_pooling
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import Pooling, read_pooling
from fp8serve.model.reading import hidden_states, load_reader
from fp8serve.model.text.tokenizer import Tokenizer

from .closeness import Closeness
from .data import Batches, calibration_batches
from .embedding_report import EmbeddingReport, report_of
from .encoder_job import EncoderJob
from .made import call, made
from .observe import Observer, check, settle
from .options import CalibrationOptions
from .page.encoder_pages import html_encoder_report
from .precision import kept_reports, left_out
from .progress import Progress, Stages
from .refused import check_room, check_settings
from .result import LayerReport
from .rounding import round_weights
from .written import stored_states

_TAKEN = ("data", "holdout", "samples", "seq_len", "batch_size", "seed", "device", "format", "max_shard_size",
          "rounding", "skip", "only", "target_cosine")  # fmt: skip
DELAYED = DelayedScaling()


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

    options: fields of CalibrationOptions; RecipeError for an option of language models only. command: the command that
    a reader of the report can repeat; None: this call. Otherwise raises as `calibrate` does.
    """
    out = Path(out)
    asked = _checked(out, recipe, options)
    check_room(Path(model_dir), out)
    job = _load(Path(model_dir), recipe, asked, Stages(progress))
    told = {"out": out, "recipe": recipe} | options
    job.made = made(command or call("calibration.embedding.calibrate_encoder", job.source, **told))
    _observe(job)
    job.states = settle(job.observer)
    if asked.rounding == "gptq":
        job.rounded = round_weights(
            job.model, job.linears, job.batches.calibration, recipe, job.states, stages=job.stages
        )
    if asked.target_cosine is not None:
        job.meet(asked.target_cosine)
    return _write(job, out, *job.measure())


def _checked(out: Path, recipe: Recipe, options: Mapping[str, Any]) -> CalibrationOptions:
    """RecipeError: an option other than its default that has no meaning here."""
    asked, usual = CalibrationOptions.of(dict(options)), CalibrationOptions.of({})
    for name, value in vars(asked).items():
        if name not in _TAKEN and value != getattr(usual, name):
            raise RecipeError(f"{name} is of models that write text, and this one embeds or classifies; leave it out.")
    check_settings(out, recipe, asked, is_encoder=True)
    return asked


def _load(source: Path, recipe: Recipe, asked: CalibrationOptions, stages: Stages) -> EncoderJob:
    """The model and the texts; nothing observed yet."""
    with stages.stage("load"):
        model = load_reader(source, "bf16", device=asked.device).requires_grad_(False)
        convert(model, skip=() if isinstance(model, Encoder) else (model.head_name,))
        linears = {name: cast(Linear, model.get_submodule(name)) for name in model.linear_names()}
        pooling = pooling_of(source, model.config)
        batches = _batches(asked, source, model.config)
        observer = Observer(linears, delayed(recipe) or DelayedScaling())
    job = EncoderJob(source, recipe, asked, stages, model, linears, batches, pooling, observer)
    job.keep(kept_reports(model, left_out(list(linears), asked.skip or (), asked.only or ())))
    return job


def pooling_of(source: Path, config: AnyConfig) -> Pooling:
    """The pooling that the directory states; without one, the vector that a head reads, or the mean for models without
    a head."""
    if has_pooling(source):
        return read_pooling(source)
    if not isinstance(config, EncoderConfig):
        return Pooling("lasttoken", normalized=False)
    return Pooling("mean" if config.head is None else "cls", normalized=False)


def _batches(asked: CalibrationOptions, source: Path, config: AnyConfig) -> Batches:
    return calibration_batches(
        asked.data, Tokenizer.from_dir(source), config.vocab_size,
        samples=asked.samples, seq_len=min(asked.seq_len, config.max_length), batch_size=asked.batch_size,
        seed=asked.seed, device=asked.device, holdout=asked.holdout,
    )  # fmt: skip


@torch.no_grad()
def _observe(job: EncoderJob) -> None:
    observer, batches = job.observer, job.batches.calibration
    for batch in job.stages.steps("observe", batches):
        with autocast(enabled=False, calibrating=True, recipe=observer.recipe), torch.enable_grad():
            hidden_states(job.model, batch.ids, batch.lengths)
        observer.end_batch()
    check(observer.seen, () if delayed(job.recipe) is None else observer.seen, len(batches))


def _write(job: EncoderJob, out: Path, quality: Closeness, layers: tuple[LayerReport, ...]) -> EmbeddingReport:
    found: list[EmbeddingReport] = []

    def extra(folder: Path) -> dict[str, str | bytes]:
        found.append(report_of(job, out, folder, quality, layers))
        return {"calibration.json": found[0].to_json() + "\n", "report.html": html_encoder_report(found[0])}

    rounded = {name: layer for name, layer in (job.rounded or {}).items() if name in job.linears}
    write_calibrated(
        out,
        job.source,
        _checkpoint(job),
        quantized={name: (layer.weight_q, layer.weight_scale_inv) for name, layer in rounded.items()},
        kept=[name for group in job.kept for name in group.names],
        format=job.asked.format,
        extra_files=extra,
        max_shard_bytes=job.asked.max_shard_bytes,
    )
    return found[0]


def _checkpoint(job: EncoderJob) -> ScalingCheckpoint:
    stored = stored_states(job.states, job.recipe)
    counts = {name: job.observer.seen[name].batches for name in stored}
    return ScalingCheckpoint(
        job.recipe,
        {name: TensorScale(state.scale.cpu(), state.amax_history.cpu()) for name, state in stored.items()},
        model=fingerprint(job.source),
        observations={"batches": len(job.batches.calibration), "tokens": job.batches.tokens, "tensors": counts},
        created_by=f"fp8serve {fp8serve.__version__} calibrate",
    )
