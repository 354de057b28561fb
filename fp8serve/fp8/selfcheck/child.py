"""The child process of the kernel check. It runs one kernel at a time and names the kernel before it runs it, so that
the parent process (`run_check`) knows which kernel has hung.

    python -m fp8serve.fp8.selfcheck.child < '{"device": "cuda:0", "known": [], "off": []}'

It writes lines of JSON: {"trying": name}, then {"name": name, "state": ..., "why": ...}, or {"name": name} if the
kernel supports no case on this machine, and {"done": true} at the end. After an exception on a GPU it ends without
{"done": true}, because later kernels in the same process would fail, too.

A kernel's results are compared with the reference bit by bit if the op is exact, else within rounding errors. The
comparison finds broken kernels (a wrong index, a missing synchronization, an instruction that differs on this chip),
whose errors are as large as the values. The tests check how exact the kernels are.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8serve.errors import one_line
from fp8serve.fp8.ops.arithmetic import FP8_MAX
from fp8serve.fp8.ops.registry import Case, reference
from fp8serve.fp8.selfcheck.candidates import MAX_CASES, UNSUPPORTED_CASE, Candidate, candidates
from fp8serve.fp8.selfcheck.switches import SEPARATE, switch_off
from fp8serve.fp8.selfcheck.verdict import KernelResult

EXACT = frozenset({
    "quantize", "quantize_transpose", "quantize_delayed", "quantize_current", "quantize_rowwise", "quantize_block",
    "transpose_fp8", "transpose_half", "grouped_quantize", "delayed_update", "write_kv", "rotary", "rotary_write_kv",
    "sample", "greedy_tokens", "pack_weight", "pack_4bit", "look_up", "sort_by_expert", "add_weighted",
})  # fmt: skip
# GEMMs. The allowed difference of a result is a share of the sum of the magnitudes of its summands.
_FP8_PRODUCTS = frozenset({
    "scaled_mm", "stored_mm", "scaled_mm_add", "scaled_mm_quantize", "watched_mm_add", "grouped_mm", "grouped_wgrad",
})  # fmt: skip
_PRODUCTS = _FP8_PRODUCTS | {"mm", "stored_rotary_mm"}
# The allowed difference from the reference, as a share of the sum of magnitudes, in addition to the rounding of the
# result. An FP8 instruction of Hopper's tensor cores adds 32 products to a sum. It drops the bits of the 33 summands
# and of the result that are smaller than 2^-13 times the largest summand, so it loses at most 34 x 2^-13 = 2^-7.9 of
# the magnitudes. Four instructions accumulate before the sum goes to FP32. Their errors have both signs, so the total
# in the GEMMs of a check stays below 2^-10. 2^-8 is four times that (tests/cuda/test_hopper.py). Attention rounds its
# weights to BF16.
_DEFAULT_TOLERANCE = 2.0**-11
_TOLERANCES = {"paged_attention": 2.0**-8, "attention_backward": 2.0**-7} | dict.fromkeys(_FP8_PRODUCTS, 2.0**-8)
_TOLERANCES["stored_rotary_mm"] = 2.0**-7  # three roundings to BF16 follow the sum
_MAX_DIFFERENT_SHARE = 0.02  # the share of FP8 values that may be rounded to the neighboring value

Arguments = tuple[Any, ...]


def send(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def move_to(value: Any, device: str) -> Any:
    """Returns the arguments of an op with all tensors on a device."""
    if isinstance(value, list | tuple):
        return type(value)(move_to(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


@cache
def reference_outputs(op: str, case: Case) -> list[Tensor]:
    """Returns the outputs of the reference on the CPU. They are cached, because kernels of an op share cases."""
    arguments = case.make()
    return list(outputs_of(getattr(reference, op)(*arguments), arguments, _is_mutable(op)))


def _is_mutable(op: str) -> bool:
    return bool(getattr(torch.ops.fp8serve, op).default._schema.is_mutable)


def compare_with_reference(candidate: Candidate, case: Case, device: str) -> str | None:
    """Returns a description of the difference between a kernel and the reference, or None if they agree.

    Raises RuntimeError with UNSUPPORTED_CASE in its message if the kernel does not support the case.
    """
    arguments = move_to(case.make(), device)
    outputs = list(outputs_of(candidate.run(*arguments), arguments, _is_mutable(candidate.op)))
    return describe_difference(candidate.op, case.make(), outputs, reference_outputs(candidate.op, case))


def check_kernel(candidate: Candidate, device: str) -> KernelResult | None:
    """Checks a kernel on at most MAX_CASES cases. Returns None if it supports no case."""
    num_compared = 0
    for case in candidate.cases:
        try:
            difference = compare_with_reference(candidate, case, device)
        except Exception as error:
            if UNSUPPORTED_CASE in str(error):
                continue
            return KernelResult("throws", f"{case.name}: {type(error).__name__}: {one_line(error)}")
        if difference is not None:
            return KernelResult("disagrees", f"{case.name}: {difference}")
        num_compared += 1
        if num_compared == MAX_CASES:
            break
    return KernelResult("agrees") if num_compared else None


def main() -> None:
    task = json.load(sys.stdin)
    device, checked_names, off = task["device"], set(task["known"]), set(task["off"])
    is_gpu = device != "cpu"
    if is_gpu:
        switch_off(torch.device(device), {*off, *SEPARATE})
    for candidate in candidates(device):
        if candidate.name in checked_names:
            continue
        send(trying=candidate.name)
        result = check_kernel(candidate, device)
        send(name=candidate.name, **({} if result is None else {"state": result.state, "why": result.why}))
        if is_gpu and result is not None and result.state != "agrees":
            if result.state == "throws":
                return
            off.add(candidate.name)
            switch_off(torch.device(device), off)
    send(done=True)


# -- comparison with the reference -------------------------------------------------------------------------------------


def flatten_tensors(*values: Any) -> list[Tensor]:
    """Returns all tensors in values, including nested lists and tuples, in order."""
    result: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            result.append(value)
        elif isinstance(value, list | tuple):
            result += flatten_tensors(*value)
    return result


def describe_difference(op: str, arguments: Arguments, actual: list[Tensor], expected: list[Tensor]) -> str | None:
    """Returns a phrase that describes how the results of an op differ from the expected ones, or None if they agree.

    `arguments` are equal to those that the op received; the magnitudes of sums are computed from them.
    """
    if [(t.dtype, t.shape) for t in actual] != [(t.dtype, t.shape) for t in expected]:
        return "results of another type or shape"
    magnitudes: list[Tensor | None] = list(_sums_of_magnitudes(op, arguments) if op in _PRODUCTS else [])
    magnitudes += [None] * (len(actual) - len(magnitudes))
    tolerance = _TOLERANCES.get(op, _DEFAULT_TOLERANCE)
    for a, e, magnitude in zip(actual, expected, magnitudes, strict=True):
        is_wrong = _differ_in_bits(a, e) if op in EXACT else _differ_beyond(a, e, tolerance, magnitude)
        if bool(is_wrong.any()):
            return _describe(a, e, is_wrong)
    return None


def _bits(t: Tensor) -> Tensor:
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(dtypes[t.itemsize]) if t.is_floating_point() else t


def _is_nan(t: Tensor) -> Tensor:
    return t.float().isnan() if t.is_floating_point() else torch.zeros(t.shape, dtype=torch.bool)


def _differ_in_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns a mask of the elements whose bits differ. All NaNs are equal."""
    return (_bits(actual) != _bits(expected)) & ~(_is_nan(actual) & _is_nan(expected))


def _differ_beyond(actual: Tensor, expected: Tensor, tolerance: float, magnitude: Tensor | None) -> Tensor:
    """Returns a mask of the elements that differ by more than the rounding and `tolerance * magnitude`.

    If `magnitude` is None, FP8 values may differ in a few roundings, and for other dtypes the largest expected value is
    the magnitude.
    """
    if not actual.is_floating_point() or (actual.dtype in FP8_MAX and magnitude is None):
        return _differ_beyond_roundings(actual, expected)
    a, e = actual.double(), expected.double()
    finite = e[e.isfinite()].abs()
    largest = finite.max() if finite.numel() else torch.zeros((), dtype=torch.float64)
    magnitude = largest if magnitude is None else magnitude
    allowed = _allowed_rounding(actual.dtype, a, e) + tolerance * magnitude + 1e-30
    is_wrong = ~(((a - e).abs() <= allowed) | (a == e) | (a.isnan() & e.isnan()))
    return is_wrong | _differ_too_often(actual, expected) if actual.dtype in FP8_MAX else is_wrong


def _allowed_rounding(dtype: torch.dtype, actual: Tensor, expected: Tensor) -> Tensor:
    """Returns the allowed rounding error: one step of an FP8 dtype, eight of another dtype."""
    limits = torch.finfo(dtype)
    if dtype in FP8_MAX:
        return (limits.eps * torch.maximum(actual.abs(), expected.abs())).clamp(min=limits.smallest_normal * limits.eps)
    return 8 * limits.eps * expected.abs()


def _differ_beyond_roundings(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns a mask of the FP8 values that differ by more than a step, or of all that differ if they are many.

    Values of other dtypes must be equal.
    """
    differ = _differ_in_bits(actual, expected)
    if actual.dtype not in FP8_MAX:
        return differ
    return _differ_too_often(actual, expected) | (differ & ((_bits(actual).int() - _bits(expected).int()).abs() > 1))


def _differ_too_often(actual: Tensor, expected: Tensor) -> Tensor:
    """Returns a mask of the FP8 values that differ if they are many, else an empty mask."""
    differ = _differ_in_bits(actual, expected)
    return differ & (differ.sum() > max(2, _MAX_DIFFERENT_SHARE * differ.numel()))


def _sums_of_magnitudes(op: str, arguments: Arguments) -> list[Tensor | None]:
    """Returns the sums of the magnitudes of a GEMM's summands: for each element of the result, and for an amax."""
    if op == "stored_rotary_mm":
        return _rotated_magnitudes(*arguments)
    if op != "scaled_mm_quantize":
        return [_run_with_magnitudes(op, arguments)]
    *operands, scale, _ = arguments
    sums = _run_with_magnitudes("scaled_mm", (*operands, torch.float32))
    return [sums * scale.double().abs(), sums.max() if sums.numel() else sums.new_zeros(())]


def _rotated_magnitudes(*arguments: Any) -> list[Tensor | None]:
    """Returns one entry for each compared tensor: the sums for the queries, None for each argument that the op only
    reads, and the sums for the caches of keys and values."""
    *operands, _, _, k_cache, v_cache, slots, k_scale, v_scale = arguments[:12]
    kv_heads, dim = k_cache.shape[2:]
    sums = _run_with_magnitudes("stored_mm", (*operands, torch.float32, *arguments[12:])).view(len(slots), -1, dim)
    q, k, v = sums.split_with_sizes((sums.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    q, k = (x + x.roll(dim // 2, -1) for x in (q, k))  # a rotation adds the elements of a pair
    caches = [torch.zeros(cached.shape, dtype=torch.float64) for cached in (k_cache, v_cache)]
    for cached, x, scale in zip(caches, (k, v), (k_scale, v_scale), strict=True):
        cached.view(-1, kv_heads, dim)[slots[slots >= 0]] = (x if scale is None else x * scale)[slots >= 0]
    return [q, *[None for _ in flatten_tensors(*arguments[:7])], *caches]


def _run_with_magnitudes(op: str, arguments: Arguments) -> Tensor:
    return getattr(reference, op)(*(_to_magnitude(argument) for argument in arguments)).double()  # type: ignore[no-any-return]


def _to_magnitude(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return torch.float32  # the dtype of the result, which must hold sums larger than the op's own
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.float().abs().to(argument.dtype)
    return argument


def _describe(actual: Tensor, expected: Tensor, is_wrong: Tensor) -> str:
    index = tuple(is_wrong.nonzero()[0].tolist())
    values = [float(t[index]) if t.is_floating_point() else int(t[index]) for t in (actual, expected)]
    indices = ", ".join(map(str, index))
    return (
        f"{int(is_wrong.sum())} of {is_wrong.numel()} values, the first at [{indices}]: {values[0]:g} for {values[1]:g}"
    )


def outputs_of(result: Any, arguments: Arguments, is_mutable: bool) -> Iterator[Tensor]:
    """Yields the results of an op, and its arguments if it writes into them, on the CPU."""
    for t in flatten_tensors(result, *(arguments if is_mutable else ())):
        yield t.cpu()


if __name__ == "__main__":
    with torch.no_grad():
        main()
