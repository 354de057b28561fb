"""A checkpoint as it is on disk: the tensors that can be read, their roles according to their names, and read errors.

Nothing is refused here. A file that cannot be read becomes a finding, and the others are still checked. The codes of an
FP8 weight are counted once: a table of 256 counts and each group's largest. A weight is read from the mapped file a few
million codes at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.spec import WEIGHTS, Granularity
from fp8serve.fp8.stateful import state_key
from fp8serve.model.formats import interop, microscaling
from fp8serve.model.formats.interop import Quantization, Role, ScaleKey
from fp8serve.model.formats.scales import FILE_NAME
from fp8serve.model.formats.torchao import plain_name, plain_names
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.shards import INDEX, SINGLE, Shards, StoredTensor, read_header
from fp8serve.model.transformers_backend.files import transpose_gpt2

Severity = Literal["error", "warning"]
_MAGNITUDE, _PART = 0x7F, 2**22
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
AGAIN = "download or write it again"
# For a stack of experts: the suffix of a scale's name, and what it scales.
_STACKED: dict[str, Role] = {"_activation_scale": "input", "_input_scale": "input", "_scale_inv": "weight",
                             "_scale": "weight"}  # fmt: skip
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "position_embeddings", "tok_embeddings",
               "token_type_embeddings")  # fmt: skip
_IGNORED = (".input_scale_ub",)  # a bound on the scales of tokens, which are computed dynamically


@dataclass(frozen=True)
class Finding:
    """severity "error": answers would be wrong if it were served like this, or a reader refuses it. check: the kind of
    finding, one word. tensor: its name, or that of a file or a key of config.json."""

    severity: Severity
    check: str
    tensor: str
    what: str  # follows the tensor's name: "holds the scale nan"
    do: str  # an imperative: "quantize the model again"

    @property
    def sentence(self) -> str:
        return f"{self.tensor} {self.what}; {self.do}."


def error(check: str, tensor: str, what: str, do: str) -> Finding:
    return Finding("error", check, tensor, what, do)


def warning(check: str, tensor: str, what: str, do: str) -> Finding:
    return Finding("warning", check, tensor, what, do)


@dataclass(frozen=True)
class Codes:
    """counts: how often each byte occurs, int64 [256]. largest: FP32, the largest magnitude in each group that shares a
    scale; NaN does not count."""

    counts: Tensor
    largest: Tensor
    values: Tensor  # FP32 [256], the value of each byte

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def num_nan(self) -> int:
        return int(self.counts[self.values.isnan()].sum())

    @property
    def rms(self) -> float:
        squares = self.values.double().square() * self.counts
        return float((squares[squares.isfinite()].sum() / max(self.total, 1)).sqrt())

    def at(self, magnitude: float) -> int:
        """The number of codes with this magnitude."""
        return int(self.counts[self.values.abs() == magnitude].sum())


def codes_of(stored: Tensor, kind: Granularity) -> Codes:
    """The statistics of an FP8 weight [N, K], or a stack of them, with one scale for each `kind`."""
    values = byte_values(stored.dtype)
    raw = stored.view(torch.uint8).flatten(0, -2)  # [experts * rows, columns]
    counts, rows = torch.zeros(256, dtype=torch.int64), []
    for part in _parts(raw):
        counts += torch.bincount(part.flatten(), minlength=256)
        if kind != "tensor":
            rows.append(_largest_of_rows(part, values, kind))
    if kind == "tensor" or not rows:
        seen = values.abs()[(counts > 0) & ~values.isnan()]
        return Codes(counts, seen.amax().reshape(1) if len(seen) else torch.zeros(1), values)
    largest = torch.cat(rows)
    if kind == "block128x128":
        in_rows = largest.reshape(-1, stored.shape[-2], largest.shape[-1]).transpose(-1, -2)
        largest = _blocked(in_rows).flatten()
    return Codes(counts, largest, values)


def _parts(raw: Tensor) -> Iterator[Tensor]:
    """Some rows at a time."""
    step = max(1, _PART // max(raw.shape[1], 1))
    return (raw[first : first + step] for first in range(0, len(raw), step))


def _largest_of_rows(raw: Tensor, values: Tensor, kind: Granularity) -> Tensor:
    """[rows] or, for blocks, [rows, blocks]."""
    magnitudes = torch.nan_to_num(values[: _MAGNITUDE + 1], nan=0.0)[(raw & _MAGNITUDE).long()]
    return magnitudes.amax(-1) if kind == "row" else _blocked(magnitudes)


def _blocked(values: Tensor, size: int = 128) -> Tensor:
    """The largest of every `size` along the last dimension; the last block may be smaller."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size))
    return padded.reshape(*values.shape[:-1], -1, size).amax(-1)


@cache
def byte_values(dtype: torch.dtype) -> Tensor:
    """FP32 [256]: the value of each byte in this FP8 type."""
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()


@dataclass
class Subject:
    """The checkpoint to check. config and weight_map are None where their files are missing or unreadable."""

    path: Path
    shards: Shards
    config: Mapping[str, Any] | None = None
    quantization: Quantization | None = None
    weight_map: Mapping[str, str] | None = None
    unread_format: Finding | None = None
    trouble: list[Finding] = field(default_factory=list)
    _codes: dict[str, Codes] = field(default_factory=dict)

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        return self.shards.entries

    @cached_property
    def weights(self) -> dict[str, str]:
        """The keys of weights in FP8, by the names of their owners; those in MX blocks are apart."""
        entries = {k: e for k, e in self.entries.items() if e.dtype in FP8 and len(e.shape) > 1 and k not in self.mx}
        return {key.removesuffix(".weight"): key for key in entries}

    @cached_property
    def mx(self) -> dict[str, str]:
        """The key of every MX weight's scales, by the key of the weight."""
        return microscaling.pairs(self.entries)

    @cached_property
    def scales(self) -> dict[ScaleKey, list[str]]:
        """The keys of all scales of known meaning; several where two spellings mean the same scale."""
        scales: dict[ScaleKey, list[str]] = {}
        for key in self.entries:
            if (place := self._place(key)) is not None:
                scales.setdefault(place, []).append(key)
        return scales

    @cached_property
    def unknown(self) -> list[str]:
        """Keys that are named like a scale, and of no known meaning."""
        return [key for key in self.entries if self._is_unknown(key)]

    def scale_of(self, owner: str, role: Role) -> str | None:
        return next(iter(self.scales.get(ScaleKey(owner, role), ())), None)

    def of_role(self, *roles: Role) -> Iterator[tuple[str, str]]:
        """(owner, key) of every scale in one of these roles."""
        return ((place.owner, key) for place, keys in self.scales.items() if place.role in roles for key in keys)

    def value(self, key: str) -> Tensor:
        """A scale in FP32, whatever it is stored in; exponents of MX blocks are powers of two."""
        stored = self.shards[key]
        exponents = key in self.mx.values() and stored.dtype is torch.uint8
        return (stored.view(torch.float8_e8m0fnu) if exponents else stored).float()

    def codes(self, owner: str) -> Codes:
        """The code statistics of an FP8 weight; counted once."""
        if owner not in self._codes:
            kind = self.granularity(owner) or "tensor"
            self._codes[owner] = codes_of(self.shards[self.weights[owner]], kind)
        return self._codes[owner]

    def granularity(self, owner: str) -> Granularity | None:
        """The part of this FP8 weight that shares a scale; None: it has no scale, or one whose shape fits nothing."""
        key = self.scale_of(owner, "weight")
        if key is None:
            return None
        return granularity(self.entries[key].shape, self.entries[self.weights[owner]].shape)

    def _place(self, key: str) -> ScaleKey | None:
        if self._is_unscaled(key):
            return None
        if key in self.mx.values():
            return ScaleKey(key.rpartition(".")[0], "weight")
        for suffix, role in _STACKED.items():
            stack = self.entries.get(key.removesuffix(suffix)) if key.endswith(suffix) else None
            if stack is not None and len(stack.shape) == 3:
                return ScaleKey(key.removesuffix(suffix), role)
        return _classified(key)[0]

    def _is_unknown(self, key: str) -> bool:
        return self._place(key) is None and not self._is_unscaled(key) and _classified(key)[1]

    def _is_unscaled(self, key: str) -> bool:
        """Whether it is not a scale despite its name: training state, gpt-oss' exponents, a bound."""
        blocks = f"{key.removesuffix('_scales')}_blocks"
        return state_key(key) is not None or key.endswith(_IGNORED) or blocks in self.entries


def _classified(key: str) -> tuple[ScaleKey | None, bool]:
    """(what it scales, whether it is named like a scale of unknown meaning)."""
    try:
        return interop.classify(key), False
    except ModelError:
        return None, True


def is_embedding(owner: str) -> bool:
    """Whether the matrix is a table of vectors by its name, which has no inputs to quantize."""
    return owner.rpartition(".")[2] in _EMBEDDINGS


def granularity(scale: tuple[int, ...], weight: tuple[int, ...]) -> Granularity | None:
    """The part of a weight [N, K], or of a stack of experts [E, N, K], that shares a scale of this shape; None: it fits
    nothing."""
    *stack, rows, columns = weight
    halves = [(*stack, 2, 1)] if stack else []  # gate and up, which are stored in one tensor
    if scale in ((), (1,), tuple(stack), (*stack, 1, 1), *halves):
        return "tensor"
    if scale[: len(stack)] != tuple(stack):
        return None
    for spec in WEIGHTS:
        if scale[len(stack) :] in interop.spellings_of(spec, spec.scale_shape(rows, columns)):
            return spec.granularity
    return None


def read(path: Path) -> Subject:
    """ModelError: there is nothing at `path` that could be a checkpoint."""
    if path.is_file():
        return _read_files(Subject(path, Shards({})), [path])
    if not path.is_dir():
        raise ModelError(f"There is no {path}; give a model directory or a .safetensors file.")
    subject = Subject(path, Shards({}))
    subject.config = _json(subject, "config.json")
    if subject.config is not None:
        subject.quantization = _quantization(subject, subject.config)
    index = _json(subject, INDEX)
    subject.weight_map = None if index is None else _weight_map(subject, index)
    files = _files(path, subject.weight_map)
    if not files:
        raise ModelError(f"{path} holds no .safetensors file; give a model directory or a .safetensors file.")
    return _read_files(subject, files)


def _files(folder: Path, weight_map: Mapping[str, str] | None) -> list[Path]:
    """The files that a reader takes for weights."""
    if weight_map is not None:
        return [folder / name for name in sorted(set(weight_map.values())) if name == Path(name).name]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    return [file for file in sorted(folder.glob("*.safetensors")) if file.name != FILE_NAME]


def _read_files(subject: Subject, files: list[Path]) -> Subject:
    entries: dict[str, StoredTensor] = {}
    for file in files:
        try:
            header = read_header(file)[0]
        except ModelError as damage:
            subject.trouble.append(_unreadable(file.name, damage))
            continue
        for key in sorted(header.keys() & entries.keys()):
            what = f"lies in {entries[key].file.name} and in {file.name}"
            subject.trouble.append(error("duplicate", key, what, "keep one of the two"))
        entries |= header
    subject.shards = transpose_gpt2(plain_names(Shards(entries)), subject.config or {})
    return subject


def _unreadable(name: str, damage: ModelError) -> Finding:
    return error("unreadable", name, f"cannot be read ({str(damage).removesuffix('.')})", AGAIN)


def _json(subject: Subject, name: str) -> Mapping[str, Any] | None:
    try:
        return read_json(subject.path / name) if present(subject.path / name) else None
    except ModelError as damage:
        subject.trouble.append(_unreadable(name, damage))
        return None


def _quantization(subject: Subject, config: Mapping[str, Any]) -> Quantization | None:
    """The configuration of the whole model or, inside a multimodal wrapper, of its language model."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) and not config.get("quantization_config") else {}
    try:
        return interop.read_quantization(subject.path, {**config, **inner})
    except ModelError as refusal:
        what = f"is of a format that cannot be judged ({str(refusal).removesuffix('.')})"
        subject.unread_format = error("format", "quantization_config", what, "write the model in another format")
        return None


def _weight_map(subject: Subject, index: Mapping[str, Any]) -> Mapping[str, str] | None:
    weight_map = index.get("weight_map")
    if isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values()):
        return {plain_name(key, weight_map): name for key, name in weight_map.items()}
    subject.trouble.append(error("index", INDEX, "has no weight_map from tensor names to files", AGAIN))
    return None
