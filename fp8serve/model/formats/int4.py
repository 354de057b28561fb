"""Reads the INT4 weights that compressed-tensors packs (`pack-quantized`) as weights in high precision.

    weight_packed      int32 [N, ceil(K / 8)], eight codes in a number, the lowest bits first; a code is an integer + 8
    weight_shape       int64 [2], N and K
    weight_scale       [N, K / group_size], or [N, 1] for a scale per channel
    weight_zero_point  int32 [ceil(N / 8), K / group_size], packed along N as the codes are along K; asymmetric only

A weight is (integer - zero point) * scale, rounded once to the scale's type, as in compressed-tensors' decompression.
There is no product with these weights in 4 bits, because an integer times a BF16 scale has up to 12 significant bits.
They become BF16 when they are read, which takes almost four times the memory of the file; a line of the log says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.four_bit import unpack_codes
from fp8serve.model.formats.interop import Int4, Scheme, check_scale
from fp8serve.model.formats.microscaling import WidenedShards
from fp8serve.model.storage.shards import Shards, StoredTensor, type_name

PACKED = ".weight_packed"
PARTS = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point")
CODES_PER_NUMBER, OFFSET = 8, 8
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PackedInt4:
    """The tensors of a layer's weight, whose shapes fit each other."""

    shards: Shards
    owner: str
    rows: int
    columns: int
    is_symmetric: bool

    @property
    def scale_key(self) -> str:
        return f"{self.owner}.weight_scale"

    def scale(self) -> Tensor:
        """Returns the scales. Raises ModelError unless all are positive and finite."""
        check_scale(self.scale_key, self.shards[self.scale_key])
        return self.shards[self.scale_key]

    def widen(self) -> Tensor:
        """Returns the weight [N, K] in the type of its scales. Raises ModelError for a scale that cannot be used."""
        scale = self.scale()
        values = _unpack(self.shards[f"{self.owner}{PACKED}"], self.columns)
        groups = values.view(self.rows, scale.numel() // self.rows, -1)
        if not self.is_symmetric:
            zero_points = _unpack(self.shards[f"{self.owner}.weight_zero_point"].t().contiguous(), self.rows)
            groups = groups - zero_points.t().unsqueeze(2)
        return (groups.to(scale.dtype) * scale.view(self.rows, -1, 1)).view(self.rows, self.columns)


def _unpack(numbers: Tensor, columns: int) -> Tensor:
    """Returns the integers of int32 [N, ceil(columns / 8)], int8 [N, columns]."""
    codes = unpack_codes(numbers.contiguous().view(torch.uint8))[:, :columns]
    return codes.to(torch.int8).sub_(OFFSET)


def is_packed_int4(key: str, entry: StoredTensor) -> bool:
    return key.endswith(PACKED) and entry.dtype is torch.int32


def read_packed(shards: Shards, owner: str, int4: Int4) -> PackedInt4:
    """Returns the tensors of a layer's weight. Raises ModelError if one is missing or contradicts another."""
    entries = {part: shards.entries.get(f"{owner}.{part}") for part in PARTS}
    packed, shape, scale, zero_point = entries.values()
    if f"{owner}.weight_g_idx" in shards:
        raise ModelError(
            f"{owner}.weight_g_idx orders the columns of an INT4 weight by their activations, which is not supported; "
            "quantize the model with actorder null or static."
        )
    if packed is None or shape is None or scale is None:
        missing = next(part for part in PARTS if entries[part] is None)
        raise ModelError(f"{owner} has an INT4 weight and lacks {missing}; download or write the model again.")
    if shape.dtype not in (torch.int64, torch.int32) or shape.shape != (2,):
        raise ModelError(
            f"{owner}.weight_shape is {type_name(shape.dtype)} {list(shape.shape)} where two whole numbers were "
            "expected."
        )
    rows, columns = map(int, shards[f"{owner}.weight_shape"].tolist())
    group = columns if int4.group_size is None else int4.group_size
    if rows < 1 or columns < 1 or columns % group:
        raise ModelError(
            f"{owner}.weight_shape is {[rows, columns]}, and the number of columns must be a multiple of the group of "
            f"{group} that shares a scale."
        )
    expected = {"weight_packed": (rows, -(-columns // CODES_PER_NUMBER)), "weight_scale": (rows, columns // group)}
    if not int4.is_symmetric:
        expected["weight_zero_point"] = (-(-rows // CODES_PER_NUMBER), columns // group)
    if (zero_point is None) is not int4.is_symmetric:
        kind, problem = ("symmetric", "has") if int4.is_symmetric else ("asymmetric", "lacks")
        raise ModelError(
            f"quantization_config says that {owner} is {kind} INT4, and the file {problem} its weight_zero_point; "
            "correct quantization_config, or write the model again."
        )
    for part, part_shape in expected.items():
        entry = entries[part]
        dtypes = _SCALE_DTYPES if part == "weight_scale" else (torch.int32,)
        if entry is None or entry.shape != part_shape or entry.dtype not in dtypes:
            stored = "missing" if entry is None else f"{type_name(entry.dtype)} {list(entry.shape)}"
            raise ModelError(
                f"{owner}.{part} is {stored}; an INT4 weight of {rows} x {columns} in groups of {group} takes "
                f"{' or '.join(map(type_name, dtypes))} {list(part_shape)}."
            )
    return PackedInt4(shards, owner, rows, columns, int4.is_symmetric)


def widen_int4(shards: Shards, find_scheme: Callable[[str], Scheme | None]) -> Shards:
    """Returns the tensors with every INT4 weight in high precision, under the name `P.weight`, and without its parts.

    Raises ModelError if the parts do not fit each other or contradict quantization_config.
    """
    owners = [key.removesuffix(PACKED) for key, entry in shards.entries.items() if is_packed_int4(key, entry)]
    if not owners:
        return shards
    weights = [read_packed(shards, owner, require_int4(owner, find_scheme(owner))) for owner in owners]
    entries = dict(shards.entries)
    for weight in weights:
        for part in PARTS:
            entries.pop(f"{weight.owner}.{part}", None)
        scale = shards.entries[weight.scale_key]
        entries[f"{weight.owner}.weight"] = StoredTensor(scale.file, scale.dtype, (weight.rows, weight.columns))

    def check() -> None:
        for weight in weights:
            weight.scale()

    note = (
        f"{len(weights)} weights, {owners[0]}.weight among them, are in INT4 and run in BF16, which takes four times "
        "the memory; for weights of 4 bits calibrate the original model with --recipe nvfp4-w4a16."
    )
    computed = {f"{weight.owner}.weight": weight.widen for weight in weights}
    return WidenedShards(shards, entries, computed, note, check)


def require_int4(owner: str, scheme: Scheme | None) -> Int4:
    """Returns how quantization_config describes an INT4 weight. Raises ModelError if it says something else."""
    if scheme is None or scheme.int4 is None:
        declared = "no group with it" if scheme is None else scheme.weight_name
        raise ModelError(
            f"{owner}{PACKED} is in INT4, and config.json has {declared}; correct quantization_config, or write the "
            "model again."
        )
    return scheme.int4
