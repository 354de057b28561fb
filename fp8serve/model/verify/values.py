"""Checks for invalid values of scales and weights, and for implausible scales.

A weight's codes times its scale are the weight, and 448 times an input's scale is the largest input of the calibration.
These checks compare both with the values of known models, and with the other layers of the checkpoint. They find
reciprocals, outliers, and scales that do not fit the codes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor

from fp8serve.fp8.ops.microscaling import NAN
from fp8serve.model.formats.interop import KV, SCALE_DTYPES, Role, is_extreme
from fp8serve.model.formats.microscaling import max_exponent_code
from fp8serve.model.storage.shards import type_name
from fp8serve.model.verify.raw_checkpoint import FP8, Finding, RawCheckpoint, error, warning

_QUANTIZE_AGAIN = "quantize or calibrate the model again"
_MAX_CHECKED_ELEMENTS = 2**20  # larger tensors in high precision, which are not norms or biases, are not checked
_INVALID: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": torch.isnan,
    "infinite": torch.isinf,
    "zero": lambda scale: scale == 0,
    "negative": lambda scale: scale < 0,
}
_INVALID_NAMES = {"nan": "NaN", "infinite": "an infinity", "zero": "zero", "negative": "a negative number"}
FP8_MAX = 448.0
WEIGHT_RMS_RANGE = (1e-6, 3.0)  # of the weights of known models
MAX_RMS_RATIO = 2.0**8  # of a weight's root mean square to the median of the model's weights
INPUT_AMAX_RANGE = (1e-5, 1e7)  # of the inputs of known models
MAX_MEDIAN_INPUT_AMAX = 8192.0  # the median over the layers of a known model is smaller
WARNING_RATIO = 2.0**10  # of a scale to the median of the same weight, or of an input's amax to the layers' median
ERROR_RATIO = 2.0**14  # of an input's amax to the layers' median
RECIPROCAL_RATIO = 2.0**6  # the reciprocal of a wrong scale is at most this far from the layers' median
HALF_RANGE = FP8_MAX / 2  # with smaller codes, at least one bit of the range is unused
COARSE_RANGE = FP8_MAX / 2**7  # with smaller codes, most of the precision is lost
_INVERT = "store its reciprocal: a stored scale dequantizes, that is, it multiplies the codes"


def check_bad_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds scales that are NaN, infinite, zero or negative."""
    for key in checkpoint.scale_keys:
        value = checkpoint.value(key)
        for kind, is_bad in _INVALID.items():
            if count := int(is_bad(value).sum()):
                yield error(kind, key, f"holds {_INVALID_NAMES[kind]}, {count} of {value.numel()}", _QUANTIZE_AGAIN)


def check_empty_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    for key in checkpoint.scale_keys:
        if not math.prod(checkpoint.entries[key].shape):
            yield error("shape", key, "holds no number", _QUANTIZE_AGAIN)


def check_scale_types(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds scales of an unsupported type. Only scales of MX blocks may be uint8, and only those of NVFP4 E4M3."""
    exempt = checkpoint.mx_scale_keys | {checkpoint.scale_of(owner, "weight") for owner in checkpoint.packed}
    for key in checkpoint.scale_keys:
        dtype = checkpoint.entries[key].dtype
        if dtype not in SCALE_DTYPES and key not in exempt:
            yield error("dtype", key, f"is of the type {type_name(dtype)}", "store it as FP32, BF16, FP16 or E8M0")


def check_weight_types(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    for key in checkpoint.weights.values():
        dtype = checkpoint.entries[key].dtype
        if dtype is not torch.float8_e4m3fn:
            what = f"is of the type {type_name(dtype)}, whose two bits of mantissa are for gradients"
            yield error("dtype", key, what, "quantize weights to E4M3")


def check_large_exponents(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds scales of MX blocks with which the weight is too large for BF16. Readers refuse them."""
    for weight, key in checkpoint.mx_scales.items():
        codes, limit = checkpoint.shards[key].view(torch.uint8), max_exponent_code(checkpoint.entries[weight].dtype)
        if count := int(((codes > limit) & (codes != NAN)).sum()):
            what = f"holds exponents too large for BF16, {count} of {codes.numel()}"
            yield error("implausible", key, what, _QUANTIZE_AGAIN)


def check_bad_codes(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds FP8 weights with NaN, or with only zeros."""
    for owner, key in checkpoint.weights.items():
        codes = checkpoint.codes(owner)
        if codes.num_nan:
            yield error("nan", key, f"holds NaN, {codes.num_nan} of {codes.total} numbers", "quantize the model again")
        elif codes.total and codes.rms == 0:
            yield warning("zero", key, "is all zeros", "see whether it was written whole")


def check_bad_weights(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds small tensors in high precision, such as norms and biases, with NaN or an infinity."""
    scales = set(checkpoint.scale_keys)
    for key, entry in checkpoint.entries.items():
        is_small = math.prod(entry.shape) <= _MAX_CHECKED_ELEMENTS
        is_checked = is_small and entry.dtype.is_floating_point and entry.dtype not in FP8
        if is_checked and key not in scales and not bool(checkpoint.shards[key].float().isfinite().all()):
            yield error("nan", key, "holds NaN or an infinity", "write the model again; it may have diverged")


def check_cache_scales_are_numbers(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds KV-cache scales that are not one number for each layer, or that are too small or large."""
    for owner, key in checkpoint.with_role(*KV):
        shape = checkpoint.entries[key].shape
        if math.prod(shape) > 1:
            yield error("shape", key, f"has the shape {list(shape)}", f"store one number for {owner}")
        elif math.prod(shape) == 1 and is_extreme(value := checkpoint.value(key)):
            size = "small" if float(value) < 1 else "large"
            what = f"holds {float(value):.3g}, which is too {size} for a scale"
            yield error("implausible", key, what, _QUANTIZE_AGAIN)


def check_input_scales_are_numbers(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds input scales that are not one number for a layer, or for each expert of a stack."""
    for owner, key in checkpoint.with_role("input"):
        shape, weight = checkpoint.entries[key].shape, checkpoint.entries.get(owner)
        experts = weight.shape[:1] if weight is not None and len(weight.shape) == 3 else ()
        if math.prod(shape) > 1 and shape != experts:
            yield error("shape", key, f"has the shape {list(shape)}", "store one number for the layer")


def check_weight_scale_shapes(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    for owner, key in checkpoint.weights.items():
        scale = checkpoint.scale_of(owner, "weight")
        if scale is not None and checkpoint.granularity(owner) is None:
            shapes = list(checkpoint.entries[scale].shape), list(checkpoint.entries[key].shape)
            what = f"has the shape {shapes[0]}, which fits no weight of {shapes[1]}"
            yield error(
                "shape", scale, what, "store one scale for the tensor, each row, or each block of 128 x 128 or 1 x 32"
            )


def check_implausible_weight_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds reciprocals of scales, and weights whose root mean square is outside the range of known models or far from
    that of the other weights."""
    weights = []
    for owner in checkpoint.weights:
        if (scale := _weight_scale(checkpoint, owner)) is None:
            continue
        rms = checkpoint.codes(owner).rms
        size = rms * float(scale.median())  # approximately
        if size > 0:
            weights.append((str(checkpoint.scale_of(owner, "weight")), size, rms * rms / size))
    yield from check_sizes(weights, _INVERT, _QUANTIZE_AGAIN)


def check_sizes(weights: Sequence[tuple[str, float, float]], invert: str, remedy: str) -> Iterator[Finding]:
    """Finds implausible root mean squares. `weights` are (key of the scale, root mean square of the weight, the same
    with the scale's reciprocal); `invert` and `remedy` say what to do."""
    median_size = median(size for _, size, _ in weights) if len(weights) > 2 else None
    smallest, largest = WEIGHT_RMS_RANGE
    for key, size, inverted_size in weights:
        is_outlier = median_size is not None and not median_size / MAX_RMS_RATIO <= size <= median_size * MAX_RMS_RATIO
        if size > largest and smallest <= inverted_size <= largest:
            what = f"looks like the reciprocal of a scale: the weight's mean size would be {size:.3g}"
            yield error("reciprocal", key, what, invert)
        elif is_outlier or not smallest <= size <= largest:
            others = f", that of the others {median_size:.3g}" if is_outlier else ""
            yield error("implausible", key, f"makes the weight's mean size {size:.3g}{others}", remedy)


def check_uneven_weight_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights with one row or block whose scale is far above the median of the weight."""
    for owner in checkpoint.weights:
        scale = _weight_scale(checkpoint, owner)
        if scale is not None and scale.numel() > 2:
            median_scale, largest = float(scale.median()), float(scale.max())
            if largest > median_scale * WARNING_RATIO:
                what = f"holds {largest:.3g} where its median is {median_scale:.3g}"
                yield error("implausible", str(checkpoint.scale_of(owner, "weight")), what, _QUANTIZE_AGAIN)


def check_implausible_input_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds reciprocals of scales, and input scales far from those of other layers. Real models have massive
    activations, so some are warnings."""
    # the amax that the scale of every layer's input represents
    owners = (
        owner for owner, _ in checkpoint.with_role("input") if owner not in checkpoint.packed
    )  # those are not read
    scales = {owner: _valid_scale(checkpoint, owner, "input") for owner in owners}
    sizes = {owner: FP8_MAX * float(scale.max()) for owner, scale in scales.items() if scale is not None}
    median_size = median(sizes.values()) if sizes else 0.0
    for owner, size in sizes.items():
        key, ratio = str(checkpoint.scale_of(owner, "input")), max(size / median_size, median_size / size)
        is_impossible = not INPUT_AMAX_RANGE[0] <= size <= INPUT_AMAX_RANGE[1]
        if _is_reciprocal_input(size, sizes):
            what = f"looks like the reciprocal of a scale: the largest input would be {size:.3g}"
            yield error("reciprocal", key, what, _INVERT)
        elif is_impossible or ratio > WARNING_RATIO:
            make_finding = error if is_impossible or ratio > ERROR_RATIO else warning
            what = f"stands for a largest input of {size:.3g}, the median of the layers for {median_size:.3g}"
            yield make_finding("implausible", key, what, "calibrate the model again")


def check_underused_codes(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights whose codes are all small, because they were quantized with a scale for larger weights."""
    for owner, key in checkpoint.weights.items():
        largest = checkpoint.codes(owner).largest
        key_of_scale = checkpoint.scale_of(owner, "weight")
        scale = torch.empty(0) if key_of_scale is None else checkpoint.value(key_of_scale).flatten()
        if len(scale) and bool((scale == scale[0]).all()):  # some formats repeat one scale for each part
            largest = largest.max().reshape(1)
        nonzero = largest[largest > 0]
        is_mx = key in checkpoint.mx_scales  # a scale that is a power of two leaves half of the range unused
        small = nonzero[nonzero < HALF_RANGE if is_mx else nonzero <= HALF_RANGE]
        if len(small) <= 0.01 * len(nonzero):
            continue
        smallest = float(small.min())
        counts = f"{len(small)} of its {len(nonzero)}"
        what = f"has codes up to {smallest:g} of {FP8_MAX:g} in {counts} parts with a scale each"
        make_finding = error if smallest <= COARSE_RANGE else warning
        yield make_finding("stale", key, what, "quantize the weight again, by its own largest value")


def check_clipped_codes(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds weights with many codes of 448, because they were quantized with a scale for smaller weights."""
    for owner, key in checkpoint.weights.items():
        codes = checkpoint.codes(owner)
        clipped = codes.count(FP8_MAX) - 2 * len(codes.largest)  # each part with a scale has this code once or twice
        fraction = clipped / max(codes.total, 1)
        if fraction > 0.001 and clipped > 1.5 * codes.count(416.0):  # without clipping, the code below is more frequent
            make_finding = error if fraction > 0.01 else warning
            what = f"has {100 * fraction:.2g} % of its numbers cut off at {FP8_MAX:g}"
            yield make_finding("stale", key, what, "quantize the weight again, by its own largest value")


def check_default_scales(checkpoint: RawCheckpoint) -> Iterator[Finding]:
    """Finds checkpoints in which all scales of one kind are 1, as if they were never calibrated."""
    kinds: dict[str, tuple[Role, ...]] = {"weight": ("weight",), "input": ("input",), "KV-cache": KV}
    for kind, roles in kinds.items():
        keys = [key for _, key in checkpoint.with_role(*roles)]
        if keys and all(bool((checkpoint.value(key) == 1).all()) for key in keys):
            what = f"is 1, as are all {len(keys)} {kind} scales: they were not calibrated"
            yield warning("default", keys[0], what, "calibrate the model, or quantize its weights again")


def _is_reciprocal_input(size: float, sizes: dict[str, float]) -> bool:
    """Returns whether the scale of this input, or most scales of the model, are reciprocals.

    The inverted scale must be close to the other layers, or the median of all inverted scales must be plausible.
    """
    median_size, inverted = median(sizes.values()), FP8_MAX * FP8_MAX / size
    if median_size > MAX_MEDIAN_INPUT_AMAX > FP8_MAX * FP8_MAX / median_size:
        return size > MAX_MEDIAN_INPUT_AMAX
    is_plausible = median_size / RECIPROCAL_RATIO <= inverted <= median_size * RECIPROCAL_RATIO
    return max(size / median_size, median_size / size) > WARNING_RATIO and is_plausible


def _weight_scale(checkpoint: RawCheckpoint, owner: str) -> Tensor | None:
    """Returns the valid scale of a weight. Of MX blocks, those that hold only zeros are left out: their scale is 0."""
    scale = _valid_scale(checkpoint, owner, "weight")
    if scale is None or checkpoint.weights[owner] not in checkpoint.mx_scales:
        return scale
    used = scale.flatten()[checkpoint.codes(owner).largest.flatten() > 0]
    return used if len(used) else None


def _valid_scale(checkpoint: RawCheckpoint, owner: str, role: Role) -> Tensor | None:
    """Returns the scale, or None if a value is invalid, which other checks report."""
    key = checkpoint.scale_of(owner, role)
    value = None if key is None else checkpoint.value(key)
    is_valid = value is not None and value.numel() and bool((value.isfinite() & (value > 0)).all())
    return value if is_valid else None
