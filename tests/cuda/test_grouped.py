"""Grouped ops on the device; on the emulated GPU, each product has the bits of scaled_mm by the same kernel."""

from functools import partial

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.ops.grouped import expert_row_ranges, wgrad_case
from fp8serve.fp8.ops.registry import Case
from fp8serve.fp8.selfcheck.candidates import gpu_cases
from tests.csrc.helpers import FORMATS, HIGH, assert_bits_equal, assert_fp8_equal, hostile, tame
from tests.csrc.test_gemm import E4M3, E5M2
from tests.csrc.test_grouped import COUNTS, SCALES, offsets_of, operands
from tests.cuda.accumulation import assert_within_accumulation

BF16 = torch.bfloat16


def product(kernels, a, b, a_scale, b_scale, bias, out, few):
    """Runs scaled_mm by the kernel that grouped_mm should select on the emulated GPU; a GPU may select CUTLASS."""
    args = a, b, a_scale, b_scale, bias, out
    return kernels.run("scaled_mm_by", *args, "skinny" if few else "mma", 1)


def looped(kernels, a, b, a_scale, b_scale, offsets, bias, out):
    few = len(a) <= 64 and E5M2 not in (a.dtype, b.dtype)
    parts = [a.new_empty((0, b.shape[1]), dtype=out)]
    for e, (begin, end) in enumerate(expert_row_ranges(offsets)):
        if begin < end:
            scale = a_scale if a_scale.dim() == 0 else a_scale[e] if a_scale.dim() == 1 else a_scale[begin:end]
            more = None if bias is None else bias[e]
            parts.append(product(kernels, a[begin:end], b[e], scale, b_scale[e], more, out, few))
    return torch.cat(parts)


def assert_each_expert_is_right(kernels, actual, a, b, a_scale, b_scale, offsets, bias, out):
    if kernels.device == "cpu":
        assert_bits_equal(actual, looped(kernels, a, b, a_scale, b_scale, offsets, bias, out))
        return
    for e, (begin, end) in enumerate(expert_row_ranges(offsets)):
        scale = a_scale if a_scale.dim() == 0 else a_scale[e] if a_scale.dim() == 1 else a_scale[begin:end]
        more = None if bias is None else bias[e]
        assert_within_accumulation(
            actual[begin:end], a[begin:end], b[e], scale, b_scale[e], more, device=kernels.device
        )


CASES = gpu_cases("grouped_mm")


@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_registered_cases_equal_scaled_mm_of_each_expert(kernels, case):
    args = case.make()
    actual = kernels.run("grouped_mm", *args)
    assert actual.dtype == args[-1]
    assert_each_expert_is_right(kernels, actual, *args)


# K = 272 is a multiple of 16, as CUTLASS needs; 77 is padded. "decoding" takes the skinny kernel, "prefill" mma, with
# experts of 0, 1 and 130 rows.
@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(40, 272), (33, 77)])
@pytest.mark.parametrize("counts", ["decoding", "prefill", "one expert"])
@pytest.mark.parametrize("scales", SCALES)
def test_products_of_experts_equal_scaled_mm_of_each(kernels, shape, counts, scales):
    (n, k), rows = shape, COUNTS[counts]
    for a_dtype, out in ((E4M3, BF16), (E5M2, torch.float32)):
        args = *operands(rows, n, k, scales, a_dtype), offsets_of(rows)
        bias = tame(len(rows), n, seed=3) if a_dtype == E4M3 else None
        assert_each_expert_is_right(kernels, kernels.run("grouped_mm", *args, bias, out), *args, bias, out)


def test_many_rows_of_a_few_experts_are_split_along_k(kernels):
    """Decoding over a long K: partial sums of several blocks, more than 16 rows of one expert, output in FP16."""
    rows = [0, 40, 0, 1, 17, 0]
    args = *operands(rows, 24, 4224, "row", E4M3), offsets_of(rows), None, torch.float16
    assert_each_expert_is_right(kernels, kernels.run("grouped_mm", *args), *args)


def test_transposed_weights_and_every_pair_of_formats(kernels):
    """The gradient of the input multiplies by the transposed weight."""
    rows = [3, 0, 66]
    for a_dtype in FORMATS:
        for b_dtype in FORMATS:
            a, b, *scales = operands(rows, 48, 144, "expert", a_dtype)
            args = a, b.to(b_dtype), *scales, offsets_of(rows), None, torch.float32
            expected = kernels.run("grouped_mm", *args)
            transposed = kernels.here(args[1].transpose(1, 2).contiguous()).transpose(1, 2)
            others = kernels.here((args[0], *args[2:]))
            actual = kernels.ops.grouped_mm(others[0], transposed, *others[1:])
            assert_bits_equal(actual.cpu(), expected)
            assert_each_expert_is_right(kernels, expected, *args)


def test_no_rows_and_no_columns(kernels):
    a, b, *scales = operands([0, 0], 16, 32, "row", E4M3)
    assert kernels.run("grouped_mm", a, b, *scales, offsets_of([0, 0]), None, BF16).shape == (0, 16)
    a, b, *_ = operands([3, 2], 16, 0, "expert", E4M3)
    bias = tame(2, 16, seed=1)
    actual = kernels.run("grouped_mm", a, b, torch.ones(2), torch.ones(2), offsets_of([3, 2]), bias, torch.float32)
    assert torch.equal(actual, bias[[0, 0, 0, 1, 1]])


# Weight gradients.


def wgrad_parts(a, b, a_scale, b_scale, offsets):
    """Yields (expert, operands of scaled_mm) for every expert with columns."""
    first = 0
    for e, (begin, end) in enumerate(expert_row_ranges(offsets)):
        past = first + -(-(end - begin) // 128)

        def part(scale, expert=e, piece=slice(first, past)):
            return scale[:, piece] if scale.dim() == 2 else scale[expert] if scale.dim() else scale

        if begin < end:
            yield e, (a[:, begin:end], b[:, begin:end], part(a_scale), part(b_scale))
        first = past


# 144 x 160: an output that CUTLASS computes on its chips.
WGRADS = [*cases("grouped_wgrad"), *(
    Case(f"{kind} {a} {out}", partial(wgrad_case, "many rows", kind, 144, 160, a, out))
    for kind in ("expert", "row", "block", "block, row") for a in FORMATS for out in (BF16, torch.float32)
)]  # fmt: skip


@pytest.mark.pairwise
@pytest.mark.parametrize("case", WGRADS, ids=lambda case: case.name)
def test_weight_gradients_equal_scaled_mm_of_each_expert(kernels, case):
    *args, out = case.make()
    actual = kernels.run("grouped_wgrad", *args, out)
    assert (actual.dtype, actual.shape) == (out, (len(args[4]), len(args[0]), len(args[1])))
    parts = dict(wgrad_parts(*args))
    for e in range(len(args[4])):
        if e not in parts:
            assert (actual[e] == 0).all()
        elif kernels.device == "cpu" and 2 not in (args[2].dim(), args[3].dim()):
            assert_bits_equal(actual[e], kernels.run("scaled_mm_by", *parts[e], None, out, "mma", 1))
        else:  # scaled_mm treats the scales of a single block as row scales, and multiplies the whole sum
            assert_within_accumulation(actual[e], *parts[e], device=kernels.device)


def test_the_weight_gradient_of_an_expert_without_rows_is_zero_whatever_its_scale(kernels):
    a, b, offsets = tame(16, 20, seed=1).to(E5M2), tame(48, 20, seed=2).to(E4M3), offsets_of([7, 0, 13, 0])
    scale = torch.tensor([1.0, torch.nan, 0.5, torch.inf])
    actual = kernels.run("grouped_wgrad", a, b, scale, scale, offsets, torch.float32)
    assert (actual[[1, 3]] == 0).all()
    assert_within_accumulation(actual[2], a[:, 7:], b[:, 7:], scale[2], scale[2], device=kernels.device)


# Offsets that the host cannot check.


@pytest.mark.parametrize("ends", [[2, 1, 900], [-5, 3, 4], [900, 900, 900], [5, 0, 3], [0, 0, 1]])
@pytest.mark.parametrize("rows", [6, 130])
def test_wrong_offsets_cause_no_access_outside_of_the_tensors(kernels, ends, rows):
    """The results are undefined, but no access leaves the tensors; on the emulated GPU it could crash the process."""
    offsets = torch.tensor(ends, dtype=torch.int32)
    a, b, *scales = operands([rows, 0, 0], 32, 64, "row", E4M3)
    assert kernels.run("grouped_mm", a, b, *scales, offsets, None, BF16).shape == (rows, 32)
    one = torch.ones(())
    actual = kernels.run("grouped_wgrad", a.t().contiguous(), a.t().contiguous(), one, one, offsets, BF16)
    assert actual.shape == (3, 64, 64)
    q, amax = kernels.run("grouped_quantize", tame(rows, 64, seed=1), torch.ones(3), offsets, E4M3)
    assert (q.shape, amax.shape) == ((rows, 64), (3,))


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("grouped_quantize"), ids=lambda case: case.name)
def test_casts_are_those_of_each_expert(kernels, case):
    args = case.make()
    q, amax = kernels.run("grouped_quantize", *args)
    expected, largest = reference.grouped_quantize(*args)
    assert_fp8_equal(q, expected)
    assert_bits_equal(amax, largest)


@pytest.mark.parametrize("dtype", HIGH)
def test_special_values_are_cast_like_the_reference(kernels, dtype):
    args = hostile(70, 300, dtype), torch.tensor([0.5, 7.3, 1e-3]), offsets_of([30, 0, 40]), E5M2
    q, amax = kernels.run("grouped_quantize", *args)
    expected, largest = reference.grouped_quantize(*args)
    assert_fp8_equal(q, expected)
    assert_bits_equal(amax, largest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(5, 64, dtype=BF16)}, "dtype is BFloat16, must be Float8_e4m3fn or Float8_e5m2"),
        ({"offsets": torch.tensor([1, 2, 3, 5])}, "dtype is Long, must be Int"),
        ({"offsets": torch.tensor([1, 2, 5], dtype=torch.int32)}, "dim 0 is 3, must be E = 4"),
        ({"a_scale": torch.ones(3)}, "dim 0 is 3, must be E = 4"),
        ({"b_scale": torch.ones(4, 2, 1)}, r"dim 1 is 2, must be ceil\(N=32 / 128\) = 1"),
        ({"a": torch.zeros(5, 63).to(E4M3)}, "dim 2 is 64, must be K = 63"),
    ],
)
def test_wrong_arguments_are_refused(kernels, change, message):
    a, b, a_scale, b_scale = operands([1, 1, 1, 2], 32, 64, "expert", E4M3)
    arguments = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "offsets": offsets_of([1, 1, 1, 2])} | change
    with pytest.raises(RuntimeError, match=message):
        kernels.run("grouped_mm", *arguments.values(), None, BF16)
