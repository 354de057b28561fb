"""What serving counts of its inputs, and the transpose of FP8 data, on the device."""

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from tests.csrc.helpers import assert_fp8_equal


@pytest.mark.parametrize("case", cases("count_saturated"), ids=lambda case: case.name)
def test_counting(kernels, case):
    args, expected = kernels.here(case.make()), case.make()
    kernels.ops.count_saturated(*args)
    reference.count_saturated(*expected)
    assert [float(t) for t in args[5:7]] == [float(t) for t in expected[5:7]]


def test_every_cut_off_element_is_counted(kernels):
    x = torch.tensor([-449.0, 448.0]).repeat(300, 100)
    seen, saturated = kernels.here([torch.tensor(0.0), torch.tensor(0)])
    x, one, amax = kernels.here((x, torch.tensor(1.0), torch.tensor(449.0)))
    kernels.ops.count_saturated(x, None, None, one, amax, seen, saturated, None)
    assert (float(seen), int(saturated)) == (449.0, 30_000)


@pytest.mark.parametrize("case", cases("transpose_fp8"), ids=lambda case: case.name)
def test_transpose(kernels, case):
    (q,) = case.make()
    assert_fp8_equal(kernels.run("transpose_fp8", q), q.t().contiguous())
