"""quantize_watched casts an input and updates its amax and its count of saturated values."""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.ops.registry import restore_library_kernels, use_default_kernel
from tests.csrc.helpers import FORMATS, assert_fp8_equal

WATCHED = torch.ops.fp8serve.quantize_watched
CASTS = (WATCHED, reference.quantize_watched)


def counters_after(cast, *args):
    """Returns the amax and the count after a cast that starts with amax 3 and count 7."""
    amax, saturated = torch.tensor(3.0), torch.tensor(7)
    cast(*args, amax, saturated, None)
    return float(amax), int(saturated)


def assert_counts(ops, args, expected):
    """Checks that the data, and the amax of the first `rows` rows, have the bits of the op without counters, and that
    the count is that of the reference."""
    x, other, eps, scale, amax, saturated, rows = args
    before = amax.clone()
    q = ops.quantize_watched(*args)
    reference.quantize_watched(*expected)

    def cast(live):
        if other is None:
            return ops.quantize(x[:live], scale, FORMATS[0])
        if eps is None:
            return ops.silu_mul_quantize(x[:live], other[:live], scale, FORMATS[0])
        return ops.rms_norm_quantize(x[:live], other, eps, scale, FORMATS[0])

    assert_fp8_equal(q.cpu(), cast(None)[0].cpu())
    assert float(amax) == max(float(before), float(cast(None if rows is None else int(rows))[1]))
    assert int(saturated) == int(expected[5])


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_watched"), ids=lambda case: case.name)
def test_data_and_counters_are_those_of_separate_ops(level, case):
    assert_counts(torch.ops.fp8serve, case.make(), case.make())


def test_without_its_kernel_the_op_is_composed_of_other_ops():
    """This happens on a GPU where the self-check has switched the kernel off."""
    arguments = [case.make() for case in cases("quantize_watched")]
    expected = [case.make() for case in cases("quantize_watched")]
    kernels = [WATCHED(*args) for args in expected]
    use_default_kernel("quantize_watched", "cpu")
    try:
        composed = [WATCHED(*args) for args in arguments]
    finally:
        restore_library_kernels("cpu")
    for q, kernel_q, args, kernel_args in zip(composed, kernels, arguments, expected, strict=True):
        assert_fp8_equal(q, kernel_q)
        assert args[4:6] == kernel_args[4:6]


@pytest.mark.parametrize("cast", CASTS, ids=["op", "reference"])
def test_only_values_above_the_range_count_as_saturated(level, cast):
    """Values from 432 to 448 round to the largest code and do not count. Both signs count, NaN does not."""
    x = torch.tensor([-449.0, 449.0, torch.inf, -448.0, 448.0, 440.0, 432.0, torch.nan]).repeat(75, 50)
    assert counters_after(cast, x, None, None, torch.tensor(1.0)) == (torch.inf, 7 + 3 * 75 * 50)


@pytest.mark.parametrize("cast", CASTS, ids=["op", "reference"])
def test_a_scale_from_the_largest_value_saturates_nothing(level, cast):
    x = torch.rand(1, 4096, generator=torch.Generator().manual_seed(0)) * 100
    assert ((448 / x) * x > 448).any()  # because of FP32 roundings
    for value in x[0, :64]:
        assert counters_after(cast, value.view(1, 1), None, None, 448 / value)[1] == 7


@pytest.mark.parametrize("cast", CASTS, ids=["op", "reference"])
def test_nan_changes_neither_amax_nor_count(level, cast):
    x = torch.full((2, 16), torch.nan)
    assert counters_after(cast, x, None, None, torch.tensor(1.0)) == (3.0, 7)


def test_a_wrong_counter_is_refused(level):
    x, one = torch.zeros(2, 16), torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"quantize_watched: saturated"):
        WATCHED(x, None, None, one, torch.tensor(0.0), torch.tensor(0.0), None)
    with pytest.raises(RuntimeError, match=r"quantize_watched: other: dim 0 is 3, must be K = 16"):
        WATCHED(x, torch.ones(3), 1e-5, one, one, torch.tensor(0), None)
    with pytest.raises(RuntimeError, match=r"quantize_watched: eps: is given without a weight in other"):
        WATCHED(x, None, 1e-5, one, one, torch.tensor(0), None)
