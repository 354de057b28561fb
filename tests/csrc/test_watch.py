"""What serving counts of its inputs."""

import pytest
import torch

from fp8serve.fp8 import reference_fused
from fp8serve.fp8.cases import CASES


@pytest.mark.parametrize("case", CASES["count_saturated"], ids=lambda case: case.name)
def test_counting(level, case):
    args, expected = case.make(), case.make()
    torch.ops.fp8serve.count_saturated(*args)
    reference_fused.count_saturated(*expected)
    assert [float(t) for t in args[2:4]] == [float(t) for t in expected[2:4]]


def test_both_signs_are_counted_onto_what_was_before(level):
    q = torch.tensor([-448.0, 448.0, 416.0, 0.0]).to(torch.float8_e4m3fn).repeat(75, 50)
    seen, saturated = torch.tensor(3.0), torch.tensor(7)
    torch.ops.fp8serve.count_saturated(q, torch.tensor(500.0), seen, saturated, 448.0, None)
    assert (float(seen), int(saturated)) == (500.0, 7 + 7500)


def test_nan_is_no_largest_magnitude(level):
    q, nan = torch.zeros(2, 16).to(torch.float8_e4m3fn), torch.tensor(float("nan"))
    for count in (torch.ops.fp8serve.count_saturated, reference_fused.count_saturated):
        seen, saturated = torch.tensor(3.0), torch.tensor(7)
        count(q, nan, seen, saturated, 448.0, None)
        assert (float(seen), int(saturated)) == (3.0, 7)


def test_a_wrong_counter_is_refused(level):
    q = torch.zeros(2, 16).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"count_saturated: saturated"):
        torch.ops.fp8serve.count_saturated(q, torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0), 448.0, None)
