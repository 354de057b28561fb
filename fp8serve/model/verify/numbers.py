"""Scales and weights with values that cannot be computed with."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8serve.model.formats.interop import KV, SCALE_DTYPES, is_extreme
from fp8serve.model.storage.shards import type_name
from fp8serve.model.verify.finding import Finding, error, warning
from fp8serve.model.verify.subject import FP8, Subject

_AGAIN = "quantize or calibrate the model again"
_SMALL = 2**20  # the most elements of a checked tensor in high precision: norms and biases
_BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": torch.isnan,
    "infinite": torch.isinf,
    "zero": lambda scale: scale == 0,
    "negative": lambda scale: scale < 0,
}
_WORDS = {"nan": "NaN", "infinite": "an infinity", "zero": "zero", "negative": "a negative number"}


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
