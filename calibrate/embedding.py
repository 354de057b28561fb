"""calibrate, of an encoder: amaxes from whole texts, and what FP8 does to the directions of their vectors.

There are no next tokens, so no perplexity: each held-out text is embedded by both models, and the cosine of the two
vectors is what FP8 cost. An encoder is small, so it is run as a whole and not layer by layer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cosine_similarity

import fp8serve
from fp8serve.errors import RecipeError
from fp8serve.fp8.autocast import autocast
from fp8serve.fp8.linear import Linear, convert
from fp8serve.fp8.recipe import DelayedScaling, Recipe, delayed, to_json
from fp8serve.fp8.scaling import ScalingState
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, fingerprint, load_encoder, write_calibrated
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.network.pooling import Pooling, has_pooling, read_pooling
from fp8serve.model.text.tokenizer import Tokenizer

from .compare import freezer
from .data import Batch, Batches, calibration_batches, source_names
from .measure import LayerTally
from .observe import Observer, check, settle
from .options import CalibrationOptions
from .passes import in_fp8
from .progress import Progress, Stages
from .result import LayerReport, worst_first
from .words import decibels, size
from .written import stored_states, versions, weight_bytes

Linears = Mapping[str, Linear]
_TAKEN = ("data", "holdout", "samples", "seq_len", "batch_size", "seed", "device", "format", "max_shard_bytes")


@dataclass(frozen=True)
class Closeness:
    """Cosine of the vectors of the same text by two models."""

    texts: int
    median: float
    least: float

    @classmethod
    def of(cls, one: Tensor, other: Tensor) -> "Closeness":
        """Both [texts, dimensions]."""
        cosines = cosine_similarity(one.double(), other.double()).clamp(-1, 1)
        return cls(len(cosines), float(cosines.median()), float(cosines.min()))

    def text(self) -> str:
        return f"cosine to BF16 {self.median:.5f} in the median of {self.texts} texts, {self.least:.5f} at least"


@dataclass(frozen=True)
class EmbeddingReport:
    """What calibration.json holds of an encoder."""

    model: str
    out: str
    recipe: Mapping[str, Any]
    format: str
    device: str
    source: tuple[str, ...]
    samples: int
    tokens: int
    held_out_source: tuple[str, ...]
    quality: Closeness
    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int
    seconds: Mapping[str, float]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)


def calibrate_encoder(
    model_dir: Path | str,
    *,
    out: Path | str,
    recipe: Recipe | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> EmbeddingReport:
    """Calibrate the encoder in `model_dir` and write the FP8 directory `out`.

    options: fields of CalibrationOptions; RecipeError for one that is of language models only. Otherwise raises as
    `calibrate` does.
    """
    source, out, recipe = Path(model_dir), Path(out), recipe or DelayedScaling()
    asked = _checked(options)
    stages = Stages(progress)
    with stages.stage("load"):
        model = load_encoder(source, "bf16", device=asked.device).requires_grad_(False)
        convert(model)
        linears = {name: cast(Linear, model.get_submodule(name)) for name in model.linear_names()}
        batches = _batches(asked, source, model)
    observer = _observe(model, linears, batches.calibration, recipe, stages)
    states = settle(observer)
    pooling = read_pooling(source) if has_pooling(source) else Pooling("mean", normalized=False)
    quality, layers = _compare(model, linears, batches.held_out, recipe, states, pooling, stages)
    return _write(out, source, recipe, asked, batches, observer, states, quality, layers, stages)


def _checked(options: Mapping[str, Any]) -> CalibrationOptions:
    """RecipeError: an option other than its default that has no meaning here."""
    asked, usual = CalibrationOptions.of(dict(options)), CalibrationOptions.of({})
    for name, value in vars(asked).items():
        if name not in _TAKEN and value != getattr(usual, name):
            raise RecipeError(f"{name} is of language models, and this is an encoder; leave it out.")
    return asked


def _batches(asked: CalibrationOptions, source: Path, model: Encoder) -> Batches:
    config = model.config
    return calibration_batches(
        asked.data, Tokenizer.from_dir(source), config.vocab_size,
        samples=asked.samples, seq_len=min(asked.seq_len, config.max_length), batch_size=asked.batch_size,
        seed=asked.seed, device=asked.device, holdout=asked.holdout,
    )  # fmt: skip


@torch.no_grad()
def _observe(model: Encoder, linears: Linears, batches: Sequence[Batch], recipe: Recipe, stages: Stages) -> Observer:
    observer = Observer(linears, delayed(recipe) or DelayedScaling())
    for batch in stages.steps("observe", batches):
        with autocast(enabled=False, calibrating=True, recipe=observer.recipe), torch.enable_grad():
            model(batch.ids, batch.lengths)
        observer.end_batch()
    check(observer.seen, () if delayed(recipe) is None else observer.seen, len(batches))
    return observer


@torch.no_grad()
def _compare(
    model: Encoder,
    linears: Linears,
    batches: Sequence[Batch],
    recipe: Recipe,
    states: Mapping[str, ScalingState],
    pooling: Pooling,
    stages: Stages,
) -> tuple[Closeness, tuple[LayerReport, ...]]:
    """Both models on the held-out texts: as a whole, and linear by linear."""
    freeze = freezer(recipe, states)
    frozen = {name: freeze(name, linear) for name, linear in linears.items()}
    tallies = {name: LayerTally() for name in linears}
    for name, linear in linears.items():
        tallies[name].add_weight(linear.weight, frozen[name])
    for layer in frozen.values():
        layer.make_rows_independent()
    exact, got = [], []
    for batch in stages.steps("compare", batches):
        exact.append(pooling(model(batch.ids, batch.lengths), batch.lengths))
        with in_fp8(linears, lambda name, linear: frozen[name], tallies):
            got.append(pooling(model(batch.ids, batch.lengths), batch.lengths))
    reports = tuple(tally.report(name) for name, tally in tallies.items())
    return Closeness.of(torch.cat(exact), torch.cat(got)), reports


def _write(
    out: Path,
    source: Path,
    recipe: Recipe,
    asked: CalibrationOptions,
    batches: Batches,
    observer: Observer,
    states: Mapping[str, ScalingState],
    quality: Closeness,
    layers: tuple[LayerReport, ...],
    stages: Stages,
) -> EmbeddingReport:
    def report(folder: Path) -> EmbeddingReport:
        return EmbeddingReport(
            model=str(source),
            out=str(out),
            recipe=json.loads(to_json(recipe)),
            format=asked.format,
            device=asked.device,
            source=source_names(asked.data),
            samples=batches.samples,
            tokens=batches.tokens,
            held_out_source=source_names(asked.holdout),
            quality=quality,
            layers=layers,
            bytes_before=weight_bytes(source),
            bytes_after=weight_bytes(folder),
            seconds=stages.seconds | {"total": stages.total()},
            versions=versions(),
            notes=(quality.text().capitalize() + ".",),
        )

    found: list[EmbeddingReport] = []

    def extra(folder: Path) -> dict[str, str | bytes]:
        found.append(report(folder))
        return {"calibration.json": found[0].to_json() + "\n"}

    write_calibrated(
        out, source, _checkpoint(source, recipe, batches, observer, states),
        format=asked.format, extra_files=extra, max_shard_bytes=asked.max_shard_bytes,
    )  # fmt: skip
    return found[0]


def _checkpoint(
    source: Path, recipe: Recipe, batches: Batches, observer: Observer, states: Mapping[str, ScalingState]
) -> ScalingCheckpoint:
    stored = stored_states(states, recipe)
    counts = {name: observer.seen[name].batches for name in stored}
    return ScalingCheckpoint(
        recipe,
        {name: TensorScale(state.scale.cpu(), state.amax_history.cpu()) for name, state in stored.items()},
        model=fingerprint(source),
        observations={"batches": len(batches.calibration), "tokens": batches.tokens, "tensors": counts},
        created_by=f"fp8serve {fp8serve.__version__} calibrate",
    )


def embedding_table(report: EmbeddingReport, worst: int = 5) -> Table:
    """What the terminal shows after `fp8serve calibrate` of an encoder."""
    table = Table(title=f"Calibrated {report.model}", title_justify="left", show_header=False)
    table.add_row("cosine to BF16", f"{report.quality.median:.5f} median, {report.quality.least:.5f} at least")
    table.add_row("weights", f"{size(report.bytes_before)} -> {size(report.bytes_after)}")
    table.add_row("calibrated on", f"{report.tokens:,} tokens of {', '.join(report.source)}")
    for layer in worst_first(report.layers)[:worst]:
        table.add_row(layer.name, f"SQNR {decibels(layer.sqnr_db)}")
    table.add_row("written to", report.out)
    return table
