"""Whether a kernel agrees with the reference: to the bit where that is promised, else to what its roundings allow.

It is to find kernels that are broken (a wrong index, a missing wait, an instruction that means something else on this
chip), whose errors are as large as the values. How exact the kernels are is not judged here but by the tests.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.ops.registry import reference

EXACT = frozenset({
    "quantize", "quantize_transpose", "quantize_delayed", "quantize_current", "quantize_rowwise", "quantize_block",
    "transpose_fp8", "transpose_half", "grouped_quantize", "delayed_update", "write_kv", "rotary", "rotary_write_kv",
    "sample", "pack_weight", "look_up", "sort_by_expert", "add_weighted",
})  # fmt: skip
# Products, judged by the sum of the magnitudes of what was summed.
_FP8_PRODUCTS = frozenset({
    "scaled_mm", "scaled_mm_add", "scaled_mm_quantize", "watched_mm_add", "grouped_mm", "grouped_wgrad",
})  # fmt: skip
_PRODUCTS = _FP8_PRODUCTS | {"mm"}
# How far a value may be from the reference, of the size of what was summed, beside roundings to its type. An FP8
# instruction of Hopper's tensor cores adds 32 products to a sum and cuts off, from each of the 33 and from the result,
# what lies below 2^-13 of the largest: at most 34 x 2^-13, or 2^-7.9, of the magnitudes. What is cut off has both
# signs, so a check's products lose less than 2^-10, though four instructions follow each other before a sum goes to
# FP32: 2^-8 is four times that (tests/cuda/test_hopper.py). Attention rounds its weights to BF16.
_SHARE = 2.0**-11
_SHARES = {"paged_attention": 2.0**-8, "attention_backward": 2.0**-7} | dict.fromkeys(_FP8_PRODUCTS, 2.0**-8)
_FEW = 0.02  # of FP8 values that may lie on the other side of a rounding

Arguments = tuple[Any, ...]


def tensors(*values: Any) -> list[Tensor]:
    """All tensors among values, nested lists and tuples included, in order."""
    actual: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            actual.append(value)
        elif isinstance(value, list | tuple):
            actual += tensors(*value)
    return actual


def difference(op: str, arguments: Arguments, actual: list[Tensor], expected: list[Tensor]) -> str | None:
    """What is wrong with the results `actual` of an op, in a few words; None when they agree with `expected`.

    `arguments`: fresh ones, as the op got them, from which the size of sums is taken.
    """
    if [(t.dtype, t.shape) for t in actual] != [(t.dtype, t.shape) for t in expected]:
        return "results of another type or shape"
    sizes = _sizes(op, arguments) if op in _PRODUCTS else []
    share = _SHARES.get(op, _SHARE)
    for one, target, size in zip(actual, expected, [*sizes, *[None] * (len(actual) - len(sizes))], strict=True):
        wrong = _same(one, target) if op in EXACT else _apart(one, target, share, size)
        if bool(wrong.any()):
            return _described(one, target, wrong)
    return None


def _bits(t: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.itemsize]) if t.is_floating_point() else t


def _nan(t: Tensor) -> Tensor:
    return t.float().isnan() if t.is_floating_point() else torch.zeros(t.shape, dtype=torch.bool)


def _same(actual: Tensor, expected: Tensor) -> Tensor:
    """Where bits differ; one NaN is as good as another."""
    return (_bits(actual) != _bits(expected)) & ~(_nan(actual) & _nan(expected))


def _apart(actual: Tensor, expected: Tensor, share: float, size: Tensor | None) -> Tensor:
    """Where values are farther apart than roundings and `share` of `size` allow. Without a size the largest value of a
    result is its size, and few FP8 values may differ."""
    if not actual.is_floating_point() or (actual.dtype in FP8_MAX and size is None):
        return _few_steps(actual, expected)
    one, target = actual.double(), expected.double()
    finite = target[target.isfinite()].abs()
    largest = finite.max() if finite.numel() else torch.zeros((), dtype=torch.float64)
    allowed = _roundings(actual.dtype, one, target) + share * (largest if size is None else size) + 1e-30
    wrong = ~(((one - target).abs() <= allowed) | (one == target) | (one.isnan() & target.isnan()))
    return wrong | _too_many(actual, expected) if actual.dtype in FP8_MAX else wrong


def _roundings(dtype: torch.dtype, actual: Tensor, expected: Tensor) -> Tensor:
    """What rounding to a type may be off by: of FP8 one step, of others some."""
    limits = torch.finfo(dtype)
    if dtype in FP8_MAX:
        return (limits.eps * torch.maximum(actual.abs(), expected.abs())).clamp(min=limits.smallest_normal * limits.eps)
    return 8 * limits.eps * expected.abs()


def _few_steps(actual: Tensor, expected: Tensor) -> Tensor:
    """Where codes differ by more than a step, or at all when they are many. Other types than FP8 must be equal."""
    differ = _same(actual, expected)
    if actual.dtype not in FP8_MAX:
        return differ
    return _too_many(actual, expected) | (differ & ((_bits(actual).int() - _bits(expected).int()).abs() > 1))


def _too_many(actual: Tensor, expected: Tensor) -> Tensor:
    """Where FP8 codes differ if they are many, else nowhere."""
    differ = _same(actual, expected)
    return differ & (differ.sum() > max(2, _FEW * differ.numel()))


def _sizes(op: str, arguments: Arguments) -> list[Tensor]:
    """The sum of the magnitudes behind every element of a product, its first result, and what follows from it."""
    if op != "scaled_mm_quantize":
        return [_magnitudes(op, arguments)]
    *product, scale, _ = arguments
    size = _magnitudes("scaled_mm", (*product, torch.float32))
    return [size * scale.double().abs(), size.max() if size.numel() else size.new_zeros(())]


def _magnitudes(op: str, arguments: Arguments) -> Tensor:
    return getattr(reference, op)(*(_absolute(argument) for argument in arguments)).double()  # type: ignore[no-any-return]


def _absolute(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return torch.float32  # of a result, which then has room for what cancels
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.float().abs().to(argument.dtype)
    return argument


def _described(actual: Tensor, expected: Tensor, wrong: Tensor) -> str:
    where = tuple(wrong.nonzero()[0].tolist())
    values = [float(t[where]) if t.is_floating_point() else int(t[where]) for t in (actual, expected)]
    place = ", ".join(map(str, where))
    return f"{int(wrong.sum())} of {wrong.numel()} values, the first at [{place}]: {values[0]:g} for {values[1]:g}"


def written(result: Any, arguments: Arguments, mutable: bool) -> Iterator[Tensor]:
    """The results of an op on the CPU, and its arguments where it writes into them."""
    for t in tensors(result, *(arguments if mutable else ())):
        yield t.cpu()
