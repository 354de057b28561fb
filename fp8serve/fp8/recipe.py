"""Recipes: how tensors get their FP8 scales, as frozen data with a public name.

A recipe says everything that decides the numbers of a quantized layer: the formats, where the scale comes from, and
which of the three GEMMs of a linear layer stay in high precision. The same object goes through calibration, training
and serving, and is written into the files as JSON. Nothing here touches torch, so a command line can read a recipe
without waiting for it.

Only this file distinguishes recipes. The others read `recipe.specs`, how each tensor is quantized (spec.py), and
`delayed(recipe)`, the rules of its states.

On purpose there is no base class (`Recipe` is a union), no default from the environment, and no mutation.
"""

import json
from collections.abc import Callable
from dataclasses import InitVar, asdict, dataclass, fields, replace
from enum import Enum
from typing import Any, ClassVar, Literal, get_args

from fp8serve.errors import RecipeError, json_fault, shown
from fp8serve.fp8.amax_rules import RULES, RuleName
from fp8serve.fp8.spec import UNQUANTIZED, ElementFormat, QuantSpec, RecipeSpecs, ScaleFormat, specs_of

AmaxAlgo = RuleName | Callable[[Any], Any]
ScaleAlgo = Callable[[Any, Any, float, Any], Any]
Precisions = tuple[bool, bool, bool]
Fp8Name = Literal["delayed", "current", "rowwise", "block"]  # the recipes to train with, as a command line names them
RecipeName = Literal[Fp8Name, "bf16"]
ServedName = Literal[Fp8Name, "w8a16"]  # those to serve with
RecipeChoice = Literal["stored", ServedName, "bf16"]  # "stored": the recipe of the directory
HeadDtype = Literal["bf16", "fp8"]  # of the matrix that makes logits, whatever the recipe

MAX_MARGIN = 8  # with a larger margin fp8_max / 2^margin / amax leaves FP32's range for the largest amax


class Format(Enum):
    """FP8 formats: (forward, backward). E4M3 reaches 448, E5M2 reaches 57344; HYBRID is E4M3 forward, E5M2 backward."""

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


class _Specified:
    """What every recipe has apart from its parameters."""

    specs: RecipeSpecs  # how each tensor is quantized, by role; found once, when the recipe is made

    def _take(self, specs: RecipeSpecs) -> None:
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


def _take_backward_override(recipe: "Recipe", precision: str | None) -> None:
    """Transformer Engine's `backward_override` as an override of ours: dgrad and wgrad in high precision."""
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
class DelayedScaling(_Specified):
    """One scale per tensor from the amax history of earlier steps, with one read of the tensor (docs/numerics.md).

    `scale = (fp8_max / 2^margin) / amax`; `amax_compute_algo` reduces the history ("max", "most_recent", any name of
    amax_rules.py, or a callable `history [N] -> amax []`); `scaling_factor_compute_algo` replaces the formula by
    `(amax, old_scale, fp8_max, recipe) -> scale`. The scale is recomputed on the first and then on every `interval`-th
    recorded step. `power_2_scale` rounds it down to a power of two. `weight_granularity="row"`: a weight has one scale
    per output channel, by its own content; inputs and gradients are scaled as before.
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
        attends = self.fp8_dpa or self.fp8_mha
        self._take(specs_of(base, self.fp8_format.backward, rows, attends=attends, keeps_attention_wide=self.fp8_mha))


@dataclass(frozen=True)
class Float8CurrentScaling(_Specified):
    """The scale comes from the tensor's own amax; `granularity="row"`: one scale per token and per output channel.

    `backward_override="high_precision"` is Transformer Engine's spelling of dgrad and wgrad in high precision; it is
    kept as `override_linear_precision`.
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
        _take_backward_override(self, backward_override)
        _check_granularity("granularity", self.granularity)
        base = QuantSpec(self.fp8_format.forward, self.granularity, _scale_format(self.power_2_scale))
        attends = self.fp8_dpa or self.fp8_mha
        self._take(specs_of(base, self.fp8_format.backward, attends=attends, keeps_attention_wide=self.fp8_mha))


@dataclass(frozen=True)
class Float8BlockScaling(_Specified):
    """Activations and gradients have one scale per 1x128 along the contracted dimension, weights one per 128x128.

    Transformer Engine's default is `power_2_scale=True`. `backward_override` as for `Float8CurrentScaling`.
    """

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = False
    override_linear_precision: Precisions = (False, False, False)
    backward_override: InitVar[str | None] = None

    def __post_init__(self, backward_override: str | None) -> None:
        _check_common(self)
        _check_flags(self, "power_2_scale")
        _take_backward_override(self, backward_override)
        base = QuantSpec(self.fp8_format.forward, "block1x128", _scale_format(self.power_2_scale))
        self._take(specs_of(base, self.fp8_format.backward, replace(base, granularity="block128x128")))


@dataclass(frozen=True)
class Float8WeightOnly(_Specified):
    """Weights in FP8, activations as they are, in BF16: a recipe to serve with, not to train with.

    `weight_granularity="row"`: one scale per output channel; "tensor": one scale; from the weight's content.
    """

    weight_granularity: Literal["tensor", "row"] = "row"
    power_2_scale: bool = False
    fp8_format: ClassVar[Format] = Format.E4M3
    override_linear_precision: ClassVar[Precisions] = (False, False, False)

    def __post_init__(self) -> None:
        _check_flags(self, "power_2_scale")
        _check_granularity("weight_granularity", self.weight_granularity)
        weight = QuantSpec("e4m3", self.weight_granularity, _scale_format(self.power_2_scale))
        self._take(specs_of(UNQUANTIZED, "bf16", weight))


Recipe = DelayedScaling | Float8CurrentScaling | Float8BlockScaling | Float8WeightOnly

_CLASSES: dict[str, type[Recipe]] = {c.__name__: c for c in get_args(Recipe)}
_NAMED: dict[ServedName, tuple[type[Recipe], dict[str, Any]]] = {
    "delayed": (DelayedScaling, {}),
    "current": (Float8CurrentScaling, {}),
    "rowwise": (Float8CurrentScaling, {"granularity": "row"}),
    "block": (Float8BlockScaling, {}),
    "w8a16": (Float8WeightOnly, {}),
}
NAMES: tuple[str, ...] = get_args(RecipeName)
# Parameters that were added later, with the value that equals the earlier behaviour. They are written only where they
# differ from it, so that older versions can read the files.
_LATER: dict[type[Recipe], dict[str, Any]] = {DelayedScaling: {"power_2_scale": False, "weight_granularity": "tensor"}}


def attends_in_fp8(recipe: Recipe | None) -> bool:
    """Whether attention, too, runs in FP8: `fp8_dpa`, or `fp8_mha`, which includes it."""
    return recipe is not None and bool(recipe.specs.attention)


def depends_on_batch(recipe: Recipe | None) -> bool:
    """Whether an input's one scale comes from all of its rows, so that a token's numbers depend on the others'."""
    if recipe is None or recipe.override_linear_precision[0]:
        return False
    return recipe.specs.linear["input"].depends_on_batch


def trains(recipe: Recipe | None) -> bool:
    """Whether a model can be trained under the recipe; also true for high precision."""
    return not isinstance(recipe, Float8WeightOnly)


def delayed(recipe: Recipe | None) -> DelayedScaling | None:
    """The rules of a recipe whose scales come from states that outlive a step; None for a recipe without states."""
    return recipe if isinstance(recipe, DelayedScaling) else None


def reduced(recipe: Recipe | None, by_group: bool) -> Recipe | None:
    """Delayed recipes: a copy whose amaxes are reduced over the default process group, or stay local. Others: as is."""
    return replace(recipe, reduce_amax=by_group) if isinstance(recipe, DelayedScaling) else recipe


def one_per_tensor(recipe: Recipe) -> bool:
    """Whether the recipe has one scale for a whole tensor."""
    return all(spec.granularity == "tensor" for spec in recipe.specs.linear.values())


def why_not_gathered(recipe: Recipe | None) -> str | None:
    """Why processes that share weights cannot gather them in FP8 (fsdp.py), in words; None: they can."""
    if recipe is None:
        return "the recipe is bf16"
    if any(recipe.override_linear_precision[:2]):
        return "fprop or dgrad is in high precision"
    return None if one_per_tensor(recipe) else "the recipe has many scales for a weight"


def _build(cls: type[Recipe], options: dict[str, Any]) -> Recipe:
    known = [f.name for f in fields(cls)]
    for name in options:
        if name not in known:
            raise RecipeError(f"{cls.__name__} has no parameter {name!r}; it has {', '.join(known)}.")
    return cls(**options)


def from_name(name: str, **overrides: Any) -> Recipe | None:
    """The recipe of a command-line name ("delayed", "current", "rowwise", "block", "w8a16"), or None for "bf16".

    `overrides` replace parameters. Raises RecipeError for an unknown name or parameter, or a parameter out of range.
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
    """The command-line name of a recipe; the inverse of `from_name` up to its parameters."""
    if recipe is None:
        return "bf16"
    if isinstance(recipe, Float8CurrentScaling):
        return "rowwise" if recipe.granularity == "row" else "current"
    return next(name for name, (cls, _) in _NAMED.items() if isinstance(recipe, cls))


def to_json(recipe: Recipe | None) -> str:
    """One line of JSON that `from_json` turns back into an equal recipe; None (bf16) becomes `null`.

    Raises RecipeError for a recipe that holds a callable: code cannot be written into a file.
    """
    if recipe is None:
        return "null"
    later = _LATER.get(type(recipe), {}).items()
    data = {name: value for name, value in asdict(recipe).items() if (name, value) not in later}
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
    """The recipe that `to_json` wrote. Raises RecipeError for anything else, unknown parameters included."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"The recipe {shown(text)} is not valid JSON: {json_fault(error)}.") from None
    if data is None:
        return None
    if not isinstance(data, dict) or data.get("recipe") not in _CLASSES:
        raise RecipeError(f'A recipe in JSON needs "recipe" to be one of {", ".join(_CLASSES)}, found {text[:80]!r}.')
    return _build(_CLASSES[data.pop("recipe")], _decode(data))
