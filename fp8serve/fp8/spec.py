"""QuantSpec: data that define how one tensor is quantized.

A recipe has a spec for each role of a tensor (`recipe.specs`), and a checkpoint of another project has one for the
inputs of its layers. Casting, linear layers, attention, loading, export and calibration read specs and not recipes. The
names of granularities are those of `fp8serve.quantize`; the names of other projects are translated when their files are
read (model/formats/interop.py).

A new format needs a name here (a granularity with its block, or a scale format), an op that casts to it (casting.py)
and a GEMM that reads its scales. This module does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from fp8serve.errors import RecipeError

# "bf16": the tensor is not quantized; GEMMs read it in BF16. "e2m1": 4 bits
ElementFormat = Literal["e4m3", "e5m2", "bf16", "e2m1"]
Granularity = Literal["tensor", "row", "block1x128", "block128x128", "block1x32", "block1x16", "block16x16"]
# "power_of_2": an FP32 number, rounded down to a power of two; "e8m0": a power of two in one byte, as in MXFP8;
# "e4m3": an E4M3 number for each block, times one FP32 number for the tensor, as in NVFP4
ScaleFormat = Literal["fp32", "power_of_2", "e8m0", "e4m3"]
ScaleSource = Literal["delayed", "current", "stored"]  # scaling states, the tensor's own amax, or a file

Block = tuple[int | None, int | None]  # the numbers of rows and columns that share a scale; None: all of them

# The blocks of a matrix [M, K] whose rows run along the contracted dimension.
_BLOCKS: dict[Granularity, Block] = {
    "tensor": (None, None),
    "row": (1, None),
    "block1x128": (1, 128),
    "block128x128": (128, 128),
    "block1x32": (1, 32),
    "block1x16": (1, 16),
    "block16x16": (16, 16),
}
_NVFP4_BLOCKS = ("block1x16", "block16x16")


@dataclass(frozen=True)
class QuantSpec:
    """How one tensor is quantized. Raises RecipeError for an unknown format, granularity or source."""

    element: ElementFormat = "e4m3"
    granularity: Granularity = "tensor"
    scale_format: ScaleFormat = "fp32"
    source: ScaleSource = "current"
    # NVFP4 (ops/e2m1.py, ops/nvfp4.py):
    four_over_six: bool = False  # the cast chooses between two scales for every block
    row_scaled: bool = False  # the FP32 scale is one for each row, and not for the tensor
    rotated: bool = False  # the columnwise data are rotated by the random Hadamard transform
    stochastic: bool = False  # the cast rounds stochastically

    def __post_init__(self) -> None:
        _check("element format", self.element, get_args(ElementFormat))
        _check("granularity", self.granularity, tuple(_BLOCKS))
        _check("scale format", self.scale_format, get_args(ScaleFormat))
        _check("source of scales", self.source, get_args(ScaleSource))
        if self.is_mx is not (self.granularity == "block1x32"):
            raise RecipeError(
                f"Only blocks of 1x32 have E8M0 scales, found {self.granularity} and {self.scale_format}."
            )
        has_nvfp4_blocks = self.granularity in _NVFP4_BLOCKS
        if len({self.scale_format == "e4m3", has_nvfp4_blocks, self.is_4bit and not self.is_mx}) > 1:
            raise RecipeError(
                "Only e2m1 in blocks of 1x16 or 16x16 has E4M3 scales, and e2m1 has no scales but those and E8M0, "
                f"found {self.element}, {self.granularity} and {self.scale_format}."
            )

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor is quantized, to FP8 or to 4 bits."""
        return self.element != "bf16"

    @property
    def is_fp8(self) -> bool:
        """Whether the tensor is quantized to FP8, and neither to 4 bits nor left in BF16."""
        return self.element in ("e4m3", "e5m2")

    @property
    def is_4bit(self) -> bool:
        """Whether the tensor is quantized to E2M1, two elements in a byte."""
        return self.element == "e2m1"

    @property
    def is_nvfp4(self) -> bool:
        """Whether the tensor is quantized to E2M1 with an E4M3 scale for each block and an FP32 scale."""
        return self.is_4bit and not self.is_mx

    @property
    def name(self) -> str:
        """The name of the format for messages: "NVFP4", "MXFP4", "MXFP8" or "FP8"."""
        if self.is_4bit:
            return "MXFP4" if self.is_mx else "NVFP4"
        return "MXFP8" if self.is_mx else "FP8"

    @property
    def block(self) -> Block:
        """The numbers of (rows, columns) that share a scale; None means all of them."""
        return _BLOCKS[self.granularity]

    @property
    def serves_both_directions(self) -> bool:
        """Whether the transposed data are valid, too, because a block is square."""
        rows, columns = self.block
        return rows == columns

    @property
    def depends_on_batch(self) -> bool:
        """Whether one scale is computed from all rows of the tensor."""
        if self.is_nvfp4:
            return not self.row_scaled
        return self.is_fp8 and (self.source, self.granularity) == ("current", "tensor")

    @property
    def is_blocked(self) -> bool:
        """Whether a row is divided into blocks with a scale each."""
        return self.block[1] is not None

    @property
    def is_mx(self) -> bool:
        """Whether the tensor is in MX blocks: 32 consecutive elements with an E8M0 scale."""
        return self.scale_format == "e8m0"

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the shape of the scales of a matrix [rows, columns], [] for one scale. Blocks at the edge may be
        incomplete."""
        return () if self.granularity == "tensor" else tuple(map(_num_blocks, (rows, columns), self.block))

    def divides(self, rows: int, columns: int) -> bool:
        """Returns whether a matrix [rows, columns] consists of whole blocks."""
        return all(block is None or size % block == 0 for size, block in zip((rows, columns), self.block, strict=True))

    def for_serving(self) -> "QuantSpec":
        """Returns the spec after training: a delayed scale becomes a stored one, and the scale of a block of 16x16 is
        repeated in its rows."""
        if self.is_nvfp4:
            return replace(self, granularity="block1x16", rotated=False, stochastic=False)
        return replace(self, source="stored") if self.source == "delayed" else self

    def independent_of_batch(self) -> "QuantSpec":
        """Returns the spec with a current scale for each row, if one of the whole tensor would depend on the batch."""
        if not self.depends_on_batch:
            return self
        return replace(self, row_scaled=True) if self.is_nvfp4 else replace(self, granularity="row")


def block_of(scale_shape: tuple[int, ...], rows: int, columns: int) -> Block:
    """Returns the block of a matrix [rows, columns] whose scales have this shape.

    Granularities with the same shape of scales are equivalent. Raises ValueError for a shape that no granularity has.
    """
    for granularity, block in _BLOCKS.items():
        shape = () if granularity == "tensor" else tuple(map(_num_blocks, (rows, columns), block))
        if shape == scale_shape:
            return block
    raise ValueError(f"Scales of the shape {list(scale_shape)} fit no [{rows}, {columns}] matrix.")


def _check(parameter: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RecipeError(f"There is no {parameter} {value!r}; use {_join_with_or(choices)}.")


def _join_with_or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def format_shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Returns the shapes as text for a message: "[], [3, 1] or [1, 2]"."""
    return _join_with_or([str(list(shape)) for shape in shapes])


def _num_blocks(size: int, block: int | None) -> int:
    return 1 if block is None else -(-size // block)


UNQUANTIZED = QuantSpec("bf16")
MXFP8 = QuantSpec(granularity="block1x32", scale_format="e8m0")
MXFP4 = QuantSpec("e2m1", "block1x32", "e8m0")
NVFP4 = QuantSpec("e2m1", "block1x16", "e4m3")
NVFP4_INPUT = replace(NVFP4, row_scaled=True)  # how a server casts inputs
_WEIGHTS = (QuantSpec(), QuantSpec(granularity="row"), QuantSpec(granularity="block128x128"))
LINEAR_TENSORS = ("input", "weight", "grad_output")
ATTENTION_TENSORS = ("q", "k", "v", "p", "grad_output", "grad_scores")
CACHE: Mapping[str, QuantSpec] = {"k": QuantSpec(source="stored"), "v": QuantSpec(source="stored")}


def weight_specs(is_mx: bool) -> Sequence[QuantSpec]:
    """Returns the specs of FP8 weights that files may have: in MX blocks, or with FP32 scales."""
    return (MXFP8,) if is_mx else _WEIGHTS


@dataclass(frozen=True)
class RecipeSpecs:
    """The specs of all tensors under a recipe, by role.

    Attributes:
        linear: The specs of a linear layer's tensors, by the names in `LINEAR_TENSORS`.
        attention: The specs by the names in `ATTENTION_TENSORS`; empty if attention runs in high precision.
        cache: The specs of keys and values in an FP8 KV cache.
        keeps_attention_in_fp32: Whether the attention output is not rounded to the dtype of activations.
    """

    linear: Mapping[str, QuantSpec]
    attention: Mapping[str, QuantSpec] = field(default_factory=dict)
    cache: Mapping[str, QuantSpec] = field(default_factory=lambda: CACHE)
    keeps_attention_in_fp32: bool = False

    def element(self, role: str) -> ElementFormat:
        """Returns the element format of a role, which is the same in linear layers and attention."""
        return next(specs[role].element for specs in (self.linear, self.attention, self.cache) if role in specs)


def specs_of(
    base: QuantSpec,
    gradient: ElementFormat,
    weight: QuantSpec | None = None,
    *,
    fp8_dpa: bool = False,
    fp8_mha: bool = False,
) -> RecipeSpecs:
    """Returns the specs of a recipe.

    Args:
        base: The spec of the input of a linear layer.
        gradient: The element format of gradients.
        weight: The spec of weights, if it differs from `base`.
        fp8_dpa: Whether attention is quantized. Its scales are per tensor, because scores have no channels.
        fp8_mha: Like `fp8_dpa`, and the attention output is not rounded to the dtype of activations.
    """

    def spec_of(role: str, granularity: Granularity) -> QuantSpec:
        element = gradient if role.startswith("grad_") else base.element
        return replace(base, element=element, granularity=granularity)

    linear = {r: spec_of(r, base.granularity) for r in LINEAR_TENSORS} | ({"weight": weight} if weight else {})
    attention = {r: spec_of(r, "tensor") for r in ATTENTION_TENSORS if fp8_dpa or fp8_mha}
    return RecipeSpecs(linear, attention, keeps_attention_in_fp32=fp8_mha)
