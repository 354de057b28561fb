"""What serving counts of its inputs, and the transpose of codes, on the device."""

import pytest
import torch

from fp8serve.fp8 import reference_fused
from fp8serve.fp8.cases import CASES
from tests.csrc.helpers import assert_codes_equal


@pytest.mark.parametrize("case", CASES["count_saturated"], ids=lambda case: case.name)
def test_counting(kernels, case):
    args, expected = kernels.here(case.make()), case.make()
    kernels.ops.count_saturated(*args)
    reference_fused.count_saturated(*expected)
    assert [float(t) for t in args[2:4]] == [float(t) for t in expected[2:4]]


def test_every_cut_off_element_is_counted(kernels):
    q = torch.full((300, 200), -448.0).to(torch.float8_e4m3fn)
    seen, saturated = kernels.here([torch.tensor(0.0), torch.tensor(0)])
    kernels.ops.count_saturated(*kernels.here((q, torch.tensor(500.0))), seen, saturated, 448.0, None)
    assert (float(seen), int(saturated)) == (500.0, 60_000)


@pytest.mark.parametrize("case", CASES["transpose_codes"], ids=lambda case: case.name)
def test_transpose(kernels, case):
    (q,) = case.make()
    assert_codes_equal(kernels.run("transpose_codes", q), q.t().contiguous())
