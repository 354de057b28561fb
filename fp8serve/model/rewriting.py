"""Writes an FP8 directory in another project's format, with the same FP8 values: nothing is rounded again.

The layout of the source's scales determines the recipe. Where a format has only scales per row, the one scale of a
tensor is repeated for each row. Everything else that a format cannot express is refused, because the weights would have
to be rounded again; calibrating the model in high precision gives better results.

`write_rolled` writes a served directory with the current scales of its inputs. The server runs it in a separate process
(`python -m fp8serve.model.rewriting SOURCE OUT MOVED`), so that neither requests nor the engine wait while weights are
copied. MOVED holds the engine's scales of inputs and their histories; everything else comes from SOURCE, and from the
file that --scales names if the server was started with one. FP8 weights stay as they are; weights in high precision are
rounded as serving rounded them. The last line of output reports an error as JSON.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8serve import __version__
from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8WeightOnly,
    Recipe,
    delayed,
)
from fp8serve.fp8.spec import UNQUANTIZED, QuantSpec
from fp8serve.model.checkpoint import kv_scales
from fp8serve.model.export import write_calibrated
from fp8serve.model.formats import FORMATS
from fp8serve.model.formats.interop import BLOCKED_INPUT, PER_TOKEN, STATIC
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, TensorScale, load_scales, read_scales
from fp8serve.model.storage.files import present, read_json
from fp8serve.model.storage.opening import real_path
from fp8serve.model.stored import Checkpoint, StoredLinear, check_agreement, open_checkpoint

_CURRENT = Float8CurrentScaling()
# How inputs are quantized -> the recipes that do so; the first one that scales weights as the file does is taken.
_RECIPES: dict[QuantSpec, tuple[Recipe, ...]] = {
    STATIC: (DelayedScaling(amax_history_len=1), DelayedScaling(amax_history_len=1, weight_granularity="row")),
    PER_TOKEN: (Float8CurrentScaling(granularity="row"),),
    QuantSpec(): (_CURRENT,),
    UNQUANTIZED: (Float8WeightOnly(),),
    BLOCKED_INPUT: (Float8BlockScaling(),),
}
_Stored = dict[str, StoredLinear]


def rewrite(source: Path | str, out: Path | str, format: str) -> None:
    """Write the FP8 model in the directory `source` to `out` in another format, one of FORMATS.

    ModelError: `out` is taken; the source holds no FP8 layers; the format cannot express how they are scaled.
    ScalesError: scales that cannot be served.
    """
    checkpoint = open_checkpoint(source)
    if not checkpoint.fp8_linears:
        raise ModelError(
            f"{source} holds no FP8 layers to be written as {format}; calibrate it with --format {format}."
        )
    stored = stored_linears(checkpoint)
    recipe = recipe_of(checkpoint, stored, format)
    state = retained_state(checkpoint, recipe) or state_of(checkpoint, stored, recipe)
    _write(out, checkpoint, stored, state, format)


def _write(out: Path | str, checkpoint: Checkpoint, stored: _Stored, state: ScalingCheckpoint, format: str) -> None:
    """Write `out` with the FP8 values of the checkpoint and the scales of `state`, whose recipe has their layout."""
    assert state.recipe is not None
    weight = state.recipe.specs.linear["weight"]
    write_calibrated(
        out,
        checkpoint.path,
        state,
        quantized={name: (linear.weight_q, fit_scale(linear, weight)) for name, linear in stored.items()},
        matrices=stored_matrices(checkpoint),
        high_precision=checkpoint.high_precision_linears,
        format=format,
    )


def stored_linears(checkpoint: Checkpoint) -> _Stored:
    """All linears that are stored in FP8, by name."""
    return {name: _stored(checkpoint, name) for name in checkpoint.fp8_linears}


def stored_matrices(checkpoint: Checkpoint) -> _Stored:
    """The other matrices that are stored in FP8, by name."""
    return {name: _stored(checkpoint, name) for name in checkpoint.fp8_matrices}


def _stored(checkpoint: Checkpoint, name: str) -> StoredLinear:
    linear = checkpoint.stored(name)
    if linear is None:
        raise ModelError(f"{checkpoint.path}: {name} is not stored in FP8.")
    return linear


def recipe_of(checkpoint: Checkpoint, stored: _Stored, format: str) -> Recipe:
    """The recipe that has the source's layout and that the format can express."""
    inputs = {linear.input_spec for linear in stored.values()}
    if len(inputs) > 1:
        raise ModelError(
            f"The layers of {checkpoint.path} quantize their inputs in several ways, which no format here expresses."
        )
    spec = inputs.pop()
    known = _RECIPES.get(spec, ())
    if spec == PER_TOKEN and format == "fp8":  # its dynamic inputs are read as one scale for each token
        known = (_CURRENT, *known)
    fitting = [recipe for recipe in known if _has_layout(stored, recipe)]
    if not fitting:
        raise ModelError(
            f"No format here says how {checkpoint.path} scales weights and inputs; calibrate the model in high "
            f"precision with --format {format}."
        )
    _check_expressible(checkpoint, fitting[0], format)
    return fitting[0]


def _check_expressible(checkpoint: Checkpoint, recipe: Recipe, format: str) -> None:
    """ModelError unless the format can express the recipe."""
    try:
        matrices = {name: matrix.specs for name, matrix in stored_matrices(checkpoint).items()}
        quantization_files(format, recipe, kv_cache=False, matrices=matrices)
    except ModelError as refusal:
        reason = str(refusal).partition(";")[0].removesuffix(".")
        raise ModelError(
            f"{reason}, so that the weights of {checkpoint.path} would have to be rounded anew; calibrate the model in "
            f"high precision with --format {format}, or choose another format."
        ) from None


def _has_layout(stored: _Stored, recipe: Recipe) -> bool:
    spec = recipe.specs.linear["weight"]
    shapes = ((linear.weight_scale_inv, spec.scale_shape(*linear.weight_q.shape)) for linear in stored.values())
    return all(scale.numel() == 1 or tuple(scale.shape) == shape for scale, shape in shapes)


def fit_scale(linear: StoredLinear, spec: QuantSpec) -> Tensor:
    """The scale in the shape that weights of this spec have."""
    scale, shape = linear.weight_scale_inv, spec.scale_shape(*linear.weight_q.shape)
    return scale.reshape(()).repeat(shape) if scale.numel() == 1 else scale


def format_of(source: Path) -> str:
    """The format of the directory's FP8 weights, if we can write it; else the default."""
    config: Any = read_json(source / "config.json").get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    return method if method in FORMATS else FORMATS[0]


def retained_state(checkpoint: Checkpoint, recipe: Recipe) -> ScalingCheckpoint | None:
    """The scaling state beside the weights, with its histories, if it has the same layout."""
    if not present(checkpoint.path / FILE_NAME):
        return None
    state = _read_state(checkpoint, None)
    same = state.recipe is not None and layout(state.recipe) == layout(recipe)
    return state if same else None


def layout(recipe: Recipe) -> tuple[QuantSpec, ...]:
    """How inputs and weights are scaled."""
    return recipe.specs.linear["input"], recipe.specs.linear["weight"]


def state_of(checkpoint: Checkpoint, stored: _Stored, recipe: Recipe) -> ScalingCheckpoint:
    """The scales of the file as a state without histories."""
    tensors = {f"{n}.input": TensorScale(s.input_scale) for n, s in stored.items() if s.input_scale is not None}
    if recipe.specs.linear["weight"].source == "delayed":
        tensors |= {f"{n}.weight": TensorScale(s.weight_scale_inv.reciprocal()) for n, s in stored.items()}
    for layer, (k, v) in kv_scales(checkpoint.path).items():
        owner = f"model.layers.{layer}.self_attn"
        tensors |= {f"{owner}.k": TensorScale(k), f"{owner}.v": TensorScale(v)}
    return ScalingCheckpoint(recipe, tensors, created_by=f"fp8serve {__version__} convert")


def write_rolled(source: Path, out: Path, moved: ScalingCheckpoint, scales: Path | None = None) -> None:
    """Write `source` with the scales of inputs that `moved` holds to `out`, whole or not at all.

    ModelError, ScalesError: `out` is taken; no format says how the weights are scaled. MachineError: the place cannot
    be written.
    """
    checkpoint = open_checkpoint(source)
    format = format_of(source)
    if not checkpoint.fp8_linears:
        state = _replace_scales(moved, _read_state(checkpoint, scales))
        high_precision = [name for name in checkpoint.linears if f"{name}.input" not in state.tensors]
        write_calibrated(out, source, state, high_precision=high_precision, format=format)
        return
    stored = stored_linears(checkpoint)
    recipe = recipe_of(checkpoint, stored, format)
    has_file = scales is not None or present(source / FILE_NAME)
    base = _read_state(checkpoint, scales) if has_file else _state_of_weights(moved, checkpoint, stored, recipe)
    state = _replace_scales(moved, base)
    if state.recipe is None or layout(state.recipe) != layout(recipe):
        raise ModelError(
            f"The weights of {source} are served with other scales than they are stored with; write them first: "
            "fp8serve calibrate."
        )
    _write(out, checkpoint, stored, state, format)


def _replace_scales(moved: ScalingCheckpoint, base: ScalingCheckpoint) -> ScalingCheckpoint:
    tensors = base.tensors | moved.tensors
    return replace(base, tensors=tensors, created_by=f"fp8serve {__version__} serve --roll-history")


def _state_of_weights(
    moved: ScalingCheckpoint, checkpoint: Checkpoint, stored: _Stored, recipe: Recipe
) -> ScalingCheckpoint:
    """The scales stored with the weights; they had no histories, and the engine began new ones."""
    rules = delayed(moved.recipe)
    if rules is not None and isinstance(recipe, DelayedScaling):
        recipe = replace(recipe, amax_history_len=rules.amax_history_len)
    return state_of(checkpoint, stored, recipe)


def _read_state(checkpoint: Checkpoint, scales: Path | None) -> ScalingCheckpoint:
    path = checkpoint.path / FILE_NAME if scales is None else real_path(scales)
    state = load_scales(path, checkpoint.path)
    if scales is None:
        check_agreement(checkpoint, state, str(path))
    return state


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fp8serve.model.rewriting", description=__doc__)
    for name in ("source", "out", "moved"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--scales", type=Path)
    arguments = parser.parse_args()
    try:
        write_rolled(arguments.source, arguments.out, read_scales(arguments.moved), arguments.scales)
    except Fp8ServeError as problem:
        print(json.dumps({"error": type(problem).__name__, "message": str(problem)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
