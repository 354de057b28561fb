"""Reads how other projects' FP8 checkpoints quantize inputs (`Scheme`), and what their scales mean.

The tables that map other projects' granularities to QuantSpecs are here; quantization_config.py uses them to write.

`SCALE_SUFFIXES` says what each scale tensor scales. In every supported format a stored scale dequantizes, whatever its
name; DeepSeek's `weight_scale_inv` is no exception. In memory, `weight_scale_inv` dequantizes and `input_scale`
quantizes, so this module inverts the scales of inputs and of the KV cache. Since 1 / (1 / s) is not always s,
fp8serve's own files also have s in their header if necessary (`to_dequantizing_scale`). Scales may be FP32, BF16, FP16
or E8M0 in the file and are FP32 in memory. This module converts equivalent shapes ([], [1], [out], [out, 1],
[out/128, 1, in/128, 1]) to one.

| project                  | weight             | input            | KV cache                                  |
|--------------------------|--------------------|------------------|-------------------------------------------|
| compressed-tensors       | weight_scale       | input_scale      | self_attn.{k,v}_scale                     |
| `quant_method: fp8`      | weight_scale[_inv] | input_scale      | self_attn.{k,v}_scale, .kv_scale          |
| DeepSeek, from V4 on     | scale              |                  |                                           |
| transformers, static     | weight_scale_inv   | activation_scale |                                           |
| ModelOpt                 | weight_scale       | input_scale      | self_attn.k_proj.k_scale, .v_proj.v_scale |
| older compressed-tensors |                    |                  | self_attn.{k,v}_proj.output_scale         |
| torchao                  | _weight_scale      |                  |                                           |
| NVFP4, compressed-tensors | weight_scale, weight_global_scale | input_global_scale |                            |
| NVFP4, ModelOpt          | weight_scale, weight_scale_2 | input_scale, pre_quant_scale |                     |
| vLLM in memory           |                    |                  | self_attn.attn.{k,v}_scale                |

NVFP4 has a second scale for the whole weight. compressed-tensors stores the one that quantizes, ModelOpt the one that
dequantizes, which is also the one in memory. Inputs in NVFP4 or MXFP4 are read as BF16, so their scales are not read.
But inputs in NVFP4 whose scales all come from the data, as `finetune` writes them, are served so.
With ModelOpt's NVFP4_AWQ an input is multiplied by a pre_quant_scale [K], by which the weight was divided.

A key with "scale", "zero_point" or "amax" in it that is not in the table raises ModelError, because a model without one
of its scales gives wrong answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.errors import ModelError, shown
from fp8serve.fp8.ops.arithmetic import MX_BLOCK
from fp8serve.fp8.spec import (
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_INPUT,
    UNQUANTIZED,
    Granularity,
    QuantSpec,
    format_shapes,
    weight_specs,
)
from fp8serve.model.config.reader import Fields
from fp8serve.model.config.wrappers import text_tensor_name
from fp8serve.model.formats import torchao
from fp8serve.model.formats.microscaling import EXPONENT_DTYPES, check_exponents
from fp8serve.model.formats.targets import CLASS, check_targets, is_pattern, matches
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.shards import type_name

STATIC = QuantSpec(source="stored")
PER_TOKEN = QuantSpec(granularity="row")
BLOCKED_INPUT, BLOCKED_WEIGHT = QuantSpec(granularity="block1x128"), QuantSpec(granularity="block128x128")

# The names of compressed-tensors' strategies.
CT_INPUTS: dict[Granularity, str] = {"tensor": "tensor", "row": "token", "block1x128": "group", "block1x32": "group"}
CT_WEIGHTS: dict[Granularity, str] = {
    "tensor": "tensor",
    "row": "channel",
    "block128x128": "block",
    "block1x32": "group",
    "block1x16": "tensor_group",
}
CT_FORMATS = (
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",  # INT4 (int4.py)
    "mixed-precision",
    "dense",  # only the KV cache is FP8
)
# How ModelOpt's algorithms quantize inputs and weights.
MODELOPT: dict[str, tuple[QuantSpec, Granularity]] = {
    "FP8": (STATIC, "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": (PER_TOKEN, "row"),
    "FP8_PB_WO": (UNQUANTIZED, "block128x128"),
    "MXFP8": (MXFP8, "block1x32"),
    "W4A16_NVFP4": (UNQUANTIZED, "block1x16"),
    "NVFP4": (NVFP4_INPUT, "block1x16"),
}
MODELOPT_MIXED, MODELOPT_AWQ = "MIXED_PRECISION", "NVFP4_AWQ"
# ModelOpt's algorithms that quantize weights to 4 bits, and whether they quantize inputs, too.
_MODELOPT_4BIT = {
    "W4A16_NVFP4": (NVFP4, False),
    "NVFP4": (NVFP4, True),
    MODELOPT_AWQ: (NVFP4, True),
    "MXFP4": (MXFP4, True),
}

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
# "global": the second scale of a weight in NVFP4; "pre_quant": multiplies each element of an input
Role = Literal["weight", "global", "input", "pre_quant", "k", "v", "kv"]
ENCODING_GLOBAL = ".weight_global_scale"  # unlike other scales in files, these quantize
ENCODING_SUFFIXES = (ENCODING_GLOBAL, ".input_global_scale")
KV: tuple[Role, ...] = ("k", "v", "kv")

# Suffixes of scale names, and what the scales belong to. The rest of the name is the owner: a linear, or
# `model.layers.N.self_attn` for the KV cache.
SCALE_SUFFIXES: tuple[tuple[str, Role], ...] = (
    (".k_proj.k_scale", "k"),
    (".v_proj.v_scale", "v"),
    (".k_proj.output_scale", "k"),
    (".v_proj.output_scale", "v"),
    (".attn.k_scale", "k"),
    (".attn.v_scale", "v"),
    (".k_scale", "k"),
    (".v_scale", "v"),
    (".kv_scale", "kv"),
    (".weight_scale_inv", "weight"),
    (ENCODING_GLOBAL, "global"),
    (".weight_scale_2", "global"),
    (".input_global_scale", "input"),
    (".weight_scale", "weight"),
    (".scale", "weight"),
    (".input_scale", "input"),
    (".pre_quant_scale", "pre_quant"),
    (".activation_scale", "input"),
)


@dataclass(frozen=True)
class Int4:
    """How weights in INT4 are scaled: by groups of columns, or by rows if `group_size` is None."""

    group_size: int | None
    is_symmetric: bool


@dataclass(frozen=True)
class Scheme:
    """How the inputs of a group of linears are quantized. `producer` is the format's name for messages."""

    producer: str
    input_spec: QuantSpec
    weight_4bit: QuantSpec | None = None  # MXFP4 or NVFP4; None if the weights are in FP8 or INT4
    drops_inputs: bool = False  # whether the file's inputs have 4 bits, too, and are read as BF16
    int4: Int4 | None = None  # of weights that are read as BF16 (int4.py)
    has_pre_quant_scales: bool = False  # whether layers may have one

    @property
    def weight_name(self) -> str:
        """The name of the weights' format for messages."""
        return "INT4" if self.int4 is not None else (self.weight_4bit or self.input_spec).name


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's quantization configuration: one scheme per group of layers, and the layers it ignores."""

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]  # (targets, scheme)
    ignore: tuple[str, ...]
    producer: str
    has_fp8_cache: bool = False  # whether the configuration asks readers to use an FP8 KV cache
    modules: Mapping[str, Scheme] = field(default_factory=dict)  # by the name of a layer or of a module around it

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (*(scheme for _, scheme in self.groups), *self.modules.values())

    def find_scheme(self, linear: str) -> Scheme | None:
        """Returns the scheme of the group with this layer, or None. Targets by name precede targets by class."""
        name = linear
        while name and self.modules:
            if name in self.modules:
                return self.modules[name]
            name = name.rpartition(".")[0]
        hits = [(target, scheme) for targets, scheme in self.groups for target in targets if matches(target, linear)]
        named = (scheme for target, scheme in hits if target != CLASS)
        return next(named, hits[0][1] if hits else None)

    def require_scheme(self, linear: str) -> Scheme:
        """Returns the scheme of an FP8 layer. Raises ModelError if no group has the layer."""
        scheme = self.find_scheme(linear)
        if scheme is None:
            raise ModelError(f"{linear} has FP8 weights but quantization_config has no group for it.")
        if scheme.weight_4bit is not None or scheme.int4 is not None:
            raise ModelError(
                f"{linear} has FP8 weights but quantization_config says {scheme.weight_name}; correct "
                "quantization_config, or write the model again."
            )
        return scheme

    @cached_property
    def _ignored_modules(self) -> list[str]:
        return [f".{target.removeprefix('model.')}." for target in self.ignore if not is_pattern(target)]

    def ignores(self, linear: str) -> bool:
        """Returns whether the layer, or a module that contains it, such as "model.vision_tower", is to be ignored."""
        path = f".{linear}."
        is_named = any(module in path for module in self._ignored_modules)
        return is_named or any(matches(target, linear) for target in self.ignore if is_pattern(target))


@dataclass(frozen=True)
class ScaleKey:
    """What a scale tensor scales: the weight, the input or the KV cache of the module `owner`."""

    owner: str
    role: Role


def parse_scale_key(key: str) -> ScaleKey | None:
    """Returns what the tensor `key` scales, or None if it is no scale. Raises ModelError for an unknown scale."""
    for suffix, role in SCALE_SUFFIXES:
        if key.endswith(suffix):
            owner = key.removesuffix(suffix)
            if (role in ("k", "v", "kv")) == owner.endswith(".self_attn"):
                return ScaleKey(owner, role)
    last = key.rpartition(".")[2]
    if "scale" in last or "zero_point" in last or "amax" in last:
        raise ModelError(f"The checkpoint holds the scale {key!r}, whose meaning is not known; it is not ignored.")
    return None


def read_quantization(model_dir: Path, raw_config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantization of config.json or of ModelOpt's hf_quant_config.json, or None if there is none.

    Raises ModelError if the method, the format or the number of bits is not supported.
    """
    config, side_car = raw_config.get("quantization_config"), model_dir / "hf_quant_config.json"
    if config is None and present(side_car):
        return _modelopt(Fields(read_json(side_car).get("quantization") or {}, f"{side_car}: quantization"))
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None or not isinstance(config, dict):
        raise ModelError(f"{model_dir} is quantized by {shown(method)}; supported are {', '.join(_READERS)}.")
    return reader(Fields(config, f"{model_dir / 'config.json'}: quantization_config"))


def _compressed_tensors(config: Fields) -> Quantization:
    name = "compressed-tensors"
    if (value := config.text("format")) not in (*CT_FORMATS, None):
        raise _unsupported(name, "format", value)
    sparse, rotated = config.object("sparsity_config"), config.object("transform_config")
    if (sparse and sparse.has_values and sparse.text("format") != "dense") or (rotated and rotated.has_values):
        raise ModelError(f"The {name} checkpoint is sparse or rotated, which is not supported.")
    cache = config.object("kv_cache_scheme")
    _require_fp8(name, "kv_cache_scheme", cache)
    groups = tuple((check_targets(g.texts("targets"), g.where), _ct_scheme(g)) for g in config.objects("config_groups"))
    return Quantization(groups, check_targets(config.texts("ignore"), config.where), name, cache is not None)


def _ct_scheme(group: Fields) -> Scheme:
    name, weights = "compressed-tensors", group.object("weights")
    if weights is not None and (weights.raw("num_bits"), weights.raw("type")) == (4, "int"):
        return Scheme(name, UNQUANTIZED, int4=_ct_int4(group, weights))
    spec = None if weights is None else _ct_4bit(weights)
    if weights is None or spec is None:
        return Scheme(name, _ct_inputs(group))
    if weights.boolean("symmetric") is False:
        raise _unsupported(name, "weights", f"asymmetric {spec.name}")
    inputs = group.object("input_activations")
    has_inputs = inputs is not None and spec == NVFP4 == _ct_4bit(inputs) and inputs.raw("dynamic") is True
    if spec == NVFP4:
        spec = _with_scale_choice(spec, weights.object("observer_kwargs"))
    if has_inputs:
        return Scheme(name, NVFP4_INPUT, spec)
    return Scheme(name, UNQUANTIZED, spec, drops_inputs=inputs is not None)


def _ct_int4(group: Fields, weights: Fields) -> Int4:
    name, strategy, size = "compressed-tensors", weights.text("strategy"), weights.integer("group_size")
    if group.object("input_activations") is not None:
        raise _unsupported(name, "input_activations", "beside INT4 weights")
    if strategy not in ("group", "channel"):
        raise _unsupported(name, "INT4 weight strategy", strategy)
    if strategy == "group" and (size is None or size < 1):
        raise _unsupported(name, "INT4 group_size", size)
    if (order := weights.raw("actorder")) not in (None, False, "weight", "static"):  # the others permute columns
        raise _unsupported(name, "actorder", order)
    return Int4(size if strategy == "group" else None, weights.boolean("symmetric") is not False)


def _ct_4bit(args: Fields) -> QuantSpec | None:
    """Returns MXFP4 or NVFP4, or None if weights or inputs have another format."""
    kind = tuple(args.raw(key) for key in ("num_bits", "type", "strategy", "group_size"))
    specs = (MXFP4, NVFP4)
    return next((s for s in specs if kind == (4, "float", CT_WEIGHTS[s.granularity], s.block[1])), None)


def _with_scale_choice(spec: QuantSpec, record: Fields | None) -> QuantSpec:
    """Returns the spec of NVFP4 weights with the choice between two scales that quantization_config.py recorded."""
    return replace(spec, four_over_six=record is not None and record.boolean("four_over_six") is True)


def _ct_inputs(group: Fields) -> QuantSpec:
    weights, inputs = group.object("weights"), group.object("input_activations")
    if weights is not None and _is_mx(weights):
        _require_fp8("compressed-tensors", "weights", weights)
        return UNQUANTIZED if inputs is None else _ct_mx_inputs(inputs)
    _require_fp8("compressed-tensors", "weights", weights)
    _require_fp8("compressed-tensors", "output_activations", group.object("output_activations"))  # old KV scheme
    weight_strategy = "tensor" if weights is None else weights.text("strategy") or "tensor"
    if weight_strategy not in CT_WEIGHTS.values() or weight_strategy.endswith("group"):  # other groups than MX blocks
        raise _unsupported("compressed-tensors", "weight strategy", weight_strategy)
    if inputs is None:
        return UNQUANTIZED
    _require_fp8("compressed-tensors", "input_activations", inputs)
    strategy = inputs.text("strategy") or "tensor"
    if inputs.raw("dynamic") == "local":  # NVFP4's static global scale with dynamic group scales
        raise _unsupported("compressed-tensors", "dynamic activations", "local")
    if not inputs.boolean("dynamic"):
        if strategy != "tensor":
            raise _unsupported("compressed-tensors", "static activation strategy", strategy)
        return STATIC
    return _ct_dynamic(strategy, inputs)


def _is_mx(weights: Fields) -> bool:
    kind = tuple(weights.raw(key) for key in ("type", "strategy", "group_size"))
    return kind == ("float", "group", MX_BLOCK) and weights.raw("num_bits") in (8, 4)


def _ct_mx_inputs(inputs: Fields) -> QuantSpec:
    if not _is_mx(inputs) or inputs.raw("num_bits") != 8 or not inputs.boolean("dynamic"):
        raise _unsupported("compressed-tensors", "activation strategy", inputs.text("strategy"))
    return MXFP8


def _ct_dynamic(strategy: str, inputs: Fields) -> QuantSpec:
    granularity = next((granularity for granularity, name in CT_INPUTS.items() if name == strategy), None)
    if granularity is None:
        raise _unsupported("compressed-tensors", "activation strategy", strategy)
    spec = QuantSpec(granularity=granularity)
    if spec.is_blocked and inputs.integer("group_size") != spec.block[1]:
        raise _unsupported("compressed-tensors", "activation group_size", inputs.integer("group_size"))
    return spec


def _require_fp8(producer: str, key: str, args: Fields | None) -> None:
    """Raises ModelError if `args`, the value of `key`, describes another format than symmetric FP8."""
    if args is None:
        return
    bits, kind, symmetric = args.integer("num_bits"), args.text("type"), args.boolean("symmetric")
    if bits not in (None, 8) or kind not in (None, "float") or symmetric is False:
        asymmetric = " asymmetric" if symmetric is False else ""
        raise _unsupported(producer, key, f"{8 if bits is None else bits}-bit {kind or 'float'}{asymmetric}")
    block = args.raw("block_structure")
    rows, columns = BLOCKED_WEIGHT.block
    if block not in (None, [rows, columns], f"{rows}x{columns}"):
        raise _unsupported(producer, "block_structure", block)


def _fp8(config: Fields) -> Quantization:
    """Reads `quant_method: fp8` of vLLM and DeepSeek.

    Dynamic inputs have one scale per token, so that a sequence's output does not depend on the batch, or one scale per
    1x128 block if the weights have blocks.
    """
    block, activation_scheme = config.raw("weight_block_size"), config.text("activation_scheme") or "dynamic"
    if (value := config.text("fmt")) not in ("e4m3", "float8_e4m3fn", None):
        raise _unsupported("fp8", "fmt", value)
    if block == [1, MX_BLOCK]:
        return _mx(config)
    if block not in (None, list(BLOCKED_WEIGHT.block)):
        raise _unsupported("fp8", "weight_block_size", block)
    if activation_scheme not in ("static", "dynamic") or (activation_scheme == "static" and block):
        raise _unsupported("fp8", "activation_scheme", activation_scheme)
    inputs = STATIC if activation_scheme == "static" else BLOCKED_INPUT if block else PER_TOKEN
    if (scale_format := config.text("scale_fmt")) not in ("ue8m0", "float", None):
        raise _unsupported("fp8", "scale_fmt", scale_format)
    if scale_format == "ue8m0" and activation_scheme == "dynamic":
        inputs = replace(inputs, scale_format="power_of_2")
    return Quantization((((CLASS,), Scheme("fp8", inputs)),), _fp8_ignored(config), "fp8")


def _fp8_ignored(config: Fields) -> tuple[str, ...]:
    return config.texts("ignored_layers") or config.texts("modules_to_not_convert")


def _mx(config: Fields) -> Quantization:
    """Reads `quant_method: mxfp8` or `mxfp4`, or `fp8` in blocks of 32. Layers in MXFP4 have inputs in BF16."""
    method = config.text("quant_method") or "mx"
    scheme = Scheme(method, UNQUANTIZED, MXFP4) if method == "mxfp4" else Scheme(method, MXFP8)
    return Quantization((((CLASS,), scheme),), _fp8_ignored(config), method)


def _modelopt(config: Fields) -> Quantization:
    """Reads ModelOpt's configuration. An algorithm may be in lower case, and is null if only the cache is FP8."""
    cache, algo = config.text("kv_cache_quant_algo"), config.text("quant_algo")
    if cache is not None and cache.upper() != "FP8":
        raise _unsupported("modelopt", "kv_cache_quant_algo", cache)
    _require_fp8("modelopt", "kv_cache_scheme", config.object("kv_cache_scheme"))
    ignore = tuple(dict.fromkeys((*config.texts("ignore"), *config.texts("exclude_modules"))))
    has_fp8_cache = cache is not None or config.object("kv_cache_scheme") is not None
    if algo is None and has_fp8_cache:
        return Quantization((), ignore, "modelopt", has_fp8_cache)
    if algo is not None and algo.upper() == MODELOPT_MIXED:
        return Quantization((), ignore, "modelopt", has_fp8_cache, _modelopt_modules(config))
    scheme = _modelopt_scheme(algo)
    for group in config.objects("config_groups"):
        if scheme.weight_4bit is not None and scheme.weight_4bit.name == NVFP4.name:
            scheme = replace(scheme, weight_4bit=_with_scale_choice(NVFP4, group.object("weights")))
    return Quantization((((CLASS,), scheme),), ignore, "modelopt", has_fp8_cache)


def _modelopt_scheme(algo: str | None) -> Scheme:
    name = "" if algo is None else algo.upper()
    if name in _MODELOPT_4BIT:
        return Scheme("modelopt", UNQUANTIZED, *_MODELOPT_4BIT[name], has_pre_quant_scales=name == MODELOPT_AWQ)
    if name in MODELOPT:
        return Scheme("modelopt", MODELOPT[name][0])
    raise _unsupported("modelopt", "quant_algo", algo)


def _modelopt_modules(config: Fields) -> dict[str, Scheme]:
    """Returns the schemes of the modules that MIXED_PRECISION lists. Equal ones are one object."""
    layers = config.named_objects("quantized_layers")
    if not layers:
        raise ModelError(f"{config.where} says {MODELOPT_MIXED} and names no module in quantized_layers.")
    schemes: dict[str | None, Scheme] = {}
    modules: dict[str, Scheme] = {}
    for name, layer in layers.items():
        algo = layer.text("quant_algo")
        if algo not in schemes:
            schemes[algo] = _modelopt_scheme(algo)
        modules[(text_tensor_name(f"{name}.") or name).removesuffix(".")] = schemes[algo]
    return modules


def _fbgemm(config: Fields) -> Quantization:
    """Reads Meta's format: scales per output channel and per token. `activation_scale_ub` only limits the latter."""
    return Quantization((((CLASS,), Scheme("fbgemm_fp8", PER_TOKEN)),), _fp8_ignored(config), "fbgemm_fp8")


def _torchao(config: Fields) -> Quantization:
    inputs = torchao.input_spec(config.raw("quant_type"), partial(_unsupported, torchao.METHOD))
    return Quantization((((CLASS,), Scheme(torchao.METHOD, inputs)),), _fp8_ignored(config), torchao.METHOD)


_READERS = {"compressed-tensors": _compressed_tensors, "fp8": _fp8, "fbgemm_fp8": _fbgemm, "modelopt": _modelopt,
            "mxfp8": _mx, "mxfp4": _mx, torchao.METHOD: _torchao}  # fmt: skip


def _unsupported(producer: str, key: str, value: Any) -> ModelError:
    return ModelError(f"The checkpoint is quantized by {producer} with {key} {shown(value)}, which is not supported.")


def to_4bit_scale_inv(name: str, stored: Tensor, rows: int, cols: int) -> Tensor:
    """Returns the scales of a 4-bit weight: E8M0 [rows, cols/32] or E4M3 [rows, cols/16].

    Raises ModelError if the shape or the type fits no such weight, or if a scale is zero, negative, NaN or too large.
    """
    is_mx = stored.dtype in EXPONENT_DTYPES
    spec = MXFP4 if is_mx else NVFP4
    if not is_mx and stored.dtype is not torch.float8_e4m3fn:
        raise ModelError(
            f"{name} is {type_name(stored.dtype)}; the scales of 4-bit weights are exponents of 8 bits (MXFP4) or E4M3 "
            "(NVFP4)."
        )
    if not spec.divides(rows, cols) or tuple(stored.shape) != spec.scale_shape(rows, cols):
        raise ModelError(
            f"{name} has the shape {list(stored.shape)}; a weight of {rows} x {cols} in {spec.name} takes "
            f"{list(spec.scale_shape(rows, cols))}, and the number of columns must be a multiple of {spec.block[1]}."
        )
    if is_mx:
        return check_exponents(name, stored, torch.uint8)
    bits = stored.view(torch.uint8)
    if bool(((bits == 0) | (bits >= 0x7F)).any()):  # zero, NaN, or a sign
        bad = stored.float()[(bits == 0) | (bits >= 0x7F)][0].item()
        raise ModelError(f"{name} holds the scale {bad}, which cannot be served; quantize or calibrate again.")
    return stored


def to_global_scale(name: str, stored: Tensor, note: str | None) -> Tensor:
    """Returns the scale FP32 [] that dequantizes a weight in NVFP4 together with its blocks' scales."""
    if name.endswith(ENCODING_GLOBAL):
        return to_quantizing_scale(name, stored, note)
    return to_quantizing_scale(name, stored).new_tensor(float(check_scale(name, stored)))


def to_pre_quant_scale(name: str, stored: Tensor, cols: int) -> Tensor:
    """Returns the factors of a layer's input, FP32 [cols]. Raises ModelError if the shape or a value is unusable."""
    if tuple(stored.shape) != (cols,):
        raise ModelError(f"{name} has the shape {list(stored.shape)}; an input of {cols} elements takes [{cols}].")
    return check_scale(name, stored)


def to_weight_scale_inv(name: str, stored: Tensor, rows: int, cols: int) -> Tensor:
    """Returns a weight's stored scale in FP32 with the shape [], [rows, 1] or [ceil(rows/128), ceil(cols/128)], or
    that of MX blocks as E8M0 [rows, cols/32].

    Raises ModelError if its shape fits no weight of rows x cols, or if its type or values are invalid.
    """
    mx_shape = MXFP8.scale_shape(rows, cols)
    if stored.dtype is torch.uint8 or (stored.dtype in EXPONENT_DTYPES and tuple(stored.shape) == mx_shape):
        if tuple(stored.shape) != mx_shape or cols % MX_BLOCK:
            raise ModelError(
                f"{name} has the shape {list(stored.shape)}; a weight of {rows} x {cols} in MX blocks takes "
                f"{list(mx_shape)}, and the number of columns must be a multiple of {MX_BLOCK}."
            )
        return check_exponents(name, stored, torch.float8_e4m3fn)
    value = check_scale(name, stored)
    if stored.numel() == 1:
        return value.reshape(())
    specs = weight_specs(is_mx=False)
    shapes = [spec.scale_shape(rows, cols) for spec in specs]
    for spec, shape in zip(specs, shapes, strict=True):
        if tuple(stored.shape) in equivalent_shapes(spec, shape):
            return value.reshape(shape)
    if tuple(stored.shape) == mx_shape:
        raise ModelError(
            f"{name} is {type_name(stored.dtype)} and has the shape {list(stored.shape)} of MX blocks, whose scales "
            "are exponents of 8 bits; store them as uint8 or E8M0."
        )
    raise ModelError(
        f"{name} has the shape {list(stored.shape)}; a weight of {rows} x {cols} takes {format_shapes(shapes)}."
    )


def equivalent_shapes(spec: QuantSpec, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Returns the shapes in which projects store scales that have `shape` in fp8serve."""
    if spec.is_blocked:
        rows, columns = shape
        return {shape, (rows, 1, columns, 1)}
    return {shape, shape[:1]}


def to_dequantizing_scale(scale: Tensor) -> tuple[Tensor, str | None]:
    """Returns the reciprocal of a quantizing scale FP32 [], and a note with the scale if 1 / reciprocal is not the
    scale.

    The file's header holds the note. One scale in six is not the reciprocal of any FP32 number: between sqrt(2) and 2,
    times any power of two, the reciprocals of FP32 numbers are further apart than FP32 numbers.
    """
    stored = scale.reciprocal()
    return stored, None if torch.equal(stored.reciprocal(), scale) else float(scale).hex()


def to_quantizing_scale(name: str, stored: Tensor, note: str | None = None) -> Tensor:
    """Returns the quantizing scale FP32 [] of a stored dequantizing scale.

    The scale in `note` is returned if `stored` is its reciprocal. Raises ModelError if `stored` is not one number, or
    if it or its reciprocal is subnormal.
    """
    if stored.numel() != 1:
        raise ModelError(
            f"{name} has the shape {list(stored.shape)}, but fp8serve supports only one number for the layer."
        )
    value = check_scale(name, stored).reshape(())
    if is_extreme(value):
        size = "small" if value < 1 else "large"
        raise ModelError(f"{name} holds {float(value):.3g}, which is too {size} for a scale; calibrate again.")
    exact = None if note is None else _parse_note(note)
    if exact is not None and torch.equal(to_dequantizing_scale(exact)[0], value):
        return exact
    return value.reciprocal()


def is_extreme(value: Tensor) -> bool:
    """Returns whether a positive FP32 scale of one element, or its reciprocal, is subnormal."""
    number = float(value)
    return number > 0 and min(number, float(value.reciprocal())) < torch.finfo(torch.float32).tiny


def _parse_note(note: str) -> Tensor | None:
    try:
        scale = torch.tensor(float.fromhex(note), dtype=torch.float32)
    except (ValueError, OverflowError):
        return None
    return scale if 0 < float(scale) < float("inf") else None


def check_scale(name: str, stored: Tensor) -> Tensor:
    """Returns `stored` in FP32. Raises ModelError unless every element is positive and finite."""
    if stored.dtype not in SCALE_DTYPES:
        raise ModelError(f"{name} is of the type {type_name(stored.dtype)}, and a scale is FP32, BF16, FP16 or E8M0.")
    value = stored.to(torch.float32, copy=True)
    if not bool((value.isfinite() & (value > 0)).all()):
        bad = value[~(value.isfinite() & (value > 0))].flatten()[0].item()
        raise ModelError(f"{name} holds the scale {bad}, which cannot be served; quantize or calibrate again.")
    return value
