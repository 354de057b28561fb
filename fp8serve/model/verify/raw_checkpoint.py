"""Reads a checkpoint for the checks: its tensors, what each scale belongs to, and the errors of reading.

A file that cannot be read becomes a finding, so that the checks still see the other files. The codes of an FP8 weight
are read once, a few million at a time. The result has the count of each of the 256 codes, and the largest magnitude in
each part that has its own scale.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.arithmetic import BLOCK, MX_BLOCK
from fp8serve.fp8.spec import MXFP4, MXFP8, NVFP4, Granularity, QuantSpec, weight_specs
from fp8serve.fp8.stateful import state_key
from fp8serve.model.formats import int4, interop, microscaling
from fp8serve.model.formats.interop import Quantization, Role, ScaleKey
from fp8serve.model.formats.scales import FILE_NAME
from fp8serve.model.formats.torchao import canonical_name, with_canonical_names
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.shards import SAFE_WEIGHTS, SAFE_WEIGHTS_INDEX, Shards, StoredTensor, read_header
from fp8serve.model.transformers_backend.files import transpose_gpt2

Severity = Literal["error", "warning"]
_MAGNITUDE_BITS = 0x7F
_CODES_PER_STEP = 2**22
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WRITE_AGAIN = "download or write it again"
# The suffixes of the scales of stacked experts, and what they scale.
_STACK_SUFFIXES: dict[str, Role] = {"_activation_scale": "input", "_input_scale": "input", "_scale_inv": "weight",
                                    "_scale": "weight"}  # fmt: skip
STACK_SUFFIX = "_blocks"  # of the codes of gpt-oss' stacked experts, [E, N, K / 32, 16]
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "position_embeddings", "tok_embeddings",
               "token_type_embeddings")  # fmt: skip
_NOT_SCALES = (".input_scale_ub",)  # a limit of dynamic scales


@dataclass(frozen=True)
class Finding:
    """A problem of a checkpoint. It is an error if the model would give wrong answers, or if a reader refuses it."""

    severity: Severity
    check: str  # the kind of problem in one word
    tensor: str  # the name of a tensor, of a file, or of a key of config.json
    what: str  # the problem, which follows the tensor's name: "holds the scale nan"
    do: str  # the remedy: "quantize the model again"

    @property
    def sentence(self) -> str:
        return f"{self.tensor} {self.what}; {self.do}."


def error(check: str, tensor: str, what: str, do: str) -> Finding:
    return Finding("error", check, tensor, what, do)


def warning(check: str, tensor: str, what: str, do: str) -> Finding:
    return Finding("warning", check, tensor, what, do)


@dataclass(frozen=True)
class Codes:
    """Statistics of the codes of an FP8 weight."""

    counts: Tensor  # int64 [256], the number of codes with each byte
    largest: Tensor  # FP32, the largest magnitude in each part that has its own scale, without NaN
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

    def count(self, magnitude: float) -> int:
        """Returns the number of codes with this magnitude."""
        return int(self.counts[self.values.abs() == magnitude].sum())


def count_codes(stored: Tensor, kind: Granularity) -> Codes:
    """Returns the statistics of an FP8 weight [N, K], or a stack of weights, with scales of this granularity."""
    values = byte_values(stored.dtype)
    raw = stored.view(torch.uint8).flatten(0, -2)  # [experts * rows, columns]
    counts, rows = torch.zeros(256, dtype=torch.int64), []
    step = max(1, _CODES_PER_STEP // max(raw.shape[1], 1))
    for part in (raw[start : start + step] for start in range(0, len(raw), step)):
        counts += torch.bincount(part.flatten(), minlength=256)
        if kind != "tensor":
            magnitudes = values[: _MAGNITUDE_BITS + 1].nan_to_num(0.0)[(part & _MAGNITUDE_BITS).long()]
            size = MX_BLOCK if kind == MXFP8.granularity else BLOCK
            rows.append(magnitudes.amax(-1) if kind == "row" else _largest_per_block(magnitudes, size))
    if kind == "tensor" or not rows:
        magnitudes = values.abs()[(counts > 0) & ~values.isnan()]
        return Codes(counts, magnitudes.amax().reshape(1) if len(magnitudes) else torch.zeros(1), values)
    largest = torch.cat(rows)
    if kind == "block128x128":
        per_row = largest.reshape(-1, stored.shape[-2], largest.shape[-1]).transpose(-1, -2)
        largest = _largest_per_block(per_row, BLOCK).flatten()
    return Codes(counts, largest, values)


def _largest_per_block(values: Tensor, size: int) -> Tensor:
    """Returns the largest value of each block of `size` in the last dimension. The last block may be smaller."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size))
    return padded.reshape(*values.shape[:-1], -1, size).amax(-1)


@cache
def byte_values(dtype: torch.dtype) -> Tensor:
    """Returns the value of each byte in this FP8 type, FP32 [256]."""
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()


@dataclass(frozen=True)
class PackedWeight:
    """A weight of 4 bits: the key of its codes, and NVFP4 or MXFP4 by the type and shape of its scales."""

    key: str
    spec: QuantSpec


@dataclass
class RawCheckpoint:
    """The parts of a checkpoint that can be read, and the errors of the others."""

    path: Path
    shards: Shards
    config: Mapping[str, Any] | None = None  # None if config.json is missing or unreadable
    quantization: Quantization | None = None
    weight_map: Mapping[str, str] | None = None  # of the index; None if it is missing or unreadable
    format_error: Finding | None = None  # the quantization format is not supported
    read_errors: list[Finding] = field(default_factory=list)
    _codes: dict[str, Codes] = field(default_factory=dict)

    @property
    def entries(self) -> Mapping[str, StoredTensor]:
        return self.shards.entries

    @cached_property
    def weights(self) -> dict[str, str]:
        """The keys of FP8 weights by the names of their modules."""
        matrices = (key for key, entry in self.entries.items() if entry.dtype in FP8 and len(entry.shape) > 1)
        return {key.removesuffix(".weight"): key for key in matrices if self._scale_key(key) is None}

    @cached_property
    def packed(self) -> dict[str, PackedWeight]:
        """The weights of 4 bits by the names of their modules, or of the stacks of gpt-oss' experts."""
        result: dict[str, PackedWeight] = {}
        for key in filter(self.is_4bit_name, self.entries):
            owner = owner_of_codes(key)
            scale = self.scale_of(owner, "weight")
            if key in self.mx_scales:
                result[owner] = PackedWeight(key, MXFP4)
            elif scale is not None and self._fits_nvfp4(key, scale):
                result[owner] = PackedWeight(key, NVFP4)
        return result

    @cached_property
    def int4_owners(self) -> frozenset[str]:
        """The names of the modules with weights in INT4."""
        keys = (key for key, entry in self.entries.items() if int4.is_packed_int4(key, entry))
        return frozenset(key.removesuffix(int4.PACKED) for key in keys)

    def is_4bit_name(self, key: str) -> bool:
        """Returns whether the tensor has the name, type and number of dimensions of a weight of 4 bits."""
        entry = self.entries[key]
        names = {2: (".weight", ".weight_packed"), 4: (STACK_SUFFIX,)}.get(len(entry.shape), ())
        return entry.dtype is torch.uint8 and key.endswith(names)

    @cached_property
    def mx_scales(self) -> dict[str, str]:
        """The key of every MX weight's scales, by the key of the weight."""
        return microscaling.find_mx_scales(self.entries) | self._stack_scales

    def _fits_nvfp4(self, key: str, scale: str) -> bool:
        shape, entry = self.entries[key].shape, self.entries[scale]
        if entry.dtype is not torch.float8_e4m3fn or len(shape) != 2:
            return False
        rows, columns = shape[0], 2 * shape[1]
        return NVFP4.divides(rows, columns) and entry.shape == NVFP4.scale_shape(rows, columns)

    @cached_property
    def _stack_scales(self) -> dict[str, str]:
        """The key of the scales of gpt-oss' stacks of blocks, by the key of the stack."""
        stacks = [key for key in self.entries if key.endswith(STACK_SUFFIX) and self.is_4bit_name(key)]
        scales = {key: f"{key.removesuffix(STACK_SUFFIX)}_scales" for key in stacks}
        return {key: scale for key, scale in scales.items() if scale in self.entries and self._fits_stack(key, scale)}

    def _fits_stack(self, key: str, scale: str) -> bool:
        shape, entry = self.entries[key].shape, self.entries[scale]
        return entry.dtype in microscaling.EXPONENT_DTYPES and shape == (*entry.shape, MX_BLOCK // 2)

    @cached_property
    def mx_scale_keys(self) -> frozenset[str]:
        return frozenset(self.mx_scales.values())

    @cached_property
    def scales(self) -> dict[ScaleKey, list[str]]:
        """The keys of all known scales. If the checkpoint spells one scale in two ways, it has two keys."""
        scales: dict[ScaleKey, list[str]] = {}
        for key in self.entries:
            if (scale_key := self._scale_key(key)) is not None:
                scales.setdefault(scale_key, []).append(key)
        return scales

    @property
    def scale_keys(self) -> list[str]:
        return [key for keys in self.scales.values() for key in keys]

    @cached_property
    def unknown(self) -> list[str]:
        """The keys that are named like a scale and have no known meaning."""
        return [key for key in self.entries if not self._scale_key(key) and not self._is_not_scale(key)
                and _parse_key(key)[1]]  # fmt: skip

    def scale_of(self, owner: str, role: Role) -> str | None:
        return next(iter(self.scales.get(ScaleKey(owner, role), ())), None)

    def with_role(self, *roles: Role) -> Iterator[tuple[str, str]]:
        """Yields (owner, key) of every scale with one of these roles."""
        return ((scale.owner, key) for scale, keys in self.scales.items() if scale.role in roles for key in keys)

    def value(self, key: str) -> Tensor:
        """Returns a scale in FP32. Exponents of MX blocks become powers of two."""
        stored = self.shards[key]
        is_exponent = key in self.mx_scale_keys and stored.dtype is torch.uint8
        return (stored.view(torch.float8_e8m0fnu) if is_exponent else stored).float()

    def codes(self, owner: str) -> Codes:
        """Returns the statistics of an FP8 weight's codes, which are counted once."""
        if owner not in self._codes:
            kind = self.granularity(owner) or "tensor"
            self._codes[owner] = count_codes(self.shards[self.weights[owner]], kind)
        return self._codes[owner]

    def granularity(self, owner: str) -> Granularity | None:
        """Returns the granularity of this FP8 weight's scales, or None if it has no scale or one with a wrong shape."""
        key = self.scale_of(owner, "weight")
        if key is None:
            return None
        if self.weights[owner] in self.mx_scales:
            return MXFP8.granularity
        return granularity(self.entries[key].shape, self.entries[self.weights[owner]].shape)

    def _scale_key(self, key: str) -> ScaleKey | None:
        if key.endswith("_scales") and f"{key.removesuffix('_scales')}{STACK_SUFFIX}" in self.entries:
            return ScaleKey(key.removesuffix("_scales"), "weight")
        if self._is_not_scale(key):
            return None
        if key in self.mx_scale_keys:
            return ScaleKey(key.rpartition(".")[0], "weight")
        for suffix, role in _STACK_SUFFIXES.items():
            stack = self.entries.get(key.removesuffix(suffix)) if key.endswith(suffix) else None
            if stack is not None and len(stack.shape) == 3:
                return ScaleKey(key.removesuffix(suffix), role)
        return _parse_key(key)[0]

    def _is_not_scale(self, key: str) -> bool:
        """Returns whether the tensor is no scale despite its name: training state, a limit, or a zero point of INT4."""
        owner, _, leaf = key.rpartition(".")
        is_zero_point = leaf == "weight_zero_point" and owner in self.int4_owners
        return state_key(key) is not None or key.endswith(_NOT_SCALES) or is_zero_point


def owner_of_codes(key: str) -> str:
    """Returns the name of the module, or of the stack of experts, whose 4-bit codes this tensor holds."""
    return key.removesuffix(STACK_SUFFIX) if key.endswith(STACK_SUFFIX) else key.rpartition(".")[0]


def _parse_key(key: str) -> tuple[ScaleKey | None, bool]:
    """Returns what the tensor scales, and whether it is named like a scale of unknown meaning."""
    try:
        return interop.parse_scale_key(key), False
    except ModelError:
        return None, True


def is_embedding(owner: str) -> bool:
    """Returns whether the matrix is an embedding by its name. Embeddings have no inputs to quantize."""
    return owner.rpartition(".")[2] in _EMBEDDINGS


def granularity(scale: tuple[int, ...], weight: tuple[int, ...]) -> Granularity | None:
    """Returns the granularity of scales with this shape, for a weight [N, K] or a stack of experts [E, N, K].

    Returns None if the shape of the scales fits no granularity.
    """
    *stack, rows, columns = weight
    scale_pairs = [(*stack, 2, 1)] if stack else []  # for gate and up in one tensor
    if scale in ((), (1,), tuple(stack), (*stack, 1, 1), *scale_pairs):
        return "tensor"
    if scale[: len(stack)] != tuple(stack):
        return None
    for spec in weight_specs(is_mx=False):
        if scale[len(stack) :] in interop.equivalent_shapes(spec, spec.scale_shape(rows, columns)):
            return spec.granularity
    return None


def read(path: Path) -> RawCheckpoint:
    """Returns the checkpoint at `path`. Raises ModelError if there is none."""
    if path.is_file():
        return _read_files(RawCheckpoint(path, Shards({})), [path])
    if not path.is_dir():
        raise ModelError(f"There is no {path}; give a model directory or a .safetensors file.")
    checkpoint = RawCheckpoint(path, Shards({}))
    checkpoint.config = _json(checkpoint, "config.json")
    if checkpoint.config is not None:
        checkpoint.quantization = _quantization(checkpoint, checkpoint.config)
    index = _json(checkpoint, SAFE_WEIGHTS_INDEX)
    checkpoint.weight_map = None if index is None else _weight_map(checkpoint, index)
    files = _files(path, checkpoint.weight_map)
    if not files:
        raise ModelError(f"{path} holds no .safetensors file; give a model directory or a .safetensors file.")
    return _read_files(checkpoint, files)


def _files(folder: Path, weight_map: Mapping[str, str] | None) -> list[Path]:
    """Returns the files with weights, as a reader of the checkpoint finds them."""
    if weight_map is not None:
        return [folder / name for name in sorted(set(weight_map.values())) if name == Path(name).name]
    if (folder / SAFE_WEIGHTS).is_file():
        return [folder / SAFE_WEIGHTS]
    return [file for file in sorted(folder.glob("*.safetensors")) if file.name != FILE_NAME]


def _read_files(checkpoint: RawCheckpoint, files: list[Path]) -> RawCheckpoint:
    entries: dict[str, StoredTensor] = {}
    for file in files:
        try:
            header = read_header(file)[0]
        except ModelError as exception:
            checkpoint.read_errors.append(_unreadable(file.name, exception))
            continue
        for key in sorted(header.keys() & entries.keys()):
            what = f"lies in {entries[key].file.name} and in {file.name}"
            checkpoint.read_errors.append(error("duplicate", key, what, "keep one of the two"))
        entries |= header
    checkpoint.shards = transpose_gpt2(with_canonical_names(Shards(entries)), checkpoint.config or {})
    return checkpoint


def _unreadable(name: str, exception: ModelError) -> Finding:
    return error("unreadable", name, f"cannot be read ({str(exception).removesuffix('.')})", WRITE_AGAIN)


def _json(checkpoint: RawCheckpoint, name: str) -> Mapping[str, Any] | None:
    try:
        return read_json(checkpoint.path / name) if present(checkpoint.path / name) else None
    except ModelError as exception:
        checkpoint.read_errors.append(_unreadable(name, exception))
        return None


def _quantization(checkpoint: RawCheckpoint, config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantization of the model or, in a multimodal model, of its language model."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) and not config.get("quantization_config") else {}
    try:
        return interop.read_quantization(checkpoint.path, {**config, **inner})
    except ModelError as exception:
        what = f"is of a format that cannot be judged ({str(exception).removesuffix('.')})"
        checkpoint.format_error = error("format", "quantization_config", what, "write the model in another format")
        return None


def _weight_map(checkpoint: RawCheckpoint, index: Mapping[str, Any]) -> Mapping[str, str] | None:
    weight_map = index.get("weight_map")
    if isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values()):
        return {canonical_name(key, weight_map): name for key, name in weight_map.items()}
    checkpoint.read_errors.append(
        error("index", SAFE_WEIGHTS_INDEX, "has no weight_map from tensor names to files", WRITE_AGAIN)
    )
    return None
