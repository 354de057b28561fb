"""Writes a module as a directory: high precision, or FP8 in one of three projects' formats; whole or not at all.

Weights are streamed: sizes are known from shapes, so each shard's header is written first and tensors are then placed
one by one at their offsets; at most one tensor exists in both precisions, and pages of the source's file are
released. Tensors whose size is a multiple of 64 bytes come first and the header is padded to 64, so that every weight
matrix is aligned for kernels that read the mapped file.

All scales are written in FP32 and in the direction that the formats share, dequantizing; where that does not restore
the quantizing scale to the last bit, the file's metadata hold that scale under the tensor's name. `scales.safetensors`
beside them holds the quantizing scales, bit for bit, with their histories.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fp8serve.errors import ModelError, ScalesError
from fp8serve.fp8 import ops
from fp8serve.fp8.casting import SCALE_DTYPES, cast_by_content
from fp8serve.fp8.spec import QuantSpec
from fp8serve.model.building import skeleton, transposed_linears
from fp8serve.model.config.decoder import classifies, parse_any_config
from fp8serve.model.config.encoder import is_encoder
from fp8serve.model.config.mixture import keeps_fp32
from fp8serve.model.config.wrappers import read_text_config
from fp8serve.model.formats import FORMATS
from fp8serve.model.formats.interop import dequantizing_scale
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, check_covers, fingerprint, save_scales
from fp8serve.model.network.experts import router_names
from fp8serve.model.storage.files import (
    CARRIED,
    MAX_CARRIED_BYTES,
    as_json,
    check_absent,
    check_writable,
    read_file,
    read_json,
    whole_directory,
    write_json,
)
from fp8serve.model.storage.opening import regular_file
from fp8serve.model.storage.shards import DTYPES, SINGLE, release_pages, write_index
from fp8serve.model.stored import StoredLinear, open_checkpoint

__all__ = ["FORMATS", "write_calibrated", "write_hf_directory"]

MAX_SHARD_BYTES = 5 * 2**30
ALIGNMENT = 64
ExtraFiles = Mapping[str, str | bytes] | Callable[[Path], Mapping[str, str | bytes]]


@dataclass(frozen=True)
class _Item:
    """One tensor to write: described now, made when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    note: str | None = None  # for the file's metadata, under the tensor's name
    from_file: bool = False  # it is never written to, so its pages can be read again

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
    carry_from: Path | str | None = None,
    extra_files: ExtraFiles | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a high-precision Hugging Face directory: `config` as config.json and `weights` in the type it names.

    weights: by parameter name; may hold more than the architecture needs. carry_from: a directory whose tokenizer and
    generation files are copied. extra_files: name -> content, or a function from the complete temporary directory to
    that. ModelError: `out` is taken, or a weight is missing or misshapen.
    """
    dtype = _dtype(config)
    transposed = transposed_linears(skeleton(parse_any_config(config)))
    plain = (_plain(name, shape, weights, dtype) for name, shape in _shapes(config).items())
    items = [_transposed(item) if item.owner in transposed else item for item in plain]
    check_writable(Path(out), sum(item.size for item in items))
    with whole_directory(Path(out)) as folder:
        _write_common(folder, dict(config), items, carry_from, max_shard_bytes)
        _write_extra(folder, extra_files)


def write_calibrated(
    out: Path | str,
    source: Path | str,
    scales: ScalingCheckpoint,
    *,
    weights: Mapping[str, Tensor] | None = None,
    quantized: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    matrices: Mapping[str, StoredLinear] | None = None,
    high_precision: Sequence[str] = (),
    format: str = "compressed-tensors",
    extra_files: ExtraFiles | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write an FP8 directory that this and other projects serve, and `scales.safetensors` with it.

    source: the directory that configuration, tokenizer and, without `weights`, the weights come from. weights: high
    precision, by parameter name, for instance `dict(model.named_parameters())` after training. quantized: by the name
    of a linear, its weight in FP8 and the dequantizing scale, for linears that are not rounded to nearest here.
    matrices: other matrices in FP8, by name, which are written as they are; without them, all others are written in
    high precision. high_precision: linears that are not quantized. scales: `scales.recipe` decides the granularity;
    `DelayedScaling` takes input and weight scales from it, the others need none. format: one of FORMATS. The
    fingerprints in the written scales are those of `out` and, without `weights`, of `source`. ModelError, ScalesError:
    `out` is taken; the format cannot express the recipe; a scale is missing or unusable.
    """
    source, out = Path(source), Path(out)
    check_absent(out)
    config = read_text_config(source)
    unquantized = weights if weights is not None else open_checkpoint(source)
    ready, others = quantized or {}, matrices or {}
    writer = _Quantizer(config, unquantized, ready, others, high_precision, scales, format, from_file=weights is None)
    head = ["score"] if classifies(config) and not is_encoder(config) else []
    plain = [*head, *writer.routers, *high_precision]
    specs = {name: matrix.specs for name, matrix in others.items()}
    files = quantization_files(format, writer.recipe, bool(writer.kv), plain, specs)
    config["quantization_config"] = files.pop("quantization_config")
    origin = "" if weights is not None else fingerprint(source)
    items = list(writer.items())
    check_writable(out, sum(item.size for item in items))
    with whole_directory(out) as folder:
        _write_common(folder, config, items, source, max_shard_bytes)
        for name, content in files.items():
            write_json(folder / name, content)
        if scales.tensors:
            save_scales(folder / FILE_NAME, replace(scales, model=f"{fingerprint(folder)} {origin}".strip()))
        _write_extra(folder, extra_files)


class _Quantizer:
    """Turns high-precision weights into the items of an FP8 checkpoint."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        ready: Mapping[str, tuple[Tensor, Tensor]],
        matrices: Mapping[str, StoredLinear],
        high_precision: Sequence[str],
        scales: ScalingCheckpoint,
        format_: str,
        from_file: bool,
    ) -> None:
        if scales.recipe is None:
            raise ModelError("An FP8 directory needs an FP8 recipe, and these scales have none.")
        self.recipe = scales.recipe
        self.weight, self.input = self.recipe.specs.linear["weight"], self.recipe.specs.linear["input"]
        self.weights, self.quantized_weights, self.scales, self.format = weights, ready, scales, format_
        self.matrices, self.from_file = matrices, from_file
        self.dtype = _dtype(config)
        self.shapes = _shapes(config)
        model = skeleton(parse_any_config(config))
        self.transposed = transposed_linears(model)
        self.routers = router_names(model)  # vLLM quantizes those of Qwen3-MoE that a configuration does not leave out
        self.linears = dict.fromkeys(name for name in model.linear_names() if name not in set(high_precision))
        self.kv = {key: entry for key, entry in scales.tensors.items() if key.rpartition(".")[2] in ("k", "v")}
        if self.input.source == "delayed":
            check_covers(scales, self.linears, "The scaling state")
        self.quantized = lru_cache(maxsize=1)(self._quantize)  # its weight and its scale are two items

    def items(self) -> Iterator[_Item]:
        return (_transposed(item) if item.owner in self.transposed else item for item in self._items())

    def _items(self) -> Iterator[_Item]:
        for name, shape in self.shapes.items():
            linear = name.removesuffix(".weight")
            if linear in self.linears:
                yield from self._fp8(linear, shape)
            elif linear in self.matrices:
                yield from self._as_stored(linear, self.matrices[linear])
            else:
                yield replace(_plain(name, shape, self.weights, self.dtype), from_file=self.from_file)
        for key, entry in self.kv.items():
            owner, _, role = key.rpartition(".")  # model.layers.0.self_attn.k
            owner = f"{owner}.{role}_proj" if self.format == "modelopt" else owner
            yield self._scalar(f"{owner}.{role}_scale", entry.scale)

    def _fp8(self, linear: str, shape: tuple[int, ...]) -> Iterator[_Item]:
        scale_shape = self._scale_shape(self.weight, *shape)
        ready = linear in self.quantized_weights
        yield _Item(f"{linear}.weight", torch.float8_e4m3fn, shape, lambda: self.quantized(linear)[0], from_file=ready)
        scale_name = self._scale_name(linear, self.weight)
        scale_dtype = SCALE_DTYPES[self.weight.scale_format]
        yield _Item(scale_name, scale_dtype, scale_shape, lambda: self.quantized(linear)[1].reshape(scale_shape))
        if self.input.source == "delayed":
            yield self._scalar(f"{linear}.input_scale", self.scales.tensors[f"{linear}.input"].scale)

    def _as_stored(self, name: str, matrix: StoredLinear) -> Iterator[_Item]:
        """The same codes and scales, in this format's spelling."""
        spec, shape = matrix.specs[1], tuple(matrix.weight_q.shape)
        scale_shape = self._scale_shape(spec, *shape)
        scale = matrix.weight_scale_inv.reshape(scale_shape)
        yield _Item(f"{name}.weight", torch.float8_e4m3fn, shape, lambda: matrix.weight_q, from_file=True)
        yield _Item(self._scale_name(name, spec), torch.float32, scale_shape, lambda: scale)
        if matrix.input_scale is not None:
            yield self._scalar(f"{name}.input_scale", matrix.input_scale)

    def _quantize(self, linear: str) -> tuple[Tensor, Tensor]:
        """(weight_q, its dequantizing scale): those ready, or those that serving and training would compute from the
        weight."""
        if linear in self.quantized_weights:
            return self.quantized_weights[linear]
        weight = _weight(self.weights, f"{linear}.weight", self.shapes[f"{linear}.weight"])
        delayed = self.weight.source == "delayed"
        result = (
            ops.quantize(weight, scale=self.scales.weight_scale(linear))
            if delayed
            else cast_by_content(weight, self.weight)
        )
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

    def _scalar(self, name: str, scale: Tensor) -> _Item:
        """A scale that quantizes, in the formats' direction."""
        value, note = dequantizing_scale(scale)
        return _Item(name, torch.float32, self._scalar_shape, lambda: value.reshape(self._scalar_shape), note)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    return {"float32": torch.float32, "float16": torch.float16}.get(parse_any_config(config).dtype, torch.bfloat16)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter of the architecture, tied ones once."""
    model = skeleton(parse_any_config(config))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _plain(name: str, shape: tuple[int, ...], weights: Mapping[str, Tensor], dtype: torch.dtype) -> _Item:
    own = torch.float32 if keeps_fp32(name) else dtype
    return _Item(name, own, shape, lambda: _weight(weights, name, shape).to(own))


def _transposed(item: _Item) -> _Item:
    """A matrix in the file's order for a layer that keeps it transposed; vectors and scalars stay."""
    if len(item.shape) < 2:
        return item
    return replace(item, shape=item.shape[::-1], make=lambda: item.make().t().contiguous(), from_file=False)


def _weight(weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in weights:
        raise ModelError(f"The weights to write lack {name}.")
    tensor = weights[name].detach()
    if tuple(tensor.shape) != shape:
        raise ModelError(f"The weight {name} has the shape {list(tensor.shape)}; the configuration makes it {shape}.")
    if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # NaN is either
        raise ModelError(f"The weight {name} holds NaN or an infinity; a model that diverged is not written.")
    return tensor


def _write_common(
    folder: Path, config: dict[str, Any], items: list[_Item], carry_from: Path | str | None, max_shard_bytes: int
) -> None:
    write_json(folder / "config.json", as_json(config))
    if carry_from is not None:
        _carry(Path(carry_from), folder)
    _write_weights(folder, items, max_shard_bytes)


def _carry(source: Path, folder: Path) -> None:
    for name in CARRIED:
        if regular_file(source / name):
            (folder / name).write_bytes(read_file(source / name, MAX_CARRIED_BYTES))
    for config in sorted((*source.glob("[0-9]_Pooling/config.json"), *source.glob("[0-9]_LogitScore/config.json"))):
        if regular_file(config):
            (folder / config.parent.name).mkdir()
            write_json(folder / config.parent.name / "config.json", read_json(config, root=source))


def _write_extra(folder: Path, extra: ExtraFiles | None) -> None:
    for name, content in (extra(folder) if callable(extra) else extra or {}).items():
        if name != Path(name).name or (folder / name).exists():
            raise ModelError(f"The extra file {name!r} is not a free, plain file name.")
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _write_weights(folder: Path, items: list[_Item], max_shard_bytes: int) -> None:
    shards = _divide(items, max_shard_bytes)
    many = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = many if len(shards) > 1 else [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard)
    write_index(folder, names)


def _divide(items: list[_Item], max_shard_bytes: int) -> list[list[_Item]]:
    """Consecutive items in shards up to the limit; an item larger than the limit has its own shard."""
    shards: list[list[_Item]] = [[]]
    room = max_shard_bytes
    for item in items:
        if shards[-1] and item.size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(item)
        room -= item.size
    return shards


_CODES = {dtype: code for code, dtype in DTYPES.items()}


def _write_shard(path: Path, items: list[_Item]) -> None:
    """One safetensors file: length of the header, header, tensors without gaps in the order of `_placement`."""
    offsets = _placement(items)
    notes = {item.name: item.note for item in items if item.note is not None}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | notes}
    for item in items:
        span = [offsets[item.name], offsets[item.name] + item.size]
        header[item.name] = {"dtype": _CODES[item.dtype], "shape": list(item.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for item in items:
            file.seek(8 + len(text) + offsets[item.name])
            _write_tensor(file, item)


def _placement(items: list[_Item]) -> dict[str, int]:
    """Offsets such that every tensor is aligned to its element, and to 64 where all sizes before it allow."""
    ordered = sorted(items, key=lambda i: (i.size % ALIGNMENT != 0, -i.dtype.itemsize))
    offsets, end = {}, 0
    for item in ordered:
        offsets[item.name] = end
        end += item.size
    return offsets


def _write_tensor(file: BinaryIO, item: _Item) -> None:
    tensor = item.make()
    if tuple(tensor.shape) != item.shape or tensor.dtype is not item.dtype:
        raise ScalesError(f"{item.name} came out as {tensor.dtype} {list(tensor.shape)}, not as planned.")
    file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if item.from_file:
        release_pages(tensor)
