"""The model of Hopper's sums (hopper.py) gives the recorded errors of an H200, and the self-check accepts it.

With the model, no Hopper GPU is needed to test that the self-check accepts its products and rejects wrong ones.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.ops.registry import Case
from fp8serve.fp8.selfcheck.candidates import gpu_candidates
from fp8serve.fp8.selfcheck.child import describe_difference, flatten_tensors
from tests.csrc.test_gemm import exact
from tests.cuda import hopper
from tests.cuda.accumulation import assert_within_accumulation, magnitudes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PRODUCTS = ("scaled_mm", "scaled_mm_add", "scaled_mm_quantize", "grouped_mm", "grouped_wgrad")
Arguments = tuple[Any, ...]

# Absolute errors of three products of CUTLASS on an NVIDIA H200: the first and last three elements of the first row,
# the first element of the second row, and the first and last three elements of the last row.
H200 = {
    f"(128, 128, 256) ({E4M3}, {E4M3}) ('tensor', 'tensor') torch.float32":
        "1.5057e+00 5.1002e+00 4.2289e+00 1.1404e-02 7.8129e-03 2.6517e-03 1.1182e+00"
        " 2.1025e-03 3.2979e-01 1.4294e-01 5.4396e-02 2.0399e-01 3.9214e-02",
    f"(128, 128, 256) ({E5M2}, {E4M3}) ('row', 'row') torch.float32":
        "2.2654e+00 2.9064e+00 3.0984e+00 5.1160e-03 5.6826e-02 3.2234e-02 1.1937e+00"
        " 2.9054e-01 1.2314e-01 6.0743e-02 5.9674e-02 3.9470e-01 8.1202e-03",
    f"(128, 128, 256) ({E4M3}, {E4M3}) ('tensor', 'row') torch.float32":
        "4.9353e+00 1.2800e+01 2.1198e+00 2.1007e-02 3.8278e-02 5.7626e-03 3.6645e+00"
        " 6.8578e-03 8.2736e-01 7.1627e-02 1.0016e-01 9.9897e-01 8.5300e-02",
}  # fmt: skip


@pytest.mark.parametrize("name", H200)
def test_the_errors_are_those_of_an_h200(name: str) -> None:
    case = next(case for case in cases("scaled_mm") if case.name == name)
    *operands, bias, out = case.make()
    error = (hopper.scaled_mm(*operands, bias, out).double() - exact(*operands)).abs()
    ends = torch.cat([error[0, :3], error[0, -3:], error[1, :1], error[-1, :3], error[-1, -3:]])
    assert " ".join(f"{value:.4e}" for value in ends.tolist()) == H200[name]


@pytest.fixture(scope="module", autouse=True)
def cached_sums() -> Iterator[None]:
    """Caches sums, since cases with different scales have the same operands."""
    cache: dict[Any, list[Tensor]] = {}
    compute = hopper.sums

    def sums(a: Tensor, b: Tensor) -> list[Tensor]:
        key = tuple((x.dtype, x.shape, bytes(x.contiguous().view(torch.uint8).flatten().tolist())) for x in (a, b))
        if key not in cache:
            cache[key] = compute(a, b)
        return cache[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "sums", sums)
        yield


def fp8_cases(op: str) -> list[Case]:
    """Returns all FP8 cases that the self-check may run on kernels of an op."""
    every = {case.name: case for c in gpu_candidates(torch.ops.fp8serve) if c.op == op for case in c.cases}
    return [case for case in every.values() if case.make()[0].itemsize == 1 and case.make()[0].numel()]


@pytest.mark.parametrize("op", PRODUCTS)
def test_the_self_check_accepts_hoppers_sums(op: str) -> None:
    for case in fp8_cases(op):
        actual, expected = getattr(hopper, op)(*case.make()), getattr(reference, op)(*case.make())
        assert describe_difference(op, case.make(), flatten_tensors(actual), flatten_tensors(expected)) is None, (
            case.name
        )


def without_the_last_block_of_k(arguments: Arguments) -> Arguments:
    a = arguments[0].clone()
    a[:, -hopper.PROMOTED :] = 0
    return a, *arguments[1:]


def with_rows_exchanged(arguments: Arguments) -> Arguments:
    return arguments[0].roll(1, 0), *arguments[1:]


def with_scales_of_the_next(place: int) -> Callable[[Arguments], Arguments]:
    """Returns a fault that uses the scales of the next row, block or expert, for operand a (place 2) or b (place 3)."""

    def change(arguments: Arguments) -> Arguments:
        scale = arguments[place]
        moved = scale.roll(1, 0) if scale.dim() and len(scale) > 1 else scale
        return *arguments[:place], moved, *arguments[place + 1 :]

    return change


FAULTS = {
    "K": without_the_last_block_of_k,
    "rows": with_rows_exchanged,
    "scales of a": with_scales_of_the_next(2),
    "scales of b": with_scales_of_the_next(3),
}


def faulty_results(op: str, fault: str) -> Iterator[tuple[Case, list[Tensor], list[Tensor]]]:
    """Yields (case, right results, wrong results) for every case whose results the fault changes."""
    for case in fp8_cases(op):
        right, wrong = (
            flatten_tensors(getattr(reference, op)(*args)) for args in (case.make(), FAULTS[fault](case.make()))
        )
        if not all(torch.equal(one.float(), other.float()) for one, other in zip(right, wrong, strict=True)):
            yield case, right, wrong


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("op", [op for op in PRODUCTS if op != "scaled_mm_add"])  # which has few cases
def test_the_self_check_rejects_wrong_products(op: str, fault: str) -> None:
    results = list(faulty_results(op, fault))
    assert len(results) >= 3
    for case, right, wrong in results:
        assert describe_difference(op, case.make(), wrong, right) is not None, case.name


def test_errors_of_sums_are_within_those_documented() -> None:
    """docs/cuda.md states the errors in its section on accumulation."""
    for case in fp8_cases("scaled_mm"):
        *operands, _, out = case.make()
        if out == torch.float32 and operands[0].shape[0] > 1 and operands[1].numel():
            size = magnitudes(*operands).clamp(min=1e-300)
            share = (hopper.scaled_mm(*operands, None, out).double() - exact(*operands)).abs() / size
            assert share.max() < 2.0**-10
            assert share.mean() < 2.0**-14


def test_the_tolerance_of_the_tests_accepts_hoppers_sums() -> None:
    for case in fp8_cases("scaled_mm"):
        *operands, bias, out = case.make()
        assert_within_accumulation(hopper.scaled_mm(*operands, bias, out), *operands, bias, device="cuda")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tolerance_of_the_tests_rejects_wrong_products(fault: str) -> None:
    for case, _, (wrong,) in faulty_results("scaled_mm", fault):
        *operands, bias, _ = case.make()
        with pytest.raises(AssertionError):
            assert_within_accumulation(wrong, *operands, bias, device="cuda")
