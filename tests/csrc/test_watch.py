"""What serving counts of its inputs as it casts them."""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.ops.registry import restore_library_kernels, use_default_kernel
from tests.csrc.helpers import FORMATS, assert_fp8_equal

WATCHED = torch.ops.fp8serve.quantize_watched
CASTS = (WATCHED, reference.quantize_watched)


def counted(cast, *args):
    """The counters after a cast that began with 3 and 7."""
    seen, saturated = torch.tensor(3.0), torch.tensor(7)
    cast(*args, seen, saturated, None)
    return float(seen), int(saturated)


def assert_counts(ops, args, expected):
    """The cast, and the amax of the rows that count, are those of the op that does not count, to the bit; the count is
    the reference's."""
    x, other, eps, scale, seen, saturated, rows = args
    before = seen.clone()
    q = ops.quantize_watched(*args)
    reference.quantize_watched(*expected)

    def cast(live):
        if other is None:
            return ops.quantize(x[:live], scale, FORMATS[0])
        if eps is None:
            return ops.silu_mul_quantize(x[:live], other[:live], scale, FORMATS[0])
        return ops.rms_norm_quantize(x[:live], other, eps, scale, FORMATS[0])

    assert_fp8_equal(q.cpu(), cast(None)[0].cpu())
    assert float(seen) == max(float(before), float(cast(None if rows is None else int(rows))[1]))
    assert int(saturated) == int(expected[5])


@pytest.mark.smoke
@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_watched"), ids=lambda case: case.name)
def test_counting(level, case):
    assert_counts(torch.ops.fp8serve, case.make(), case.make())


def test_where_the_kernel_is_off_it_is_composed_of_the_casts():
    """As it is on a GPU whose kernel a check has found wrong."""
    found = [case.make() for case in cases("quantize_watched")]
    expected = [case.make() for case in cases("quantize_watched")]
    kernels = [WATCHED(*args) for args in expected]
    use_default_kernel("quantize_watched", "cpu")
    try:
        composed = [WATCHED(*args) for args in found]
    finally:
        restore_library_kernels("cpu")
    for q, wanted, args, others in zip(composed, kernels, found, expected, strict=True):
        assert_fp8_equal(q, wanted)
        assert args[4:6] == others[4:6]


@pytest.mark.parametrize("cast", CASTS, ids=["op", "reference"])
def test_cut_off_is_beyond_the_end_and_not_rounded_to_it(level, cast):
    """432 to 448 have the topmost code and have lost no more than a rounding; both signs count, NaN does not."""
    x = torch.tensor([-449.0, 449.0, torch.inf, -448.0, 448.0, 440.0, 432.0, torch.nan]).repeat(75, 50)
    assert counted(cast, x, None, None, torch.tensor(1.0)) == (torch.inf, 7 + 3 * 75 * 50)


@pytest.mark.parametrize("cast", CASTS, ids=["op", "reference"])
def test_a_scale_made_for_the_largest_value_cuts_nothing_off(level, cast):
    x = torch.rand(1, 4096, generator=torch.Generator().manual_seed(0)) * 100
    assert ((448 / x) * x > 448).any()  # the roundings of FP32
    for value in x[0, :64]:
        assert counted(cast, value.view(1, 1), None, None, 448 / value)[1] == 7


@pytest.mark.parametrize("cast", CASTS, ids=["op", "reference"])
def test_nan_is_no_largest_magnitude(level, cast):
    x = torch.full((2, 16), torch.nan)
    assert counted(cast, x, None, None, torch.tensor(1.0)) == (3.0, 7)


def test_a_wrong_counter_is_refused(level):
    x, one = torch.zeros(2, 16), torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"quantize_watched: saturated"):
        WATCHED(x, None, None, one, torch.tensor(0.0), torch.tensor(0.0), None)
    with pytest.raises(RuntimeError, match=r"quantize_watched: other: dim 0 is 3, must be K = 16"):
        WATCHED(x, torch.ones(3), 1e-5, one, one, torch.tensor(0), None)
    with pytest.raises(RuntimeError, match=r"quantize_watched: eps: is given without a weight in other"):
        WATCHED(x, None, 1e-5, one, one, torch.tensor(0), None)
