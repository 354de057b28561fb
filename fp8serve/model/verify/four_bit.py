"""Checks of weights in 4 bits (NVFP4 and MXFP4): their scales, quantization_config, and the order of their codes.

A cast chooses a block's scale by its largest element, so that element has one of the largest codes: 4 or 6 in NVFP4,
and at least 3 in MXFP4. If many blocks have no such code, the codes of several blocks are mixed: they are in another
order than the format's. Two codes that are swapped within a byte belong to one block, and nothing in the file shows it.
In NVFP4 every 16 rows may share the scales of their blocks, as training writes them: then the largest element is among
all of them.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.fp8.ops.four_bit import NVFP4_BLOCK, code_values, unpack_codes
from fp8serve.fp8.spec import MXFP4, NVFP4
from fp8serve.model.formats.int4 import PACKED, read_packed, require_int4
from fp8serve.model.formats.interop import ENCODING_GLOBAL, MODELOPT_AWQ, is_extreme
from fp8serve.model.verify.raw_checkpoint import WRITE_AGAIN, Finding, PackedWeight, RawCheckpoint, error
from fp8serve.model.verify.values import check_sizes

SMALLEST_TOP_CODE = {NVFP4: 6, MXFP4: 5}  # of the largest element of a block: the codes of 4 and 3
MAX_MISORDERED = 0.01  # of the blocks; small blocks of NVFP4 have a scale that is subnormal, and smaller codes
_ROWS_PER_STEP = 1024
_INVERT = "store its reciprocal: docs/formats.md says which projects store which"
_CORRECT_CONFIG = "correct quantization_config, or write the model again"


def check_global_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights in NVFP4 without a second scale, and second scales that are not one number of usable size."""
    for owner, packed in checkpoint.packed.items():
        second = checkpoint.scale_of(owner, "global")
        if second is None and packed.spec == NVFP4:
            yield error("missing", packed.key, "is in NVFP4 and has no weight_global_scale", WRITE_AGAIN)
        elif second is not None and packed.spec == MXFP4:
            yield error("config", second, f"belongs to {packed.key}, and MXFP4 has no second scale", WRITE_AGAIN)
    for owner, key in checkpoint.with_role("global"):
        shape = checkpoint.entries[key].shape
        if owner not in checkpoint.packed:
            yield error("orphan", key, f"is a second scale, and {owner} is not in 4 bits", "write the model again")
        elif math.prod(shape) != 1:
            yield error("shape", key, f"has the shape {list(shape)}", "store one number for the weight")
        elif is_extreme(checkpoint.value(key)):
            yield error("implausible", key, f"holds {float(checkpoint.value(key)):.3g}", "quantize the model again")


def check_4bit_config(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights in another 4-bit format than quantization_config says."""
    for owner, packed in checkpoint.packed.items():
        scheme = None if checkpoint.quantization is None else checkpoint.quantization.find_scheme(owner)
        if scheme is None:  # MXFP4 then becomes BF16
            if packed.spec == NVFP4:
                what = "is in NVFP4, and no group of quantization_config has it"
                yield error("config", packed.key, what, _CORRECT_CONFIG)
        elif scheme.weight_4bit is not None or scheme.int4 is not None or packed.spec == NVFP4:
            is_8bit = scheme.weight_4bit is None and scheme.int4 is None
            declared = "8 bits" if is_8bit else scheme.weight_name
            if declared != packed.spec.name:
                what = f"is in {packed.spec.name}, but quantization_config says {declared}"
                yield error("config", packed.key, what, _CORRECT_CONFIG)


def check_int4_weights(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights in INT4 whose tensors do not fit each other or quantization_config."""
    for owner in sorted(checkpoint.int4_owners):
        scheme = None if checkpoint.quantization is None else checkpoint.quantization.find_scheme(owner)
        try:
            read_packed(checkpoint.shards, owner, require_int4(owner, scheme))
        except ModelError as exception:
            sentence, _, remedy = str(exception).removesuffix(".").partition("; ")
            what = f"cannot be read ({sentence})"
            yield error(
                "config" if scheme is None or scheme.int4 is None else "shape",
                f"{owner}{PACKED}",
                what,
                remedy or WRITE_AGAIN,
            )


def check_pre_quant_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds factors of inputs that belong to no weight in NVFP4, or are not one for each element of the input."""
    for owner, key in checkpoint.with_role("pre_quant"):
        packed, shape = checkpoint.packed.get(owner), checkpoint.entries[key].shape
        scheme = None if checkpoint.quantization is None else checkpoint.quantization.find_scheme(owner)
        if packed is None or packed.spec != NVFP4:
            yield error("orphan", key, f"multiplies inputs, and {owner} is not in NVFP4", WRITE_AGAIN)
        elif shape != (2 * checkpoint.entries[packed.key].shape[1],):
            yield error("shape", key, f"has the shape {list(shape)}", "store one number for each element of the input")
        elif scheme is not None and not scheme.has_pre_quant_scales:
            yield error(
                "config", key, f"is not what quantization_config says, which is not {MODELOPT_AWQ}", _CORRECT_CONFIG
            )


def check_sizes_of_4bit_weights(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights whose root mean square is outside the range of known models or far from that of the others, for
    example because a file has the second scale of NVFP4 that another project stores, which is its reciprocal."""
    weights = []
    for owner, packed in checkpoint.packed.items():
        size, factor = _root_mean_square(checkpoint, owner, packed), _global_scale(checkpoint, owner)
        if 0 < size < math.inf:
            weights.append((checkpoint.scale_of(owner, "global") or packed.key, size, size / factor / factor))
    yield from check_sizes(weights, _INVERT, "quantize the model again")


def _root_mean_square(checkpoint: RawCheckpoint, owner: str, packed: PackedWeight) -> float:
    """Returns the root mean square of the weight's first rows; NaN or infinite if a scale is."""
    codes, scales = _rows(checkpoint.shards[packed.key]), checkpoint.value(str(checkpoint.scale_of(owner, "weight")))
    scales = scales.view(len(codes), -1)[:_ROWS_PER_STEP]
    values = code_values(unpack_codes(codes[:_ROWS_PER_STEP])).view(*scales.shape, -1) * scales.unsqueeze(2)
    return float(values.double().square().mean().sqrt()) * _global_scale(checkpoint, owner)


def _global_scale(checkpoint: RawCheckpoint, owner: str) -> float:
    """Returns the second scale that dequantizes the weight, 1 if it has none, or NaN if it cannot be used."""
    key = checkpoint.scale_of(owner, "global")
    if key is None:
        return 1.0
    value = checkpoint.value(key).flatten()
    scale = float(value[0]) if len(value) == 1 and value[0] > 0 else math.nan
    return 1 / scale if key.endswith(ENCODING_GLOBAL) else scale


def _rows(codes: Tensor) -> Tensor:
    """Returns codes as a matrix; those of gpt-oss' stacks are [E, N, K / 32, 16]."""
    return codes.flatten(2).flatten(0, 1) if codes.dim() == 4 else codes


def check_order_of_codes(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights in which many blocks have only small codes."""
    for owner, packed in checkpoint.packed.items():
        total = misordered = 0
        scale = checkpoint.scale_of(owner, "weight")
        is_tall = scale is not None and packed.spec == NVFP4 and _is_shared_by_rows(checkpoint.shards[scale])
        for rows in torch.split(_rows(checkpoint.shards[packed.key]), _ROWS_PER_STEP):
            magnitudes = unpack_codes(rows) & 7
            largest = magnitudes.view(len(rows), -1, int(packed.spec.block[1] or 1)).amax(2)
            if is_tall:
                largest = torch.stack([block.amax(0) for block in torch.split(largest, NVFP4_BLOCK)])
            total += int((largest > 0).sum())
            misordered += int(((largest > 0) & (largest < SMALLEST_TOP_CODE[packed.spec])).sum())
        if misordered > MAX_MISORDERED * total:
            what = f"has no code near the largest in {misordered} of its {total} blocks, which no cast produces"
            yield error("implausible", packed.key, what, "write the codes in the order of docs/formats.md")


def _is_shared_by_rows(scales: Tensor) -> bool:
    """Returns whether every 16 rows have the same scales."""
    codes = scales.view(torch.uint8)
    return torch.equal(codes, codes[::NVFP4_BLOCK].repeat_interleave(NVFP4_BLOCK, 0)[: len(codes)])
