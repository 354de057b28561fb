"""Scales and weights with values that cannot be computed with, and scales whose size cannot be right.

A weight's codes times its scale give weights of a usual size, and 448 times an input's scale is the largest input that
was seen. Both are compared with the values of known models, and with the rest of the same file, to find reciprocals,
outliers among their neighbours, and scales that do not fit the codes.
"""

import math
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from fp8serve.model.formats.interop import KV, SCALE_DTYPES, Role, is_extreme
from fp8serve.model.storage.shards import type_name
from fp8serve.model.verify.subject import FP8, Finding, Subject, error, warning

_AGAIN = "quantize or calibrate the model again"
_SMALL = 2**20  # the most elements of a checked tensor in high precision: norms and biases
_BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": torch.isnan,
    "infinite": torch.isinf,
    "zero": lambda scale: scale == 0,
    "negative": lambda scale: scale < 0,
}
_WORDS = {"nan": "NaN", "infinite": "an infinity", "zero": "zero", "negative": "a negative number"}
FP8_MAX = 448.0
WEIGHTS = (1e-6, 3.0)  # root mean square of a weight
WEIGHTS_FAR = 2.0**8  # between the root mean squares of a model's weights
INPUTS = (1e-5, 1e7)  # largest value of an input
TYPICAL_INPUT = 8192.0  # above the median, over the layers of a model, of the largest values of inputs
FAR = 2.0**10  # between scales beside each other
VERY_FAR = 2.0**14
NEAR = 2.0**6
HALF = FP8_MAX / 2
COARSE = FP8_MAX / 2**7  # most of the codes' precision is lost
_INVERT = "store 1 / it: a stored scale is what codes are multiplied by to dequantize them"


def bad_scales(subject: Subject) -> Iterator[Finding]:
    """NaN, infinite, zero or negative."""
    for keys in subject.scales.values():
        for key in keys:
            value = subject.value(key)
            for kind, is_bad in _BAD.items():
                if count := int(is_bad(value).sum()):
                    what = f"holds {_WORDS[kind]}, {count} of {value.numel()}"
                    yield error(kind, key, what, _AGAIN)


def empty_scales(subject: Subject) -> Iterator[Finding]:
    for keys in subject.scales.values():
        for key in keys:
            if not math.prod(subject.entries[key].shape):
                yield error("shape", key, "holds no number", _AGAIN)


def scale_types(subject: Subject) -> Iterator[Finding]:
    """Scales are FP32, BF16, FP16 or E8M0; those of MX blocks may be uint8."""
    for keys in subject.scales.values():
        for key in keys:
            dtype = subject.entries[key].dtype
            if dtype not in SCALE_DTYPES and key not in subject.mx.values():
                what = f"is of the type {type_name(dtype)}"
                yield error("dtype", key, what, "store it as FP32, BF16, FP16 or E8M0")


def weight_types(subject: Subject) -> Iterator[Finding]:
    for key in subject.weights.values():
        dtype = subject.entries[key].dtype
        if dtype is not torch.float8_e4m3fn:
            what = f"is of the type {type_name(dtype)}, whose two bits of mantissa are for gradients"
            yield error("dtype", key, what, "quantize weights to E4M3")


def bad_codes(subject: Subject) -> Iterator[Finding]:
    """FP8 weights that hold NaN, or nothing but zeros."""
    for owner, key in subject.weights.items():
        codes = subject.codes(owner)
        if codes.num_nan:
            yield error("nan", key, f"holds NaN, {codes.num_nan} of {codes.total} numbers", "quantize the model again")
        elif codes.total and codes.rms == 0:
            yield warning("zero", key, "is all zeros", "see whether it was written whole")


def bad_weights(subject: Subject) -> Iterator[Finding]:
    """Norms, biases and other small tensors in high precision that hold NaN or an infinity."""
    scales = {key for keys in subject.scales.values() for key in keys}
    for key, entry in subject.entries.items():
        small = entry.dtype.is_floating_point and entry.dtype not in FP8 and math.prod(entry.shape) <= _SMALL
        if small and key not in scales and not bool(subject.shards[key].float().isfinite().all()):
            yield error("nan", key, "holds NaN or an infinity", "write the model again; it may have diverged")


def cache_scales_are_numbers(subject: Subject) -> Iterator[Finding]:
    """One for keys and one for values in each layer, as an FP8 cache takes them; a scale for each head is not read."""
    for owner, key in subject.of_role(*KV):
        shape = subject.entries[key].shape
        if math.prod(shape) > 1:
            yield error("shape", key, f"has the shape {list(shape)}", f"store one number for {owner}")
        elif math.prod(shape) == 1 and is_extreme(value := subject.value(key)):
            size = "small" if float(value) < 1 else "large"
            yield error("implausible", key, f"holds {float(value):.3g}, which is too {size} for a scale", _AGAIN)


def input_scales_are_numbers(subject: Subject) -> Iterator[Finding]:
    """One for a layer, or for each of a stack of experts."""
    for owner, key in subject.of_role("input"):
        shape, weight = subject.entries[key].shape, subject.entries.get(owner)
        experts = weight.shape[:1] if weight is not None and len(weight.shape) == 3 else ()
        if math.prod(shape) > 1 and shape != experts:
            yield error("shape", key, f"has the shape {list(shape)}", "store one number for the layer")


def weight_scale_shapes(subject: Subject) -> Iterator[Finding]:
    for owner, key in subject.weights.items():
        scale = subject.scale_of(owner, "weight")
        if scale is not None and subject.granularity(owner) is None:
            shapes = list(subject.entries[scale].shape), list(subject.entries[key].shape)
            what = f"has the shape {shapes[0]}, which fits no weight of {shapes[1]}"
            yield error("shape", scale, what, "store one scale for the tensor, each row, or each block of 128 x 128")


def reciprocal_weight_scales(subject: Subject) -> Iterator[Finding]:
    for owner, size in _weight_sizes(subject).items():
        if _is_reciprocal(subject, owner, size):
            what = f"looks like the reciprocal of a scale: the weight's mean size would be {size:.3g}"
            yield error("reciprocal", str(subject.scale_of(owner, "weight")), what, _INVERT)


def implausible_weight_scales(subject: Subject) -> Iterator[Finding]:
    """Weights whose size no model has, or is far from that of the others."""
    sizes = _weight_sizes(subject)
    middle = median(sizes.values()) if len(sizes) > 2 else None
    for owner, size in sizes.items():
        far = middle is not None and not middle / WEIGHTS_FAR <= size <= middle * WEIGHTS_FAR
        if not _is_reciprocal(subject, owner, size) and (far or not WEIGHTS[0] <= size <= WEIGHTS[1]):
            others = f", that of the others {middle:.3g}" if far else ""
            what = f"makes the weight's mean size {size:.3g}{others}"
            yield error("implausible", str(subject.scale_of(owner, "weight")), what, _AGAIN)


def uneven_weight_scales(subject: Subject) -> Iterator[Finding]:
    """One row or block whose scale is far above those of the same weight."""
    for owner in subject.weights:
        scale = _positive(subject, owner, "weight")
        if scale is not None and scale.numel() > 2:
            middle, largest = float(scale.median()), float(scale.max())
            if largest > middle * FAR:
                what = f"holds {largest:.3g} where its median is {middle:.3g}"
                yield error("implausible", str(subject.scale_of(owner, "weight")), what, _AGAIN)


def reciprocal_input_scales(subject: Subject) -> Iterator[Finding]:
    largest = _input_sizes(subject)
    for owner, size in largest.items():
        if _is_reciprocal_input(size, largest):
            what = f"looks like the reciprocal of a scale: the largest input would be {size:.3g}"
            yield error("reciprocal", str(subject.scale_of(owner, "input")), what, _INVERT)


def implausible_input_scales(subject: Subject) -> Iterator[Finding]:
    """Massive activations are real: a factor of 2^10 is a warning, of 2^14 an error."""
    largest = _input_sizes(subject)
    middle = median(largest.values()) if largest else 0.0
    for owner, size in largest.items():
        ratio = max(size / middle, middle / size)
        beyond = not INPUTS[0] <= size <= INPUTS[1]
        if not _is_reciprocal_input(size, largest) and (beyond or ratio > FAR):
            make = error if beyond or ratio > VERY_FAR else warning
            what = f"stands for a largest input of {size:.3g}, the median of the layers for {middle:.3g}"
            yield make("implausible", str(subject.scale_of(owner, "input")), what, "calibrate the model again")


def underused_codes(subject: Subject) -> Iterator[Finding]:
    """Weights whose codes stay small: their scale was made for larger ones."""
    for owner, key in subject.weights.items():
        largest = subject.codes(owner).largest
        if _is_one_scale(subject, owner):
            largest = largest.max().reshape(1)
        used = largest[largest > 0]
        small = used[used <= HALF]
        if len(small) <= 0.01 * len(used):
            continue
        top = float(small.min())
        what = f"has codes up to {top:g} of {FP8_MAX:g} in {len(small)} of its {len(used)} parts with a scale each"
        make = error if top <= COARSE else warning
        yield make("stale", key, what, "quantize the weight again, by its own largest value")


def _is_one_scale(subject: Subject, owner: str) -> bool:
    """Whether all parts have the same scale: one for the weight, repeated where a format has none of that kind."""
    key = subject.scale_of(owner, "weight")
    values = None if key is None else subject.value(key).flatten()
    return values is not None and len(values) > 0 and bool((values == values[0]).all())


def clipped_codes(subject: Subject) -> Iterator[Finding]:
    """Weights that pile up at the largest code: their scale was made for smaller ones."""
    for owner, key in subject.weights.items():
        codes = subject.codes(owner)
        at_most = codes.at(FP8_MAX) - 2 * len(codes.largest)  # each part with a scale reaches it once or twice
        share = at_most / max(codes.total, 1)
        if share > 0.001 and at_most > 1.5 * codes.at(416.0):  # the code below it, which more numbers round to
            make = error if share > 0.01 else warning
            what = f"has {100 * share:.2g} % of its numbers cut off at {FP8_MAX:g}"
            yield make("stale", key, what, "quantize the weight again, by its own largest value")


def default_scales(subject: Subject) -> Iterator[Finding]:
    """All scales of a kind are 1, as if they were never set. Weights that are too large for that are found by their
    size."""
    kinds: dict[str, tuple[Role, ...]] = {"weight": ("weight",), "input": ("input",), "KV-cache": KV}
    for kind, roles in kinds.items():
        keys = [key for _, key in subject.of_role(*roles)]
        if keys and all(bool((subject.value(key) == 1).all()) for key in keys):
            what = f"is 1, as are all {len(keys)} {kind} scales: they were not calibrated"
            yield warning("default", keys[0], what, "calibrate the model, or quantize its weights again")


def _weight_sizes(subject: Subject) -> dict[str, float]:
    """The root mean square of every FP8 weight, about: of its codes, times the median scale."""
    scales = {owner: _positive(subject, owner, "weight") for owner in subject.weights}
    sizes = {o: subject.codes(o).rms * float(s.median()) for o, s in scales.items() if s is not None}
    return {owner: size for owner, size in sizes.items() if size > 0}


def _is_reciprocal(subject: Subject, owner: str, size: float) -> bool:
    rms = subject.codes(owner).rms
    return size > WEIGHTS[1] and WEIGHTS[0] <= rms * rms / size <= WEIGHTS[1]


def _input_sizes(subject: Subject) -> dict[str, float]:
    """The largest input that the scale of every layer was made for."""
    scales = {owner: _positive(subject, owner, "input") for owner, _ in subject.of_role("input")}
    return {owner: FP8_MAX * float(scale.max()) for owner, scale in scales.items() if scale is not None}


def _is_reciprocal_input(size: float, largest: dict[str, float]) -> bool:
    """Whether it alone is an outlier among the others, or all of them are."""
    middle, other = median(largest.values()), FP8_MAX * FP8_MAX / size
    if middle > TYPICAL_INPUT > FP8_MAX * FP8_MAX / middle:
        return size > TYPICAL_INPUT
    return max(size / middle, middle / size) > FAR and middle / NEAR <= other <= middle * NEAR


def _positive(subject: Subject, owner: str, role: Role) -> Tensor | None:
    """The scale if all of its values are possible for a scale; other checks report those that are not."""
    key = subject.scale_of(owner, role)
    value = None if key is None else subject.value(key)
    usable = value is not None and value.numel() and bool((value.isfinite() & (value > 0)).all())
    return value if usable else None
