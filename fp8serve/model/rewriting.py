"""Writes an FP8 directory in another project's format, with the same FP8 values: nothing is rounded again.

The layout of the source's scales determines the recipe. Where a format has only scales per row, the one scale of a
tensor is repeated for each row. Everything else that a format cannot express is refused, because the weights would have
to be rounded again; calibrating the model in high precision gives better results.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from fp8serve import __version__
from fp8serve.errors import ModelError
from fp8serve.fp8.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Float8WeightOnly, Recipe
from fp8serve.fp8.spec import UNQUANTIZED, QuantSpec
from fp8serve.model.checkpoint import kv_scales
from fp8serve.model.export import write_calibrated
from fp8serve.model.formats import FORMATS
from fp8serve.model.formats.interop import BLOCKED_INPUT, PER_TOKEN, STATIC
from fp8serve.model.formats.quantization_config import quantization_files
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint, TensorScale, load_scales
from fp8serve.model.storage.files import present, read_json
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
    weight = recipe.specs.linear["weight"]
    quantized = {name: (linear.weight_q, fitted(linear, weight)) for name, linear in stored.items()}
    matrices = stored_matrices(checkpoint)
    high_precision = checkpoint.high_precision_linears
    write_calibrated(
        out, source, state, quantized=quantized, matrices=matrices, high_precision=high_precision, format=format
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
    fitting = [recipe for recipe in known if _fits(stored, recipe)]
    if not fitting:
        raise ModelError(
            f"No format here says how {checkpoint.path} scales weights and inputs; calibrate the model in high "
            f"precision with --format {format}."
        )
    _check_sayable(checkpoint, fitting[0], format)
    return fitting[0]


def _check_sayable(checkpoint: Checkpoint, recipe: Recipe, format: str) -> None:
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


def _fits(stored: _Stored, recipe: Recipe) -> bool:
    spec = recipe.specs.linear["weight"]
    shapes = ((linear.weight_scale_inv, spec.scale_shape(*linear.weight_q.shape)) for linear in stored.values())
    return all(scale.numel() == 1 or tuple(scale.shape) == shape for scale, shape in shapes)


def fitted(linear: StoredLinear, spec: QuantSpec) -> Tensor:
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
    path = checkpoint.path / FILE_NAME
    if not present(path):
        return None
    state = load_scales(path, checkpoint.path)
    check_agreement(checkpoint, state, str(path))
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
