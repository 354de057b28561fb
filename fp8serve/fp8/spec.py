"""QuantSpec: data that define how one tensor is quantized.

A recipe yields one for each role of a tensor (`recipe.specs`), a checkpoint of another project one for the inputs of
its layers. Casting, linear layers, attention, loading, export and calibration read specs and not recipes. The names of
granularities are those of `fp8serve.quantize`; other projects' names for them are translated where their files are read
(model/formats/interop.py).

A new format is a name here (a granularity with its block, a scale format), an op that casts to it (casting.py says
which) and a product that reads its scales. Nothing here touches torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from fp8serve.errors import RecipeError

ElementFormat = Literal["e4m3", "e5m2", "bf16"]  # "bf16": a product reads the tensor as it is, in BF16
Granularity = Literal["tensor", "row", "block1x128", "block128x128"]
ScaleFormat = Literal["fp32", "power_of_2"]  # "power_of_2": an FP32 number, rounded down to a power of two
ScaleSource = Literal["delayed", "current", "stored"]  # a state of earlier steps, the tensor itself, a file

Block = tuple[int | None, int | None]

# How many rows and columns of a matrix [M, K] share a scale, None for all; a row runs along the contracted dimension.
_BLOCKS: dict[Granularity, Block] = {
    "tensor": (None, None),
    "row": (1, None),
    "block1x128": (1, 128),
    "block128x128": (128, 128),
}


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is quantized. RecipeError for a format, granularity or source that does not exist."""

    element: ElementFormat = "e4m3"
    granularity: Granularity = "tensor"
    scale_format: ScaleFormat = "fp32"
    source: ScaleSource = "current"

    def __post_init__(self) -> None:
        _check("element format", self.element, get_args(ElementFormat))
        _check("granularity", self.granularity, tuple(_BLOCKS))
        _check("scale format", self.scale_format, get_args(ScaleFormat))
        _check("source of scales", self.source, get_args(ScaleSource))

    @property
    def is_fp8(self) -> bool:
        """Whether the tensor is quantized at all."""
        return self.element != "bf16"

    @property
    def block(self) -> Block:
        """(rows, columns) that share a scale; None for all."""
        return _BLOCKS[self.granularity]

    @property
    def serves_both_directions(self) -> bool:
        """Whether the transposed data are quantized as well: the block is as high as it is wide."""
        rows, columns = self.block
        return rows == columns

    @property
    def depends_on_batch(self) -> bool:
        """Whether the one scale of an input comes from the content of all its rows."""
        return self.is_fp8 and (self.source, self.granularity) == ("current", "tensor")

    @property
    def is_blocked(self) -> bool:
        """Whether a scale holds for a number of columns, not for all."""
        return self.block[1] is not None

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the scales of a matrix [rows, columns]: [] for one scale; blocks may be ragged at the edge."""
        return () if self.granularity == "tensor" else tuple(map(_count, (rows, columns), self.block))

    def divides(self, rows: int, columns: int) -> bool:
        """Whether a matrix [rows, columns] consists of whole blocks."""
        return all(block is None or size % block == 0 for size, block in zip((rows, columns), self.block, strict=True))

    def at_rest(self) -> "QuantSpec":
        """The spec after training: a scale that came from a state is now stored."""
        return replace(self, source="stored") if self.source == "delayed" else self


def block_of(scale_shape: tuple[int, ...], rows: int, columns: int) -> Block:
    """The (rows, columns) that share a scale in a matrix [rows, columns] with scales of this shape; None for all.

    Granularities that give the same shape of scales are equivalent. ValueError for a shape that no granularity gives.
    """
    for granularity, block in _BLOCKS.items():
        if QuantSpec(granularity=granularity).scale_shape(rows, columns) == scale_shape:
            return block
    raise ValueError(f"Scales of the shape {list(scale_shape)} fit no [{rows}, {columns}] matrix.")


def _check(what: str, name: object, known: tuple[str, ...]) -> None:
    if name not in known:
        raise RecipeError(f"There is no {what} {name!r}; use {_either(known)}.")


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def listed(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes as a sentence offers them: "[], [3, 1] or [1, 2]"."""
    return _either([str(list(shape)) for shape in shapes])


def _count(size: int, block: int | None) -> int:
    """The number of blocks that cover `size`."""
    return 1 if block is None else -(-size // block)


UNQUANTIZED = QuantSpec("bf16")
WEIGHTS = (QuantSpec(), QuantSpec(granularity="row"), QuantSpec(granularity="block128x128"))  # as a file may hold them
LINEAR = ("input", "weight", "grad_output")
ATTENTION = ("q", "k", "v", "p", "grad_output", "grad_scores")
CACHE: Mapping[str, QuantSpec] = {"k": QuantSpec(source="stored"), "v": QuantSpec(source="stored")}


@dataclass(frozen=True)
class RecipeSpecs:
    """How a recipe quantizes every tensor, by role.

    linear: `LINEAR`. attention: `ATTENTION`, or empty where attention stays in high precision. cache: the keys and
    values of an FP8 KV cache. keeps_attention_wide: attention's output is not rounded to the dtype of activations.
    """

    linear: Mapping[str, QuantSpec]
    attention: Mapping[str, QuantSpec] = field(default_factory=dict)
    cache: Mapping[str, QuantSpec] = field(default_factory=lambda: CACHE)
    keeps_attention_wide: bool = False

    def element(self, role: str) -> ElementFormat:
        """The element format of a role in any kind of layer; all kinds agree."""
        return next(specs[role].element for specs in (self.linear, self.attention, self.cache) if role in specs)


def specs_of(
    base: QuantSpec,
    gradient: ElementFormat,
    weight: QuantSpec | None = None,
    *,
    attends: bool = False,
    keeps_attention_wide: bool = False,
) -> RecipeSpecs:
    """The specs of a recipe. base: of the input. gradient: the element format of gradients. weight: of weights where it
    is another. attends: attention is quantized, too, per tensor whatever the granularity: a score has no channels.
    """

    def of(role: str, granularity: Granularity) -> QuantSpec:
        element = gradient if role.startswith("grad_") else base.element
        return replace(base, element=element, granularity=granularity)

    linear = {r: of(r, base.granularity) for r in LINEAR} | ({"weight": weight} if weight else {})
    attention = {r: of(r, "tensor") for r in ATTENTION if attends}
    return RecipeSpecs(linear, attention, keeps_attention_wide=keeps_attention_wide)
