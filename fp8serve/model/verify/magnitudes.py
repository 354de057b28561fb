"""Scales whose size cannot be right: reciprocals, outliers among their neighbours, scales that do not fit the codes.

A weight's codes times its scale give weights of a usual size, and 448 times an input's scale is the largest input that
was seen. Both are compared with the values of known models, and with the rest of the same file.
"""

from collections.abc import Iterator
from statistics import median

from torch import Tensor

from fp8serve.model.formats.interop import KV, Role
from fp8serve.model.verify.finding import Finding, error, warning
from fp8serve.model.verify.subject import Subject

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
_AGAIN = "quantize or calibrate the model again"


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
            beside = f", that of the others {middle:.3g}" if far else ""
            what = f"makes the weight's mean size {size:.3g}{beside}"
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
            what = f"is 1, as are all {len(keys)} {kind} scales: nobody has calibrated them"
            yield warning("default", keys[0], what, "calibrate the model, or quantize its weights again")


def _weight_sizes(subject: Subject) -> dict[str, float]:
    """The root mean square of every FP8 weight, about: of its codes, times the median scale."""
    scales = {owner: _positive(subject, owner, "weight") for owner in subject.weights}
    found = {o: subject.codes(o).rms * float(s.median()) for o, s in scales.items() if s is not None}
    return {owner: size for owner, size in found.items() if size > 0}


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
