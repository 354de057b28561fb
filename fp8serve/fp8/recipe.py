"""FP8 recipes: immutable data that define how tensors are quantized.

A recipe defines everything that affects the numbers of a quantized layer: the formats, the source of the scales, and
which of the three GEMMs of a linear layer run in high precision. Calibration, training and serving use the same object,
and files store it as JSON. This module does not import torch, so the command line can read a recipe without waiting for
torch.

Other modules do not distinguish the classes. They read `recipe.specs`, which has the QuantSpec of each tensor
(spec.py), and `as_delayed(recipe)`, which has the parameters of delayed scaling.

Recipes have no base class (`Recipe` is a union), and no defaults come from the environment.
"""

import json
from collections.abc import Callable
from dataclasses import InitVar, asdict, dataclass, replace
from enum import Enum
from inspect import signature
from typing import Any, ClassVar, Literal, get_args

from fp8serve.errors import RecipeError, json_fault, shown
from fp8serve.fp8.amax_rules import RULES, RuleName
from fp8serve.fp8.spec import (
    MXFP4,
    MXFP8,
    NVFP4,
    UNQUANTIZED,
    ElementFormat,
    QuantSpec,
    RecipeSpecs,
    ScaleFormat,
    specs_of,
)

AmaxAlgo = RuleName | Callable[[Any], Any]
ScaleAlgo = Callable[[Any, Any, float, Any], Any]
Precisions = tuple[bool, bool, bool]
# command-line names of the recipes for training
Fp8Name = Literal["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"]
RecipeName = Literal[Fp8Name, "bf16"]
# command-line names of the recipes for serving
ServedName = Literal[Fp8Name, "w8a16", "nvfp4-w4a16", "mxfp4-w4a16"]
RecipeChoice = Literal["stored", ServedName, "bf16"]  # "stored": the recipe of the model directory
HeadDtype = Literal["bf16", "fp8"]  # the dtype of the lm_head weight, which the recipe does not determine

MAX_MARGIN = 8  # with a larger margin, fp8_max / 2^margin / amax leaves the range of FP32 for the largest amax


class Format(Enum):
    """The FP8 formats of the forward and the backward pass. HYBRID is E4M3 in forward and E5M2 in backward.

    The largest value of E4M3 is 448, that of E5M2 is 57344.
    """

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    @property
    def forward(self) -> ElementFormat:
        """The format of activations and weights: "e4m3" or "e5m2"."""
        return "e5m2" if self is Format.E5M2 else "e4m3"

    @property
    def backward(self) -> ElementFormat:
        """The format of gradients: "e4m3" or "e5m2"."""
        return "e4m3" if self is Format.E4M3 else "e5m2"


class _HasSpecs:
    """A mixin for recipes that holds their specs, which are computed once when the recipe is created."""

    specs: RecipeSpecs

    def _set_specs(self, specs: RecipeSpecs) -> None:
        object.__setattr__(self, "specs", specs)


def _check_common(recipe: "Recipe") -> None:
    if not isinstance(recipe.fp8_format, Format):
        raise RecipeError(
            f"fp8_format must be a Format, found {recipe.fp8_format!r}; use Format.HYBRID or Format.E4M3."
        )
    if recipe.fp8_format is Format.E5M2:
        raise RecipeError("fp8_format=Format.E5M2 keeps 2 bits of weights and activations; use Format.HYBRID.")
    override = recipe.override_linear_precision
    if not isinstance(override, tuple) or [type(o) for o in override] != [bool] * 3:
        raise RecipeError(
            f"override_linear_precision must be three booleans (fprop, dgrad, wgrad), found {override!r}."
        )


def _apply_backward_override(recipe: "Recipe", precision: str | None) -> None:
    """Sets `override_linear_precision` of dgrad and wgrad as Transformer Engine's `backward_override` says."""
    if precision not in (None, "high_precision"):
        raise RecipeError(f'backward_override must be None or "high_precision", found {precision!r}.')
    if precision is not None:
        override = (recipe.override_linear_precision[0], True, True)
        object.__setattr__(recipe, "override_linear_precision", override)


def _check_flags(recipe: "Recipe", *names: str) -> None:
    for name in names:
        if not isinstance(getattr(recipe, name), bool):
            raise RecipeError(f"{name} must be True or False, found {getattr(recipe, name)!r}.")


def _scale_format(power_2: bool) -> ScaleFormat:
    return "power_of_2" if power_2 else "fp32"


def _check_granularity(name: str, value: object) -> None:
    if value not in ("tensor", "row"):
        raise RecipeError(f'{name} must be "tensor" or "row", found {value!r}.')


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RecipeError(f"{name} must be a whole number from {low} to {high}, found {value!r}.")


@dataclass(frozen=True)
class DelayedScaling(_HasSpecs):
    """Delayed scaling: one scale per tensor, computed from the amaxes of earlier steps (docs/numerics.md).

    The scale is `(fp8_max / 2^margin) / amax`. It is known before the step, so quantizing reads the tensor only once.

    Args:
        margin: Lowers the scale by a factor of 2^margin.
        interval: The scale is recomputed on the first recorded step and then on every `interval`-th.
        fp8_format: The FP8 formats of the forward and the backward pass.
        amax_history_len: The number of slots of the amax history.
        amax_compute_algo: Reduces the history to an amax: "max", "most_recent", or a callable `history [N] -> amax []`.
        scaling_factor_compute_algo: A callable `(amax, old_scale, fp8_max, recipe) -> scale` that replaces the formula.
        override_linear_precision: Which of fprop, dgrad, wgrad run in high precision.
        reduce_amax: Whether amaxes are reduced over a process group.
        fp8_dpa: Whether dot-product attention runs in FP8.
        fp8_mha: Like `fp8_dpa`, and the attention output stays in FP32 until the projection after it casts it to FP8.
        power_2_scale: Whether the scale is rounded down to a power of two.
        weight_granularity: "row" gives a weight one current scale per output channel. Inputs and gradients keep their
            delayed scales.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgo = "max"
    scaling_factor_compute_algo: ScaleAlgo | None = None
    override_linear_precision: Precisions = (False, False, False)
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    power_2_scale: bool = False
    weight_granularity: Literal["tensor", "row"] = "tensor"

    def __post_init__(self) -> None:
        _check_common(self)
        _check_flags(self, "reduce_amax", "fp8_dpa", "fp8_mha", "power_2_scale")
        _check_granularity("weight_granularity", self.weight_granularity)
        _check_int("margin", self.margin, -MAX_MARGIN, MAX_MARGIN)
        _check_int("interval", self.interval, 1, 2**31 - 1)
        _check_int("amax_history_len", self.amax_history_len, 1, 2**20)
        if self.amax_compute_algo not in RULES and not callable(self.amax_compute_algo):
            names = ", ".join(f'"{name}"' for name in RULES)
            raise RecipeError(f"amax_compute_algo must be {names} or a callable, found {self.amax_compute_algo!r}.")
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise RecipeError(
                f"scaling_factor_compute_algo must be None or a callable, found {self.scaling_factor_compute_algo!r}."
            )
        base = QuantSpec(self.fp8_format.forward, "tensor", _scale_format(self.power_2_scale), "delayed")
        rows = replace(base, granularity="row", source="current") if self.weight_granularity == "row" else None
        specs = specs_of(base, self.fp8_format.backward, rows, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        self._set_specs(specs)


@dataclass(frozen=True)
class Float8CurrentScaling(_HasSpecs):
    """Current scaling: the scale of a tensor is computed from its own amax.

    `granularity="row"` gives each token and each output channel a scale. `backward_override="high_precision"` is
    Transformer Engine's parameter for dgrad and wgrad in high precision; it sets `override_linear_precision`. The other
    parameters are those of `DelayedScaling`.
    """

    fp8_format: Format = Format.HYBRID
    power_2_scale: bool = False
    granularity: Literal["tensor", "row"] = "tensor"
    override_linear_precision: Precisions = (False, False, False)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: InitVar[str | None] = None

    def __post_init__(self, backward_override: str | None) -> None:
        _check_common(self)
        _check_flags(self, "power_2_scale", "fp8_dpa", "fp8_mha")
        _apply_backward_override(self, backward_override)
        _check_granularity("granularity", self.granularity)
        base = QuantSpec(self.fp8_format.forward, self.granularity, _scale_format(self.power_2_scale))
        self._set_specs(specs_of(base, self.fp8_format.backward, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha))


@dataclass(frozen=True)
class Float8BlockScaling(_HasSpecs):
    """Block scaling: activations and gradients have one scale per 1x128 block along the contracted dimension, weights
    one per 128x128 block.

    Transformer Engine's default is `power_2_scale=True`. The parameters are those of `Float8CurrentScaling`.
    """

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = False
    override_linear_precision: Precisions = (False, False, False)
    backward_override: InitVar[str | None] = None

    def __post_init__(self, backward_override: str | None) -> None:
        _check_common(self)
        _check_flags(self, "power_2_scale")
        _apply_backward_override(self, backward_override)
        base = QuantSpec(self.fp8_format.forward, "block1x128", _scale_format(self.power_2_scale))
        self._set_specs(specs_of(base, self.fp8_format.backward, replace(base, granularity="block128x128")))


@dataclass(frozen=True)
class MXFP8BlockScaling(_HasSpecs):
    """MXFP8: 32 consecutive elements share a scale, a power of two in one byte (E8M0), along the contracted dimension.

    The scale is the smallest power of two with which the largest element does not exceed the format's maximum. The
    parameters are those of Transformer Engine; `margin` must be 0: with such a scale no value saturates.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    override_linear_precision: Precisions = (False, False, False)
    backward_override: InitVar[str | None] = None

    def __post_init__(self, backward_override: str | None) -> None:
        _check_common(self)
        _apply_backward_override(self, backward_override)
        if type(self.margin) is not int or self.margin != 0:
            raise RecipeError(f"margin must be 0 in MXFP8BlockScaling, found {self.margin!r}.")
        self._set_specs(specs_of(MXFP8, self.fp8_format.backward))


@dataclass(frozen=True)
class NVFP4BlockScaling(_HasSpecs):
    """NVFP4 for weights, inputs and gradients: E2M1 elements of 4 bits, an E4M3 scale for 16 consecutive elements, and
    an FP32 scale for the tensor. The parameters are those of Transformer Engine.

    Args:
        disable_rht: The operands of wgrad are not rotated by the random Hadamard transform.
        disable_stochastic_rounding: Gradients are rounded to nearest.
        disable_2d_quantization: Weights have blocks of 1x16 and not of 16x16. A block of 16x16 gives both directions
            the same values.
        row_scaled_activation: Each token has an FP32 scale of its own, so its result does not depend on the batch.
            Transformer Engine's default is False, and that of the command-line recipe "nvfp4" is True.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    fp8_format: ClassVar[Format] = Format.E4M3  # of an FP8 KV cache
    override_linear_precision: Precisions = (False, False, False)
    backward_override: InitVar[str | None] = None

    def __post_init__(self, backward_override: str | None) -> None:
        _check_common(self)
        _check_flags(self, "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
        _check_flags(self, "row_scaled_activation")
        _apply_backward_override(self, backward_override)
        rotated = replace(NVFP4, rotated=not self.disable_rht)
        linear = {
            "input": replace(rotated, row_scaled=self.row_scaled_activation),
            "weight": NVFP4 if self.disable_2d_quantization else replace(NVFP4, granularity="block16x16"),
            "grad_output": replace(rotated, stochastic=not self.disable_stochastic_rounding),
        }
        self._set_specs(RecipeSpecs(linear))


@dataclass(frozen=True)
class Float8WeightOnly(_HasSpecs):
    """Weight-only quantization: FP8 weights and BF16 activations. The recipe is for serving and cannot train.

    The weight has one current scale per output channel ("row") or a single one ("tensor").
    """

    weight_granularity: Literal["tensor", "row"] = "row"
    power_2_scale: bool = False
    fp8_format: ClassVar[Format] = Format.E4M3
    override_linear_precision: ClassVar[Precisions] = (False, False, False)

    def __post_init__(self) -> None:
        _check_flags(self, "power_2_scale")
        _check_granularity("weight_granularity", self.weight_granularity)
        weight = QuantSpec("e4m3", self.weight_granularity, _scale_format(self.power_2_scale))
        self._set_specs(specs_of(UNQUANTIZED, "bf16", weight))


@dataclass(frozen=True)
class Float4WeightOnly(_HasSpecs):
    """Weight-only quantization to 4 bits: E2M1 weights and BF16 activations. The recipe is for serving and cannot
    train.

    Args:
        format: "nvfp4" has an E4M3 scale for 16 consecutive elements and an FP32 scale for the tensor; "mxfp4" has a
            power of two for 32 consecutive elements.
        four_over_six: Whether the largest element of an NVFP4 block becomes 4 instead of 6 where that reduces the
            squared error of the block: 4 has closer neighbours than 6.
    """

    format: Literal["nvfp4", "mxfp4"] = "nvfp4"
    four_over_six: bool = False
    fp8_format: ClassVar[Format] = Format.E4M3  # of an FP8 KV cache
    override_linear_precision: ClassVar[Precisions] = (False, False, False)

    def __post_init__(self) -> None:
        _check_flags(self, "four_over_six")
        if self.format not in ("nvfp4", "mxfp4"):
            raise RecipeError(f'format must be "nvfp4" or "mxfp4", found {self.format!r}.')
        if self.four_over_six and self.format == "mxfp4":
            raise RecipeError("four_over_six needs the format nvfp4: the scales of mxfp4 are powers of two.")
        weight = MXFP4 if self.format == "mxfp4" else replace(NVFP4, four_over_six=self.four_over_six)
        self._set_specs(specs_of(UNQUANTIZED, "bf16", weight))


Recipe = (
    DelayedScaling
    | Float8CurrentScaling
    | Float8BlockScaling
    | MXFP8BlockScaling
    | NVFP4BlockScaling
    | Float8WeightOnly
    | Float4WeightOnly
)

_CLASSES: dict[str, type[Recipe]] = {c.__name__: c for c in get_args(Recipe)}
_NAMED: dict[ServedName, tuple[type[Recipe], dict[str, Any]]] = {
    "delayed": (DelayedScaling, {}),
    "current": (Float8CurrentScaling, {}),
    "rowwise": (Float8CurrentScaling, {"granularity": "row"}),
    "block": (Float8BlockScaling, {}),
    "mxfp8": (MXFP8BlockScaling, {}),
    "nvfp4": (NVFP4BlockScaling, {"row_scaled_activation": True}),
    "w8a16": (Float8WeightOnly, {}),
    "nvfp4-w4a16": (Float4WeightOnly, {"format": "nvfp4"}),
    "mxfp4-w4a16": (Float4WeightOnly, {"format": "mxfp4"}),
}
# Parameters that did not exist in the first version, with the value that gives its behavior. JSON contains such a
# parameter only if it has another value, so that older versions can read the files.
_ADDED_PARAMETERS: dict[type[Recipe], dict[str, Any]] = {
    DelayedScaling: {"power_2_scale": False, "weight_granularity": "tensor"}
}


def uses_fp8_attention(recipe: Recipe | None) -> bool:
    """Returns whether attention runs in FP8 (`fp8_dpa` or `fp8_mha`)."""
    return recipe is not None and bool(recipe.specs.attention)


def depends_on_batch(recipe: Recipe | None) -> bool:
    """Returns whether a token's result depends on the other tokens, because the whole input has one current scale."""
    if recipe is None or recipe.override_linear_precision[0]:
        return False
    return recipe.specs.linear["input"].depends_on_batch


def can_train(recipe: Recipe | None) -> bool:
    """Returns whether a model can be trained with the recipe, or in high precision if it is None."""
    return not isinstance(recipe, Float8WeightOnly | Float4WeightOnly)


def recipe_for_calibration(recipe: Recipe) -> Recipe:
    """Returns the recipe with which a model is calibrated: without training, blocks of 1x16 are more accurate."""
    return replace(recipe, disable_2d_quantization=True) if isinstance(recipe, NVFP4BlockScaling) else recipe


def as_delayed(recipe: Recipe | None) -> DelayedScaling | None:
    """Returns the recipe if it is DelayedScaling, else None. Other recipes have no scaling states."""
    return recipe if isinstance(recipe, DelayedScaling) else None


def with_amax_reduction(recipe: Recipe | None, reduce_amax: bool) -> Recipe | None:
    """Returns a DelayedScaling recipe with this value of `reduce_amax`, and any other recipe unchanged."""
    return replace(recipe, reduce_amax=reduce_amax) if isinstance(recipe, DelayedScaling) else recipe


def has_tensor_scales(recipe: Recipe) -> bool:
    """Returns whether every tensor of a linear layer has one scale for the whole tensor."""
    return all(spec.granularity == "tensor" for spec in recipe.specs.linear.values())


def fp8_gather_obstacle(recipe: Recipe | None) -> str | None:
    """Returns the reason why weights cannot be gathered in FP8 (fsdp.py), as a clause, or None if they can."""
    if recipe is None:
        return "the recipe is bf16"
    if any(recipe.override_linear_precision[:2]):
        return "fprop or dgrad is in high precision"
    return None if has_tensor_scales(recipe) else "the recipe has many scales for a weight"


def _build(cls: type[Recipe], options: dict[str, Any]) -> Recipe:
    known = signature(cls).parameters  # unlike `fields`, with backward_override
    for name in options:
        if name not in known:
            raise RecipeError(f"{cls.__name__} has no parameter {name!r}; it has {', '.join(known)}.")
    return cls(**options)


def from_name(name: str, **overrides: Any) -> Recipe | None:
    """Returns the recipe of a command-line name, such as "delayed" or "mxfp8", and None for "bf16".

    `overrides` replace its parameters. Raises RecipeError for an unknown name or an unknown or invalid parameter.
    """
    if name == "bf16":
        if overrides:
            raise RecipeError(f"The recipe 'bf16' has no parameters, found {', '.join(overrides)}.")
        return None
    if name not in _NAMED:
        raise RecipeError(f"There is no recipe {name!r}; choose one of {', '.join((*_NAMED, 'bf16'))}.")
    cls, preset = _NAMED[name]
    return _build(cls, preset | overrides)


def name_of(recipe: Recipe | None) -> str:
    """Returns the command-line name of a recipe, whatever its parameters."""
    if recipe is None:
        return "bf16"
    if isinstance(recipe, Float8CurrentScaling):
        return "rowwise" if recipe.granularity == "row" else "current"
    if isinstance(recipe, Float4WeightOnly):
        return f"{recipe.format}-w4a16"
    return next(name for name, (cls, _) in _NAMED.items() if isinstance(recipe, cls))


def to_json(recipe: Recipe | None) -> str:
    """Returns one line of JSON for `from_json`; None (bf16) becomes `null`.

    Raises RecipeError for a recipe with a callable, because code cannot be stored in a file.
    """
    if recipe is None:
        return "null"
    omitted = _ADDED_PARAMETERS.get(type(recipe), {}).items()
    data = {name: value for name, value in asdict(recipe).items() if (name, value) not in omitted}
    for name, value in data.items():
        if callable(value) and not isinstance(value, Format):
            raise RecipeError(
                f"{name} is a function and cannot be stored; use a named algorithm in recipes that are saved."
            )
    data |= {"fp8_format": recipe.fp8_format.name} if "fp8_format" in data else {}
    return json.dumps({"recipe": type(recipe).__name__} | data)


def _decode(data: dict[str, Any]) -> dict[str, Any]:
    if "fp8_format" in data:
        if data["fp8_format"] not in Format.__members__:
            raise RecipeError(f"fp8_format {data['fp8_format']!r} does not exist; use {', '.join(Format.__members__)}.")
        data["fp8_format"] = Format[data["fp8_format"]]
    if isinstance(data.get("override_linear_precision"), list):
        data["override_linear_precision"] = tuple(data["override_linear_precision"])
    return data


def from_json(text: str) -> Recipe | None:
    """Returns the recipe that `to_json` has written. Raises RecipeError for other text and for unknown parameters."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"The recipe {shown(text)} is not valid JSON: {json_fault(error)}.") from None
    if data is None:
        return None
    if not isinstance(data, dict) or data.get("recipe") not in _CLASSES:
        raise RecipeError(f'A recipe in JSON needs "recipe" to be one of {", ".join(_CLASSES)}, found {text[:80]!r}.')
    return _build(_CLASSES[data.pop("recipe")], _decode(data))
