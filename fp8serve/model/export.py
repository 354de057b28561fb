"""Writes a model directory atomically, in high precision or in one of three formats of FP8 and 4-bit weights.

Weights are streamed. Their sizes follow from shapes, so each shard's header is written first, and then one tensor after
another at its offset. At most one tensor is in memory in both precisions, and pages of the source's file are released.
Tensors whose size is a multiple of 64 bytes come first and the header is padded to 64 bytes, so that every weight
matrix is aligned for kernels that read the mapped file.

All scales are written in FP32 as dequantizing scales, as the formats require. If the reciprocal of a written scale
differs from the quantizing scale, the file's metadata hold the quantizing scale under the tensor's name.
`scales.safetensors` holds the exact quantizing scales and their amax histories.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from fp8serve.errors import ModelError, ScalesError
from fp8serve.fp8 import ops
from fp8serve.fp8.casting import SCALE_DTYPES, QuantizedWeight, cast_weight
from fp8serve.fp8.layer_inputs import check_whole_blocks
from fp8serve.fp8.ops.arithmetic import is_finite
from fp8serve.fp8.ops.e2m1 import E2M1_MAX
from fp8serve.fp8.spec import QuantSpec
from fp8serve.model.building import build_any_on_meta, transposed_linears
from fp8serve.model.config.decoder import is_classifier, parse_any_config
from fp8serve.model.config.encoder import is_encoder
from fp8serve.model.config.mixture import needs_fp32
from fp8serve.model.config.model_config import AnyConfig
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.formats import FORMATS
from fp8serve.model.formats.interop import ENCODING_GLOBAL, to_dequantizing_scale
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, check_covers, fingerprint, save_scales
from fp8serve.model.network.experts import router_names
from fp8serve.model.storage.files import (
    atomic_directory,
    check_absent,
    check_writable,
    copied_files,
    encode_nonfinite,
    read_json,
    write_json,
)
from fp8serve.model.storage.mapping import release_pages
from fp8serve.model.storage.opening import is_regular_file
from fp8serve.model.storage.shards import DTYPES, SAFE_WEIGHTS, write_index
from fp8serve.model.stored_checkpoint import StoredLinear, open_checkpoint

__all__ = ["FORMATS", "write_calibrated", "write_hf_directory"]

MAX_SHARD_BYTES = 5 * 2**30
ALIGNMENT = 64
ExtraFiles = Mapping[str, str | bytes] | Callable[[Path], Mapping[str, str | bytes]]


@dataclass(frozen=True)
class _Item:
    """One tensor to write; `make` computes its values when the file is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    note: str | None = None  # for the file's metadata, under the tensor's name
    from_file: bool = False  # a read-only view of a mapped file, whose pages are released after writing

    @property
    def size(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]


def write_hf_directory(
    out: Path | str,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    copy_files_from: Path | str | None = None,
    extra_files: ExtraFiles | None = None,
) -> None:
    """Writes a high-precision Hugging Face directory with `config` as config.json and `weights` in its dtype.

    Args:
        weights: tensors by parameter name; names that the architecture does not have are ignored
        copy_files_from: directory whose tokenizer and generation files are copied
        extra_files: content by file name, or a function that returns it for the complete temporary directory

    Raises ModelError if `out` exists, or if a weight is missing or has another shape.
    """
    parsed = parse_any_config(config)
    model, dtype = build_any_on_meta(parsed), _dtype(parsed)
    transposed, parameters = transposed_linears(model), model.named_parameters()
    items = [_high_precision_item(name, tuple(p.shape), weights, dtype) for name, p in parameters]
    items = [_transpose_item(item) if item.owner in transposed else item for item in items]
    check_writable(Path(out), sum(item.size for item in items))
    with atomic_directory(Path(out)) as folder:
        _write_model_files(folder, dict(config), items, copy_files_from, MAX_SHARD_BYTES)
        _write_extra_files(folder, extra_files)


def write_calibrated(
    out: Path | str,
    source: Path | str,
    scales: ScalingCheckpoint,
    *,
    weights: Mapping[str, Tensor] | None = None,
    quantized: Mapping[str, QuantizedWeight] | None = None,
    matrices: Mapping[str, StoredLinear] | None = None,
    high_precision: Sequence[str] = (),
    format: str = "compressed-tensors",
    extra_files: ExtraFiles | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes an FP8 directory that fp8serve and other projects serve, with its `scales.safetensors`.

    Args:
        source: directory with the configuration and the tokenizer, and with the weights if `weights` is None
        scales: its recipe decides the granularity; `DelayedScaling` also takes input and weight scales from it
        weights: high-precision tensors by parameter name, such as `dict(model.named_parameters())` after training
        quantized: weights by linear layer, for layers that are not quantized here
        matrices: FP8 matrices that are no linear layers, written unchanged; all others are in high precision
        high_precision: linear layers that are not quantized
        format: one of FORMATS

    The written scales have the fingerprint of `out` and, if `weights` is None, of `source`. Raises ModelError or
    ScalesError if `out` exists, the format cannot express the recipe, or a scale is missing or unusable.
    Raises RecipeError if a layer does not consist of whole MX blocks.
    """
    source, out = Path(source), Path(out)
    check_absent(out)
    config = read_text_config(source)
    unquantized = weights if weights is not None else open_checkpoint(source)
    quantized, matrices, from_file = quantized or {}, matrices or {}, weights is None
    quantizer = _Quantizer(config, unquantized, quantized, matrices, high_precision, scales, format, from_file)
    head = ["score"] if is_classifier(config) and not is_encoder(config) else []
    ignored = [*head, *quantizer.routers, *high_precision]
    specs = {name: matrix.specs for name, matrix in matrices.items()}
    files = quantization_files(
        format, quantizer.recipe, bool(quantizer.kv), ignored, specs, quantizer.has_nvfp4_input_scales
    )
    config["quantization_config"] = files.pop("quantization_config")
    source_fingerprint = "" if weights is not None else fingerprint(source)
    items = list(quantizer.items())
    check_writable(out, sum(item.size for item in items))
    with atomic_directory(out) as folder:
        _write_model_files(folder, config, items, source, max_shard_bytes)
        for name, content in files.items():
            write_json(folder / name, content)
        states = quantizer.kv if quantizer.has_nvfp4_input_scales else scales.tensors
        if states:
            model = f"{fingerprint(folder)} {source_fingerprint}".strip()
            save_scales(folder / FILE_NAME, replace(scales, tensors=states, model=model))
        _write_extra_files(folder, extra_files)


class _Quantizer:
    """Turns high-precision weights into the items of an FP8 checkpoint."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        quantized: Mapping[str, QuantizedWeight],
        matrices: Mapping[str, StoredLinear],
        high_precision: Sequence[str],
        scales: ScalingCheckpoint,
        format_: str,
        from_file: bool,
    ) -> None:
        if scales.recipe is None:
            raise ModelError("An FP8 directory needs an FP8 recipe, and these scales have none.")
        self.recipe = scales.recipe
        self.weight_spec, self.input_spec = self.recipe.specs.linear["weight"], self.recipe.specs.linear["input"]
        self.weights, self.quantized, self.scales, self.format = weights, quantized, scales, format_
        self.matrices, self.from_file = matrices, from_file
        parsed = parse_any_config(config)
        model, self.dtype = build_any_on_meta(parsed), _dtype(parsed)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}  # tied parameters appear once
        self.transposed = transposed_linears(model)
        self.routers = router_names(model)  # vLLM quantizes routers of Qwen3-MoE that a configuration does not ignore
        self.linears = dict.fromkeys(name for name in model.linear_names() if name not in set(high_precision))
        self.kv = {key: entry for key, entry in scales.tensors.items() if key.rpartition(".")[2] in ("k", "v")}
        self.has_nvfp4_input_scales = self.input_spec.is_4bit and any(
            f"{n}.input" in scales.tensors for n in self.linears
        )
        if self.input_spec.source == "delayed" or self.has_nvfp4_input_scales:
            check_covers(scales, self.linears, "The scaling state")
        self.quantize = lru_cache(maxsize=1)(self._quantize)  # the weight and its scale are two items of one result

    def items(self) -> Iterator[_Item]:
        return (_transpose_item(item) if item.owner in self.transposed else item for item in self._items())

    def _items(self) -> Iterator[_Item]:
        for name, shape in self.shapes.items():
            linear = name.removesuffix(".weight")
            if linear in self.linears:
                yield from self._linear_items(linear, shape)
            elif linear in self.matrices:
                yield from self._matrix_items(linear, self.matrices[linear])
            else:
                yield replace(_high_precision_item(name, shape, self.weights, self.dtype), from_file=self.from_file)
        for key, entry in self.kv.items():
            owner, _, role = key.rpartition(".")  # model.layers.0.self_attn.k
            owner = f"{owner}.{role}_proj" if self.format == "modelopt" else owner
            yield self._scale_item(f"{owner}.{role}_scale", entry.scale)

    def _linear_items(self, linear: str, shape: tuple[int, ...]) -> Iterator[_Item]:
        check_whole_blocks(self.recipe, shape[1], linear)
        from_file = linear in self.quantized
        spec = self.weight_spec.for_serving()
        yield from self._weight_items(linear, spec, shape, lambda: self.quantize(linear), from_file)
        if self.has_nvfp4_input_scales:
            yield self._nvfp4_input_item(linear, self.scales.tensors[f"{linear}.input"].scale * E2M1_MAX)
        elif self.input_spec.source == "delayed":
            yield self._scale_item(f"{linear}.input_scale", self.scales.tensors[f"{linear}.input"].scale)

    def _nvfp4_input_item(self, linear: str, scale: Tensor) -> _Item:
        """Returns the item of the scale that maps the amax of an input to 448 * 6."""
        if self.format == "modelopt":
            return self._scale_item(f"{linear}.input_scale", scale)
        return _Item(f"{linear}.input_global_scale", torch.float32, (1,), lambda: scale.reshape(1))

    def _matrix_items(self, name: str, matrix: StoredLinear) -> Iterator[_Item]:
        """Yields the elements and the scales of a matrix unchanged, under the names of this format."""
        shape = self.shapes[f"{name}.weight"]
        yield from self._weight_items(name, matrix.weight_spec, shape, lambda: matrix.quantized_weight, from_file=True)
        if matrix.input_scale is not None:
            yield self._scale_item(f"{name}.input_scale", matrix.input_scale)

    def _weight_items(
        self, name: str, spec: QuantSpec, shape: tuple[int, ...], weight: Callable[[], QuantizedWeight], from_file: bool
    ) -> Iterator[_Item]:
        """Yields the elements and the scales of a weight [N, K], which `weight` returns."""
        scale_shape, scale_dtype = self._scale_shape(spec, *shape), _scale_dtype(spec)
        suffix = "_packed" if spec.is_4bit and self.format == "compressed-tensors" else ""
        dtype = torch.uint8 if spec.is_4bit else torch.float8_e4m3fn
        shape = (shape[0], shape[1] // 2) if spec.is_4bit else shape
        yield _Item(f"{name}.weight{suffix}", dtype, shape, lambda: weight().q, None, from_file)
        make = lambda: weight().scale_inv.view(scale_dtype).reshape(scale_shape)  # noqa: E731
        yield _Item(self._scale_name(name, spec), scale_dtype, scale_shape, make)
        if spec.scale_format == "e4m3":
            yield self._global_scale_item(name, weight, from_file)

    def _global_scale_item(self, name: str, weight: Callable[[], QuantizedWeight], from_file: bool) -> _Item:
        """Returns the item of the second scale in NVFP4, which compressed-tensors stores as a quantizing one."""

        def scale() -> Tensor:
            return cast(Tensor, weight().global_scale)

        if self.format == "modelopt":
            return _Item(f"{name}.weight_scale_2", torch.float32, (), scale)
        if from_file:
            return self._scale_item(f"{name}{ENCODING_GLOBAL}", scale())
        # no note, which would need the weight now: the cast's scale is the reciprocal of the number that is stored
        return _Item(f"{name}{ENCODING_GLOBAL}", torch.float32, (1,), lambda: scale().reciprocal().reshape(1))

    def _quantize(self, linear: str) -> QuantizedWeight:
        """Returns the weight, quantized as serving and training do unless the caller passed it."""
        if linear in self.quantized:
            return self.quantized[linear]
        weight = _checked_weight(self.weights, f"{linear}.weight", self.shapes[f"{linear}.weight"])
        if self.weight_spec.source == "delayed":
            result = QuantizedWeight(*ops.quantize(weight, scale=self.scales.weight_scale(linear)))
        else:
            result = cast_weight(weight, self.weight_spec)
        if self.from_file:
            release_pages(weight)
        return result

    def _scale_name(self, linear: str, spec: QuantSpec) -> str:
        return f"{linear}.weight_scale{'_inv' if spec.is_blocked and self.format == 'fp8' else ''}"

    def _scale_shape(self, spec: QuantSpec, rows: int, cols: int) -> tuple[int, ...]:
        shape = spec.scale_shape(rows, cols)
        if spec.granularity == "row" and self.format == "modelopt":
            return (rows,)
        return shape or self._scalar_shape

    @property
    def _scalar_shape(self) -> tuple[int, ...]:
        return (1,) if self.format == "compressed-tensors" else ()

    def _scale_item(self, name: str, scale: Tensor) -> _Item:
        """Returns the item of a scale whose reciprocal the formats store."""
        value, note = to_dequantizing_scale(scale)
        return _Item(name, torch.float32, self._scalar_shape, lambda: value.reshape(self._scalar_shape), note)


def _scale_dtype(spec: QuantSpec) -> torch.dtype:
    """Returns the type of a weight's scales in files. Exponents of MX blocks are bytes there."""
    return torch.uint8 if spec.is_mx else SCALE_DTYPES[spec.scale_format]


def _dtype(config: AnyConfig) -> torch.dtype:
    return {"float32": torch.float32, "float16": torch.float16}.get(config.dtype, torch.bfloat16)


def _high_precision_item(name: str, shape: tuple[int, ...], weights: Mapping[str, Tensor], dtype: torch.dtype) -> _Item:
    dtype = torch.float32 if needs_fp32(name) else dtype
    return _Item(name, dtype, shape, lambda: _checked_weight(weights, name, shape).to(dtype))


def _transpose_item(item: _Item) -> _Item:
    """Returns a matrix transposed, as the files of its layer store it; vectors and scalars are unchanged."""
    if len(item.shape) < 2:
        return item
    return replace(item, shape=item.shape[::-1], make=lambda: item.make().t().contiguous(), from_file=False)


def _checked_weight(weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in weights:
        raise ModelError(f"The weights to write lack {name}.")
    tensor = weights[name].detach()
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"The weight {name} has the shape {list(tensor.shape)}; the configuration requires {list(shape)}."
        )
    if not is_finite(tensor):
        raise ModelError(f"The weight {name} holds NaN or an infinity; a model that diverged is not written.")
    return tensor


def _write_model_files(
    folder: Path, config: dict[str, Any], items: list[_Item], source: Path | str | None, max_shard_bytes: int
) -> None:
    write_json(folder / "config.json", encode_nonfinite(config))
    if source is not None:
        _copy_files(Path(source), folder)
    shards = _split_into_shards(items, max_shard_bytes)
    numbered = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = numbered if len(shards) > 1 else [SAFE_WEIGHTS]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard)
    write_index(folder, names)


def _copy_files(source: Path, folder: Path) -> None:
    """Copies the tokenizer's files, generation defaults, licences and settings of sentence-transformers."""
    for name, content in copied_files(source):
        (folder / name).write_bytes(content)
    for config in sorted((*source.glob("[0-9]_Pooling/config.json"), *source.glob("[0-9]_LogitScore/config.json"))):
        if is_regular_file(config):
            (folder / config.parent.name).mkdir()
            write_json(folder / config.parent.name / "config.json", read_json(config, root=source))


def _write_extra_files(folder: Path, extra: ExtraFiles | None) -> None:
    for name, content in (extra(folder) if callable(extra) else extra or {}).items():
        if name != Path(name).name or (folder / name).exists():
            raise ModelError(f"The extra file {name!r} already exists, or its name is a path.")
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _split_into_shards(items: list[_Item], max_shard_bytes: int) -> list[list[_Item]]:
    """Groups consecutive items into shards up to the limit; an item larger than the limit has a shard of its own."""
    shards: list[list[_Item]] = [[]]
    free_bytes = max_shard_bytes
    for item in items:
        if shards[-1] and item.size > free_bytes:
            shards.append([])
            free_bytes = max_shard_bytes
        shards[-1].append(item)
        free_bytes -= item.size
    return shards


_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _write_shard(path: Path, items: list[_Item]) -> None:
    """Writes a safetensors file: the header's length, the header, and the tensors at the offsets of `_layout`."""
    offsets = _layout(items)
    notes = {item.name: item.note for item in items if item.note is not None}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | notes}
    for item in items:
        span = [offsets[item.name], offsets[item.name] + item.size]
        header[item.name] = {"dtype": _DTYPE_NAMES[item.dtype], "shape": list(item.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for item in items:
            file.seek(8 + len(text) + offsets[item.name])
            _write_tensor(file, item)


def _layout(items: list[_Item]) -> dict[str, int]:
    """Returns offsets without gaps; tensors whose size is a multiple of ALIGNMENT come first and are aligned to it."""
    ordered = sorted(items, key=lambda i: (i.size % ALIGNMENT != 0, -i.dtype.itemsize))
    offsets, end = {}, 0
    for item in ordered:
        offsets[item.name] = end
        end += item.size
    return offsets


def _write_tensor(file: BinaryIO, item: _Item) -> None:
    tensor = item.make()
    if tuple(tensor.shape) != item.shape or tensor.dtype is not item.dtype:
        raise ScalesError(
            f"{item.name} is {tensor.dtype} {list(tensor.shape)} where {item.dtype} {list(item.shape)} was expected."
        )
    file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if item.from_file:
        release_pages(tensor)
