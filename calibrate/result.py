"""The result of a calibration or an evaluation: frozen dataclasses that become calibration.json, the page and the
table.

Units: amax in the tensor's own units, SQNR in dB, fractions 0..1, perplexity per token, KL in nats, bytes of weights as
stored. A figure that does not exist is None, never NaN. No torch here: a report can be read back and shown anywhere.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fp8serve.errors import DataError
from fp8serve.fp8.recipe import HeadDtype
from fp8serve.model.storage.files import MAX_JSON_BYTES, read_text
from fp8serve.options import rule

HISTORY_LENGTH = 64  # newest amaxes per tensor in the report; scales.safetensors holds the whole history

UNEVEN = 32.0  # times the median channel of an input


@dataclass(frozen=True)
class Quality:
    """Figures over all scored tokens. Reference figures are None where no reference model was given."""

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
    scale: float | None  # multiplies to quantize; None: the recipe computes it on the fly
    observations: int  # batches that recorded an amax
    history: tuple[float, ...]  # amax per batch, oldest first, the newest HISTORY_LENGTH
    limit: float | None = None  # the largest magnitude that the scale represents


@dataclass(frozen=True)
class CastReport:
    """A tensor on the grid of E4M3 (measure.py): an input on the held-out samples, or a weight. Fractions are of all
    elements."""

    sqnr_db: float | None  # None: no error, or only zeros
    headroom: (
        float | None
    )  # powers of two from the largest magnitude up to what the scale represents; negative: cut off
    zeros: float
    binades: tuple[float, ...]  # of the 16 exponents, upwards: subnormal, 2^-6 to 2^-5, ..., 2^8 and above
    at_top: float  # the format's largest value, cut off or rounded to it


@dataclass(frozen=True)
class ChannelReport:
    """The channel of an input that is farthest from the others (measure.py)."""

    channel: int
    size: float  # its largest magnitude on the held-out samples, as a multiple of the median channel's
    weights: float  # the same of the weights that read it

    @property
    def excess(self) -> float:
        """The factor by which it exceeds the size that its weights justify."""
        return self.size / self.weights


@dataclass(frozen=True)
class LayerReport:
    """One FP8 linear on the held-out samples."""

    name: str
    sqnr_db: float | None  # None: no error, or an output of zeros
    saturated: float  # fraction of input elements cut off, beyond the FP8 range
    rounded_to_top: float = 0.0  # within it, as the largest FP8 value
    underflowed: float = 0.0  # not zero, and zero in FP8
    kl: float | None = None  # nats per token that this layer's FP8 adds; see compare.py
    input: CastReport | None = None  # None: not in FP8
    weight: CastReport | None = None
    outlier: ChannelReport | None = None

    @property
    def headroom(self) -> float | None:
        """The headroom of the input; None where it has none."""
        return None if self.input is None else self.input.headroom


def worst_first(layers: Sequence[LayerReport]) -> tuple[LayerReport, ...]:
    """The layers by the KL divergence that each adds, or by SQNR where that is unknown; exact layers come last."""
    return tuple(sorted(layers, key=lambda x: (-(x.kl or 0.0), x.sqnr_db is None, x.sqnr_db or 0.0)))


def uneven_first(layers: Sequence[LayerReport]) -> tuple[LayerReport, ...]:
    """The layers with an input channel `UNEVEN` times as large as the median one, ordered by its excess."""
    results = [(x.outlier.excess, x) for x in layers if x.outlier is not None and x.outlier.size >= UNEVEN]
    return tuple(layer for _, layer in sorted(results, key=lambda pair: -pair[0]))


@dataclass(frozen=True)
class DataReport:
    """The data: `samples` of `source` made the scales, and quality was measured on others, from `held_out_source`.

    excluded: examples of `source` that were not observed because they are held out, too.
    """

    source: tuple[str, ...]
    samples: int
    seq_len: int
    batches: int
    tokens: int
    held_out_source: tuple[str, ...]
    held_out_samples: int
    held_out_tokens: int
    excluded: int
    seed: int
    documents: int = 0  # examples that the samples come from
    held_out_documents: int = 0


@dataclass(frozen=True)
class LinearGroup:
    """Linears of a layer that read one input and stay in high precision, or might."""

    names: tuple[str, ...]
    bytes: int  # bytes that FP8 would save
    kl: float | None  # nats per token that their FP8 would add; None where that was not measured
    cosine: float | None = None  # of an encoder's vectors with FP8 in these alone, the mean over texts


@dataclass(frozen=True)
class ExpertsReport:
    """A mixture of experts, such as `model.layers.0.mlp`: how many calibration tokens its router sent to each."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class SmoothingReport:
    """Pairs of a norm or linear and the linears that read it, between which channels were evened out (smoothing.py)."""

    alpha: float
    pairs: tuple[str, ...]  # names of the channels' producers for which the error of a layer's output became smaller
    tried: int


@dataclass(frozen=True)
class HealingReport:
    """Training of the FP8 model towards its output in high precision; KL on the held-out samples, nats per token."""

    steps: int
    learning_rate: float
    losses: tuple[float, ...]  # of every step, on the calibration samples
    kl_before: float | None
    kl_after: float | None

    @property
    def helped(self) -> bool:
        """Whether the healed weights are the ones that were written."""
        return self.kl_before is None or self.kl_after is None or self.kl_after < self.kl_before


@dataclass(frozen=True)
class GeneratedReport:
    """The continuations of a held-out prompt by both models, drawn with the same random numbers."""

    prompt: str  # with the marks of a chat template
    before: str  # in high precision
    after: str  # as written
    tokens: int  # tokens that each was asked for
    same_tokens: int  # number of equal tokens at the beginning


@dataclass(frozen=True)
class Origin:
    """How to repeat the run, and what differs each time."""

    command: str
    date: str  # ISO 8601, UTC
    machine: str


@dataclass(frozen=True)
class CalibrationReport:
    """Everything that calibration.json holds."""

    model: str
    out: str
    recipe: Mapping[str, Any]  # the recipe's JSON
    format: str
    device: str
    data: DataReport
    quality: Quality  # of the FP8 model; reference_* is the high-precision model before
    layers: tuple[LayerReport, ...]
    tensors: tuple[TensorReport, ...]
    bytes_before: int  # weights in the source directory
    bytes_after: int  # weights as FP8 and scales, rest as before
    seconds: Mapping[str, float]  # per stage, and "total"
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()  # sentences about anything unexpected
    rounding: str = "nearest"  # of weights
    smoothing: SmoothingReport | None = None
    healing: HealingReport | None = None
    kept: tuple[LinearGroup, ...] = ()  # what stays in high precision
    generated: tuple[GeneratedReport, ...] = ()
    experts: tuple[ExpertsReport, ...] = ()
    made: Origin | None = None

    @property
    def worst_layers(self) -> tuple[LayerReport, ...]:
        """The layers, most expensive first."""
        return worst_first(self.layers)

    def tensor(self, name: str) -> TensorReport | None:
        return next((t for t in self.tensors if t.name == name), None)

    def to_json(self) -> str:
        """JSON with one line per field, layer and tensor; NaN is refused, because it is not JSON."""
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_line(value)}" for key, value in asdict(self).items()) + "\n}"

    @classmethod
    def from_json(cls, text: str) -> "CalibrationReport":
        """The inverse of `to_json`. DataError: not a calibration report."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise DataError(f"This is not a calibration report: {rule(where, first)}.") from None


def read_report(folder: Path) -> CalibrationReport:
    """The report in a calibrated directory. DataError: there is none, or it cannot be read."""
    file = folder / "calibration.json"
    if not file.is_file():
        raise DataError(f"{folder} holds no calibration.json; only `fp8serve calibrate` writes one.")
    return CalibrationReport.from_json(read_text(file, MAX_JSON_BYTES, DataError))


def _line(value: Any) -> str:
    """A list of objects gets a line for each; anything else is one line."""
    if isinstance(value, tuple) and value:
        return "[\n " + ",\n ".join(_line(item) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True)
class EvalReport:
    """What `fp8serve eval` prints."""

    model: str
    against: str | None
    recipe: str
    source: tuple[str, ...]
    samples: int
    seq_len: int
    quality: Quality
    layers: tuple[LayerReport, ...]  # empty without a reference
    seconds: float
    notes: tuple[str, ...] = ()  # sentences about anything unexpected
    documents: int = 0  # examples that the samples come from
    tokens: int = 0  # read; those that were scored are `quality.tokens`
    made: Origin | None = None
    head_dtype: HeadDtype = "bf16"

    @property
    def runs_as(self) -> str:
        """The recipe, and how the head differs from the directory's."""
        return self.recipe if self.head_dtype == "bf16" else f"{self.recipe}, head in {self.head_dtype.upper()}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False, ensure_ascii=False)
