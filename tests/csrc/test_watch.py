"""What serving counts of its inputs."""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference

COUNTS = (torch.ops.fp8serve.count_saturated, reference.count_saturated)


@pytest.mark.parametrize("case", cases("count_saturated"), ids=lambda case: case.name)
def test_counting(level, case):
    args, expected = case.make(), case.make()
    torch.ops.fp8serve.count_saturated(*args)
    reference.count_saturated(*expected)
    assert [float(t) for t in args[5:7]] == [float(t) for t in expected[5:7]]


@pytest.mark.parametrize("count", COUNTS, ids=["op", "reference"])
def test_cut_off_is_beyond_the_end_and_not_rounded_to_it(level, count):
    """432 to 448 have the topmost code and have lost no more than a rounding; both signs count, NaN does not."""
    x = torch.tensor([-449.0, 449.0, torch.inf, -448.0, 448.0, 440.0, 432.0, torch.nan]).repeat(75, 50)
    seen, saturated = torch.tensor(3.0), torch.tensor(7)
    count(x, None, None, torch.tensor(1.0), torch.tensor(torch.inf), seen, saturated, None)
    assert (float(seen), int(saturated)) == (torch.inf, 7 + 3 * 75 * 50)


@pytest.mark.parametrize("count", COUNTS, ids=["op", "reference"])
def test_a_scale_made_for_the_largest_value_cuts_nothing_off(level, count):
    x = torch.rand(1, 4096, generator=torch.Generator().manual_seed(0)) * 100
    assert ((448 / x) * x > 448).any()  # the roundings of FP32
    for value in x[0, :64]:
        counters = torch.tensor(0.0), torch.tensor(0)
        count(value.view(1, 1), None, None, 448 / value, value, *counters, None)
        assert int(counters[1]) == 0


def test_nan_is_no_largest_magnitude(level):
    x, one, nan = torch.zeros(2, 16), torch.tensor(1.0), torch.tensor(float("nan"))
    for count in COUNTS:
        seen, saturated = torch.tensor(3.0), torch.tensor(7)
        count(x, None, None, one, nan, seen, saturated, None)
        assert (float(seen), int(saturated)) == (3.0, 7)


def test_a_wrong_counter_is_refused(level):
    x, one = torch.zeros(2, 16), torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"count_saturated: saturated"):
        torch.ops.fp8serve.count_saturated(x, None, None, one, one, torch.tensor(0.0), torch.tensor(0.0), None)
    with pytest.raises(RuntimeError, match=r"count_saturated: other: dim 0 is 3, must be K = 16"):
        torch.ops.fp8serve.count_saturated(x, torch.ones(3), 1e-5, one, one, one, torch.tensor(0), None)
    with pytest.raises(RuntimeError, match=r"count_saturated: eps: is given without a weight in other"):
        torch.ops.fp8serve.count_saturated(x, None, 1e-5, one, one, one, torch.tensor(0), None)
