"""Converts a quantized directory to another format without changing the quantized values.

The layout of the source's scales determines the recipe. If a format only has scales per row, the scale of a tensor is
repeated for each row. A conversion that would need to quantize weights again raises ModelError; calibrating the model
in high precision gives better results.

`write_updated_scales` writes a served directory with the engine's current input scales. The server runs it in a
separate process (`python -m fp8serve.model.format_conversion SOURCE OUT UPDATES`), so that neither requests nor the
engine wait while weights are copied. UPDATES is a file with the engine's input scales and amax histories. All other
scales come from SOURCE, or from the file that the server's option --scales named. Quantized weights do not change, and
high-precision weights are quantized as the server quantized them. The last line of output reports an error as JSON.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8serve import __version__
from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.fp8.casting import QuantizedWeight
from fp8serve.fp8.recipe import (
    DelayedScaling,
    Float4WeightOnly,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8WeightOnly,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    as_delayed,
)
from fp8serve.fp8.spec import MXFP8, NVFP4_INPUT, UNQUANTIZED, QuantSpec
from fp8serve.model.checkpoint import kv_scales
from fp8serve.model.export import write_calibrated
from fp8serve.model.formats import FORMATS
from fp8serve.model.formats.interop import BLOCKED_INPUT, PER_TOKEN, STATIC
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, TensorScale, load_scales, read_scales
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.opening import real_path
from fp8serve.model.stored_checkpoint import Checkpoint, StoredLinear, check_agreement, open_checkpoint

_CURRENT = Float8CurrentScaling()
# Recipes by how they quantize inputs. `infer_recipe` returns the first whose weight scales have the file's layout.
_RECIPES: dict[QuantSpec, tuple[Recipe, ...]] = {
    STATIC: (DelayedScaling(amax_history_len=1), DelayedScaling(amax_history_len=1, weight_granularity="row")),
    PER_TOKEN: (Float8CurrentScaling(granularity="row"),),
    QuantSpec(): (_CURRENT,),
    UNQUANTIZED: (
        Float8WeightOnly(),
        Float4WeightOnly("nvfp4"),
        Float4WeightOnly("nvfp4", four_over_six=True),
        Float4WeightOnly("mxfp4"),
    ),
    BLOCKED_INPUT: (Float8BlockScaling(),),
    MXFP8: (MXFP8BlockScaling(),),
    NVFP4_INPUT: (NVFP4BlockScaling(disable_2d_quantization=True, row_scaled_activation=True),),
}
_Linears = dict[str, StoredLinear]  # by name


def convert_format(source: Path | str, out: Path | str, format: str) -> QuantSpec:
    """Writes the quantized model in the directory `source` to `out` in another format, one of FORMATS, and returns how
    its weights are quantized.

    Raises ModelError if `out` exists, the source has no quantized layers, or the format cannot express their scales.
    Raises ScalesError if a scale is unusable.
    """
    checkpoint = open_checkpoint(source)
    if not checkpoint.quantized_linears:
        raise ModelError(
            f"{source} holds no quantized layers to be written as {format}; calibrate it with --format {format}."
        )
    linears = checkpoint.read_quantized(checkpoint.quantized_linears)
    recipe = infer_recipe(checkpoint, linears, format)
    state = read_matching_state(checkpoint, recipe) or collect_scales(checkpoint, linears, recipe)
    _write(out, checkpoint, linears, state, format)
    return recipe.specs.linear["weight"]


def _write(out: Path | str, checkpoint: Checkpoint, linears: _Linears, state: ScalingCheckpoint, format: str) -> None:
    """Writes `out` with the checkpoint's quantized values and the scales of `state`, which have the same layout."""
    assert state.recipe is not None
    weight = state.recipe.specs.linear["weight"]
    write_calibrated(
        out,
        checkpoint.path,
        state,
        quantized={name: expanded_weight(linear, weight) for name, linear in linears.items()},
        matrices=checkpoint.read_quantized(checkpoint.quantized_matrices),
        high_precision=checkpoint.high_precision_linears,
        format=format,
    )


def infer_recipe(checkpoint: Checkpoint, linears: _Linears, format: str) -> Recipe:
    """Returns the recipe with the checkpoint's layout of scales. Raises ModelError if `format` cannot express it."""
    if (name := next((n for n, linear in linears.items() if linear.pre_quant_scale is not None), None)) is not None:
        raise ModelError(
            f"{name} has a pre_quant_scale, which fp8serve does not write; serve {checkpoint.path} as it is, or "
            f"calibrate the model in high precision with --format {format}."
        )
    inputs = {linear.input_spec for linear in linears.values()}
    if len(inputs) > 1:
        raise ModelError(
            f"The layers of {checkpoint.path} quantize their inputs in several ways, which no format here expresses."
        )
    spec = inputs.pop()
    candidates = _RECIPES.get(spec, ())
    if spec == PER_TOKEN and format == "fp8":  # readers of this format quantize dynamic inputs per token
        candidates = (_CURRENT, *candidates)
    matching = [recipe for recipe in candidates if _has_layout(linears, recipe)]
    if not matching:
        weights = ", ".join(sorted({linear.weight_spec.granularity for linear in linears.values()}))
        input_text = f"inputs with a scale per {spec.granularity}" if spec.is_quantized else "unquantized inputs"
        raise ModelError(
            f"{checkpoint.path} has weights with a scale per {weights} and {input_text}, which no recipe of fp8serve "
            f"describes; serve it as it is, or calibrate the model in high precision with --format {format}."
        )
    try:
        matrices = {name: m.specs for name, m in checkpoint.read_quantized(checkpoint.quantized_matrices).items()}
        quantization_files(format, matching[0], kv_cache=False, matrices=matrices)
    except ModelError as error:
        reason = str(error).partition(";")[0].removesuffix(".")
        raise ModelError(
            f"{reason}, so that the weights of {checkpoint.path} would have to be quantized again; calibrate the model "
            f"in high precision with --format {format}, or choose another format."
        ) from None
    return matching[0]


def _has_layout(linears: _Linears, recipe: Recipe) -> bool:
    spec = recipe.specs.linear["weight"]
    weights = [linear.weight_spec for linear in linears.values()]
    if any((weight.name, weight.four_over_six) != (spec.name, spec.four_over_six) for weight in weights):
        return False
    if spec.is_4bit:
        return True
    shapes = ((linear.weight_scale_inv, spec.scale_shape(*linear.weight_q.shape)) for linear in linears.values())
    return all(scale.numel() == 1 or tuple(scale.shape) == shape for scale, shape in shapes)


def expanded_weight(linear: StoredLinear, spec: QuantSpec) -> QuantizedWeight:
    """Returns the weight with its scales in the shape of `spec`; a single FP32 scale is repeated."""
    weight = linear.quantized_weight
    if weight.scale_inv.numel() != 1 or spec.is_4bit:
        return weight
    return weight._replace(scale_inv=weight.scale_inv.reshape(()).repeat(spec.scale_shape(*weight.q.shape)))


def detect_format(source: Path) -> str:
    """Returns the format of the directory's quantized weights if fp8serve writes it, else the default format."""
    config: Any = read_json(source / "config.json").get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    return method if method in FORMATS else FORMATS[0]


def read_matching_state(checkpoint: Checkpoint, recipe: Recipe) -> ScalingCheckpoint | None:
    """Returns the state in the directory's scales.safetensors, or None if it is missing or has another layout."""
    if not present(checkpoint.path / FILE_NAME):
        return None
    state = _read_state(checkpoint, None)
    is_same = state.recipe is not None and _layout(state.recipe) == _layout(recipe)
    return state if is_same else None


def _layout(recipe: Recipe) -> tuple[QuantSpec, ...]:
    return recipe.specs.linear["input"], recipe.specs.linear["weight"]


def collect_scales(checkpoint: Checkpoint, linears: _Linears, recipe: Recipe) -> ScalingCheckpoint:
    """Returns the scales of the checkpoint's tensors as a scaling state without amax histories."""
    tensors = {f"{n}.input": TensorScale(s.input_scale) for n, s in linears.items() if s.input_scale is not None}
    if recipe.specs.linear["weight"].source == "delayed":
        tensors |= {f"{n}.weight": TensorScale(s.weight_scale_inv.reciprocal()) for n, s in linears.items()}
    for layer, (k, v) in kv_scales(checkpoint.path).items():
        owner = f"model.layers.{layer}.self_attn"
        tensors |= {f"{owner}.k": TensorScale(k), f"{owner}.v": TensorScale(v)}
    return ScalingCheckpoint(recipe, tensors, created_by=f"fp8serve {__version__} convert")


def write_updated_scales(source: Path, out: Path, updates: ScalingCheckpoint, scales: Path | None = None) -> None:
    """Writes the directory `source` with the input scales of `updates` to `out` atomically.

    `scales` is the file with the other scales, or None for the directory's own. Raises ModelError or ScalesError if
    `out` exists or no format expresses the weights' scales, and MachineError if `out` cannot be written.
    """
    checkpoint = open_checkpoint(source)
    format = detect_format(source)
    if not checkpoint.quantized_linears:
        state = _replace_scales(_read_state(checkpoint, scales), updates)
        high_precision = [name for name in checkpoint.linears if f"{name}.input" not in state.tensors]
        write_calibrated(out, source, state, high_precision=high_precision, format=format)
        return
    linears = checkpoint.read_quantized(checkpoint.quantized_linears)
    recipe = infer_recipe(checkpoint, linears, format)
    has_file = scales is not None or present(source / FILE_NAME)
    if has_file:
        base = _read_state(checkpoint, scales)
    else:
        base, rules = collect_scales(checkpoint, linears, recipe), as_delayed(updates.recipe)
        if rules is not None and isinstance(recipe, DelayedScaling):  # the engine recorded histories of this length
            base = replace(base, recipe=replace(recipe, amax_history_len=rules.amax_history_len))
    state = _replace_scales(base, updates)
    if state.recipe is None or _layout(state.recipe) != _layout(recipe):
        raise ModelError(
            f"{source} is served with other weight scales than its files hold; write a directory with the served "
            "scales first: fp8serve calibrate."
        )
    _write(out, checkpoint, linears, state, format)


def _replace_scales(base: ScalingCheckpoint, updates: ScalingCheckpoint) -> ScalingCheckpoint:
    tensors = base.tensors | updates.tensors
    return replace(base, tensors=tensors, created_by=f"fp8serve {__version__} serve --roll-history")


def _read_state(checkpoint: Checkpoint, scales: Path | None) -> ScalingCheckpoint:
    path = checkpoint.path / FILE_NAME if scales is None else real_path(scales)
    state = load_scales(path, checkpoint.path)
    if scales is None:
        check_agreement(checkpoint, state, str(path))
    return state


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fp8serve.model.format_conversion", description=__doc__)
    for name in ("source", "out", "updates"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--scales", type=Path)
    arguments = parser.parse_args()
    try:
        write_updated_scales(arguments.source, arguments.out, read_scales(arguments.updates), arguments.scales)
    except Fp8ServeError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
