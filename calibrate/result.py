"""The results of a calibration or an evaluation: frozen dataclasses from which calibration.json, the HTML page and the
terminal's table are made.

Units: an amax is in the units of its tensor, SQNR in dB, fractions from 0 to 1, perplexity per token, KL divergence in
nats, and sizes of weights in bytes as stored. A figure that does not exist is None, never NaN. This module does not
import torch, so that a report can be read anywhere.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from fp8serve.errors import DataError
from fp8serve.fp8.recipe import HeadDtype
from fp8serve.model.storage.files import MAX_JSON_BYTES, read_text
from fp8serve.options import describe_violation

HISTORY_LENGTH = 64  # amaxes per tensor in the report, the most recent ones; scales.safetensors has whole histories
MIN_OUTLIER_RATIO = 32.0  # a channel is an outlier if it is this many times as large as the median channel


def list_names(names: Sequence[str]) -> str:
    """Returns the first three names, and the number of the other names."""
    others = len(names) - 3
    return ", ".join(names[:3]) + (f" and {others} more" if others > 0 else "")


@dataclass(frozen=True)
class Quality:
    """The quality of a model over all scored tokens. Figures that need a reference model are None without one."""

    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    kl_divergence: float | None = None  # KL(reference || model), nats per token
    top1_agreement: float | None = None  # fraction of tokens whose most likely next token is the same


@dataclass(frozen=True)
class TensorReport:
    """One quantized tensor, such as `model.layers.0.self_attn.q_proj.input`."""

    name: str
    amax: float  # running maximum over all batches
    scale: float | None  # q = cast(x * scale); None if the recipe computes scales while serving
    observations: int  # batches that recorded an amax
    history: tuple[float, ...]  # amaxes of the last HISTORY_LENGTH batches, oldest first
    limit: float | None = None  # the largest magnitude that the scale can represent


@dataclass(frozen=True)
class CastReport:
    """Statistics of an input's cast to E4M3 on the held-out samples, or of a weight's cast (measure.py).

    `zeros`, `binades` and `at_top` are fractions of all elements.
    """

    sqnr_db: float | None  # None if there is no error, or only zeros
    # log2(largest representable magnitude / largest magnitude that occurred); negative if values saturated
    headroom: float | None
    zeros: float
    # by exponent, ascending: subnormal, 2^-6 to 2^-5, ..., 2^8 and above; of a weight of 4 bits: 0.5, 1 to 2, 2 to 4, 4
    # and above
    binades: tuple[float, ...]
    at_top: float  # elements that became the largest value of the format


@dataclass(frozen=True)
class ChannelReport:
    """The channel of an input that is the largest outlier (measure.py)."""

    channel: int
    size: float  # the channel's largest magnitude on the held-out samples, divided by that of the median channel
    weights: float  # the largest magnitude of the weight's column, divided by that of the median column

    @property
    def excess(self) -> float:
        """The factor by which the channel is larger than its weights justify."""
        return self.size / self.weights


@dataclass(frozen=True)
class LayerReport:
    """Statistics of one quantized linear on the held-out samples.

    `saturated`, `rounded_to_top` and `underflowed` are fractions of the input's elements.
    """

    name: str
    sqnr_db: float | None  # of the output; None if there is no error, or if the output is zero
    saturated: float  # beyond the range of FP8
    rounded_to_top: float = 0.0  # within the range, and rounded to its largest value
    underflowed: float = 0.0  # nonzero values that became zero
    kl: float | None = None  # nats per token that quantizing this layer adds (compare.py)
    input: CastReport | None = None  # None if the input is not in FP8
    weight: CastReport | None = None
    outlier: ChannelReport | None = None

    @property
    def headroom(self) -> float | None:
        return None if self.input is None else self.input.headroom


def by_cost(layers: Sequence[LayerReport]) -> tuple[LayerReport, ...]:
    """Sorts layers by the KL divergence that each adds, largest first, then by SQNR; exact layers come last."""
    return tuple(sorted(layers, key=lambda x: (-(x.kl or 0.0), x.sqnr_db is None, x.sqnr_db or 0.0)))


def with_outliers(layers: Sequence[LayerReport]) -> tuple[LayerReport, ...]:
    """Returns the layers that have an outlier channel in their input, sorted by the excess of the channel."""
    outliers = [(x.outlier.excess, x) for x in layers if x.outlier is not None and x.outlier.size >= MIN_OUTLIER_RATIO]
    return tuple(layer for _, layer in sorted(outliers, key=lambda pair: -pair[0]))


@dataclass(frozen=True)
class DataReport:
    """The calibration samples, from `source`, and the held-out samples that measure quality, from `held_out_source`."""

    source: tuple[str, ...]
    samples: int
    seq_len: int
    batches: int
    tokens: int
    held_out_source: tuple[str, ...]
    held_out_samples: int
    held_out_tokens: int
    excluded: int  # examples of `source` that are held out and therefore not calibrated on
    seed: int
    documents: int = 0  # number of examples from which the samples were taken
    held_out_documents: int = 0


@dataclass(frozen=True)
class LinearGroup:
    """Linears of a layer that read the same input, and so become FP8 or stay in high precision together."""

    names: tuple[str, ...]
    bytes: int  # bytes that FP8 saves
    kl: float | None  # nats per token that FP8 in this group adds; None if not measured
    cosine: float | None = None  # mean over texts of an encoder's cosine to BF16, with FP8 in this group only


@dataclass(frozen=True)
class ExpertsReport:
    """The number of calibration tokens that a mixture, such as `model.layers.0.mlp`, routed to each expert."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class SmoothingReport:
    """The result of smoothing (smoothing.py)."""

    alpha: float
    pairs: tuple[str, ...]  # the norms and linears with smoothed output channels, by name
    tried: int  # number of pairs for which smoothing was tried


@dataclass(frozen=True)
class HealingReport:
    """The result of healing (healing.py); `kl_before` and `kl_after` are nats per token on the held-out samples."""

    steps: int
    learning_rate: float
    losses: tuple[float, ...]  # one for each step, on the calibration samples
    kl_before: float | None
    kl_after: float | None

    @property
    def is_improvement(self) -> bool:
        """Whether the healed weights were written, because they have a lower KL divergence."""
        return self.kl_before is None or self.kl_after is None or self.kl_after < self.kl_before


@dataclass(frozen=True)
class GeneratedReport:
    """A held-out prompt and its continuation by both models, sampled with the same random numbers."""

    prompt: str  # with the special tokens of a chat template
    before: str  # by the model in high precision
    after: str  # by the written model
    tokens: int  # number of tokens requested from each model
    same_tokens: int  # number of tokens before the first difference


@dataclass(frozen=True)
class Origin:
    """The command of a run, its date and its machine."""

    command: str
    date: str  # ISO 8601, UTC
    machine: str


@dataclass(frozen=True, kw_only=True)
class BaseCalibrationReport:
    """The contents of calibration.json for models of both kinds: those that generate text, and those that embed."""

    model: str
    out: str
    recipe: Mapping[str, Any]  # the recipe's JSON
    format: str
    device: str
    bytes_before: int  # weights in the source directory
    bytes_after: int  # quantized weights, scales and the weights that stay in high precision
    seconds: Mapping[str, float]  # per stage, and "total"
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()  # sentences about unexpected facts
    rounding: str = "nearest"  # how weights were rounded
    # "kept" and "made" are the names in files from before 2026-11-27
    in_bf16: Annotated[tuple[LinearGroup, ...], Field(validation_alias=AliasChoices("in_bf16", "kept"))] = ()
    origin: Annotated[Origin | None, Field(validation_alias=AliasChoices("origin", "made"))] = None

    def to_json(self) -> str:
        """Returns JSON with one line per field, layer and tensor. Raises ValueError for NaN."""
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_line(value)}" for key, value in asdict(self).items()) + "\n}"


@dataclass(frozen=True, kw_only=True)
class CalibrationReport(BaseCalibrationReport):
    """The contents of calibration.json for a model that generates text."""

    data: DataReport
    quality: Quality  # of the quantized model, with the model in high precision as its reference
    layers: tuple[LayerReport, ...]
    tensors: tuple[TensorReport, ...]
    smoothing: SmoothingReport | None = None
    healing: HealingReport | None = None
    generated: tuple[GeneratedReport, ...] = ()
    experts: tuple[ExpertsReport, ...] = ()

    @property
    def worst_layers(self) -> tuple[LayerReport, ...]:
        """The layers by the KL divergence that each adds, largest first."""
        return by_cost(self.layers)

    def tensor(self, name: str) -> TensorReport | None:
        return next((t for t in self.tensors if t.name == name), None)

    @classmethod
    def from_json(cls, text: str) -> "CalibrationReport":
        """Reads the result of `to_json`. Raises DataError if `text` is not a calibration report."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise DataError(f"This is not a calibration report: {describe_violation(where, first)}.") from None


def read_report(folder: Path) -> CalibrationReport:
    """Reads the report in a calibrated directory. Raises DataError if there is none, or if it cannot be read."""
    file = folder / "calibration.json"
    if not file.is_file():
        raise DataError(f"{folder} holds no calibration.json; only `fp8serve calibrate` writes one.")
    return CalibrationReport.from_json(read_text(file, MAX_JSON_BYTES, DataError))


def _line(value: Any) -> str:
    """Returns JSON with a line for each item of a tuple; any other value is one line."""
    if isinstance(value, tuple) and value:
        return "[\n " + ",\n ".join(_line(item) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class BaseEvalReport:
    """The output of `fp8serve eval` for models of both kinds. `layers` is empty without a reference."""

    model: str
    against: str | None
    recipe: str
    source: tuple[str, ...]
    samples: int
    documents: int = 0  # number of examples from which the samples were taken
    seq_len: int
    tokens: int = 0  # tokens read
    layers: tuple[LayerReport, ...]
    seconds: float
    notes: tuple[str, ...] = ()  # sentences about unexpected facts
    origin: Origin | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class EvalReport(BaseEvalReport):
    """The output of `fp8serve eval` for a language model. `quality.tokens` counts the scored tokens."""

    quality: Quality
    head_dtype: HeadDtype = "bf16"

    @property
    def runs_as(self) -> str:
        """The recipe, and the precision of the head if it is not BF16."""
        return self.recipe if self.head_dtype == "bf16" else f"{self.recipe}, head in {self.head_dtype.upper()}"
