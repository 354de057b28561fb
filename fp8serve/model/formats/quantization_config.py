"""Writes `quantization_config` and hf_quant_config.json as each format's own tools do.

The layouts are those of compressed-tensors (as llm-compressor writes it), vLLM's `quant_method: fp8`, and ModelOpt. The
reader of compressed-tensors refuses unknown keys, so fp8serve adds none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8serve.errors import ModelError
from fp8serve.fp8.recipe import Recipe, name_of
from fp8serve.fp8.spec import QuantSpec
from fp8serve.model.formats import FORMATS
from fp8serve.model.formats.interop import CT_INPUTS, CT_WEIGHTS, MODELOPT
from fp8serve.model.formats.targets import CLASS

IGNORED = ["lm_head"]
Specs = tuple[QuantSpec | None, QuantSpec]  # of the input, which is None for an embedding, and of the weight
_CT_FORMATS = {
    "FP8": "float-quantized",
    "MXFP8": "mxfp8-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
}
NO_MATRICES: Mapping[str, Specs] = {}


def quantization_files(
    format_: str,
    recipe: Recipe,
    kv_cache: bool,
    high_precision: Sequence[str] = (),
    matrices: Mapping[str, Specs] = NO_MATRICES,
    has_input_scales: bool = False,
) -> dict[str, Any]:
    """Returns the `quantization_config` for config.json under that key, and the JSON of other files by file name.

    `high_precision` are the names of linears and routers that are not quantized, without `lm_head`. `matrices` are the
    specs of FP8 matrices outside the decoder layers, by name. `has_input_scales` is about inputs in NVFP4: whether the
    files have a scale for each layer. Raises ModelError if the format cannot express them.
    """
    ignored = [name for name in (*IGNORED, *high_precision) if name not in matrices]
    if format_ not in FORMATS:
        raise ModelError(f"The format {format_!r} does not exist; choose one of {', '.join(FORMATS)}.")
    if format_ == "compressed-tensors":
        return {"quantization_config": _compressed_tensors(recipe, kv_cache, ignored, matrices, has_input_scales)}
    layers = recipe.specs.linear
    for name, (inputs, weight) in matrices.items():
        differs = inputs is not None and _input_scheme(inputs) != _input_scheme(layers["input"])
        if differs or weight.granularity != layers["weight"].granularity:
            raise ModelError(
                f"The format {format_!r} cannot express that {name} is in FP8 and scaled otherwise than the layers; "
                "write compressed-tensors."
            )
    if format_ == "modelopt":
        if layers["input"].is_4bit and not has_input_scales:
            raise ModelError(
                "The format 'modelopt' needs a scale for every input in NVFP4, which calibration measures and training "
                "does not; use compressed-tensors."
            )
        return _modelopt(recipe, kv_cache, ignored)
    return {"quantization_config": _fp8(recipe, ignored)}


def _input_scheme(inputs: QuantSpec) -> tuple[Any, ...]:
    """Returns the properties of an input's spec that these formats distinguish."""
    return inputs.element, inputs.for_serving().source, inputs.is_blocked


def _ct_args(strategy: str, dynamic: bool | str, observer: str | None, **sizes: Any) -> dict[str, Any]:
    return {
        "num_bits": sizes.get("num_bits", 8),
        "type": "float",
        "symmetric": True,
        "group_size": sizes.get("group_size"),
        "strategy": strategy,
        "block_structure": sizes.get("block_structure"),
        "dynamic": dynamic,
        "actorder": None,
        "scale_dtype": sizes.get("scale_dtype"),
        "zp_dtype": sizes.get("zp_dtype"),
        "observer": observer,
        "observer_kwargs": sizes.get("observer_kwargs", {}),
    }


def _compressed_tensors(
    recipe: Recipe, kv_cache: bool, ignored: list[str], matrices: Mapping[str, Specs], has_input_scales: bool
) -> dict[str, Any]:
    groups: dict[Specs, list[str]] = {}
    for name, specs in matrices.items():
        groups.setdefault(specs, []).append(name)
    layer_specs = recipe.specs.linear["input"], recipe.specs.linear["weight"].for_serving()
    layers = _ct_group([CLASS], layer_specs, has_input_scales)
    return {
        "config_groups": {"group_0": layers}
        | {f"group_{i}": _ct_group(names, specs) for i, (specs, names) in enumerate(groups.items(), 1)},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": _ct_args("tensor", False, "memoryless_minmax") if kv_cache else None,
        "format": layers["format"],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ignored,
    }


def _ct_group(targets: list[str], specs: Specs, has_input_scales: bool = False) -> dict[str, Any]:
    inputs, weight = specs
    block = list(weight.block) if weight.is_blocked else None
    sizes = _block_sizes(weight) if weight.is_mx or weight.is_4bit else {"block_structure": block}
    return {
        "targets": targets,
        "weights": _ct_args(CT_WEIGHTS[weight.granularity], False, "memoryless_minmax", **sizes),
        "input_activations": _ct_inputs(inputs, has_input_scales),
        "output_activations": None,
        "format": _CT_FORMATS[weight.name],
    }


def _ct_inputs(spec: QuantSpec | None, has_input_scales: bool) -> dict[str, Any] | None:
    if spec is None or spec.element == "bf16":
        return None
    if spec.is_4bit:  # "local": the FP32 scale is in the file, and those of blocks come from the data
        dynamic, observer = ("local", "static_minmax") if has_input_scales else (True, None)
        return _ct_args(CT_WEIGHTS[spec.granularity], dynamic, observer, **_block_sizes(spec))
    if spec.source != "current":
        return _ct_args("tensor", False, "static_minmax")
    sizes = _block_sizes(spec) if spec.is_mx else {"group_size": spec.block[1]}
    return _ct_args(CT_INPUTS[spec.granularity], True, None, **sizes)


def _block_sizes(spec: QuantSpec) -> dict[str, Any]:
    dtype = "torch.uint8" if spec.is_mx else "torch.float8_e4m3fn"
    sizes: dict[str, Any] = {"group_size": spec.block[1], "scale_dtype": dtype}
    if spec.is_4bit:
        sizes |= {"num_bits": 4, "zp_dtype": dtype, "observer_kwargs": _scale_choice(spec)}
    return sizes


def _scale_choice(spec: QuantSpec) -> dict[str, Any]:
    """Records how the cast chose the scales of a 4-bit weight, so that `merge` casts it again in the same way."""
    return {"four_over_six": True} if spec.four_over_six else {}


def _fp8(recipe: Recipe, ignored: list[str]) -> dict[str, Any]:
    weight, inputs = recipe.specs.linear["weight"], recipe.specs.linear["input"]
    if inputs.is_mx or inputs.is_4bit:
        raise ModelError(
            f"The format 'fp8' cannot express the recipe {name_of(recipe)!r}; use compressed-tensors or modelopt."
        )
    if not inputs.is_fp8:
        raise ModelError(f"The format 'fp8' always quantizes inputs; write {name_of(recipe)!r} as compressed-tensors.")
    if weight.is_blocked:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(weight.block),
            "ignored_layers": ignored,
        }
    if weight.granularity == "row":
        raise ModelError("The format 'fp8' has no scale per output channel; write compressed-tensors.")
    scheme = "dynamic" if inputs.source == "current" else "static"
    return {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ignored}


def _modelopt(recipe: Recipe, kv_cache: bool, ignored: list[str]) -> dict[str, Any]:
    inputs, weight = (recipe.specs.linear[role].for_serving() for role in ("input", "weight"))
    inputs = inputs.independent_of_batch() if inputs.is_4bit else inputs
    scheme = (inputs if inputs.is_mx or inputs.is_4bit else replace(inputs, scale_format="fp32")), weight.granularity
    algo = next((name for name, entry in MODELOPT.items() if entry == scheme and weight.name != "MXFP4"), None)
    if algo is None:
        raise ModelError(
            f"The format 'modelopt' cannot express the recipe {name_of(recipe)!r}; use compressed-tensors."
        )
    producer = {"name": "modelopt", "version": "fp8serve"}  # readers recognize the format by this name
    args = {"dynamic": False, "num_bits": 8, "type": "float"}
    config: dict[str, Any] = {"ignore": ignored, "quant_algo": algo, "producer": producer, "quant_method": "modelopt"}
    if algo == "FP8":
        config["config_groups"] = {"group_0": {"input_activations": args, "weights": args, "targets": ["Linear"]}}
    if weight.is_4bit:
        weights = args | {"num_bits": 4, "group_size": weight.block[1]}
        group = {"input_activations": weights} if inputs.is_4bit else {}
        group["weights"] = weights | _scale_choice(weight)
        config["config_groups"] = {"group_0": {**group, "targets": ["Linear"]}}
    if kv_cache:
        config["kv_cache_scheme"] = args
    quantization = {
        "quant_algo": algo,
        "kv_cache_quant_algo": "FP8" if kv_cache else None,
        "exclude_modules": ignored,
        **({"group_size": weight.block[1]} if weight.name in ("MXFP8", "NVFP4") else {}),
    }
    return {"quantization_config": config, "hf_quant_config.json": {"producer": producer, "quantization": quantization}}
