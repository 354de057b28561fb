"""quantize_watched, with its counters, and transposes on the device."""

import pytest
import torch

from fp8serve.fp8.ops import cases
from tests.csrc.helpers import assert_bits_equal, assert_fp8_equal
from tests.csrc.test_watch import assert_counts


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("quantize_watched"), ids=lambda case: case.name)
def test_data_and_counters_are_those_of_separate_ops(kernels, case):
    assert_counts(kernels.ops, kernels.here(case.make()), case.make())


@pytest.mark.parametrize("rows", [None, 0, 1, 299, 300, 1000])
def test_every_saturated_element_is_counted(kernels, rows):
    """Several blocks count, and rows end inside a chunk."""
    x = torch.tensor([-449.0, 448.0, 449.0]).repeat(300, 151)
    amax, saturated = kernels.here([torch.tensor(0.0), torch.tensor(7)])
    x, one = kernels.here((x, torch.tensor(1.0)))
    live = None if rows is None else kernels.here(torch.tensor(rows))
    kernels.ops.quantize_watched(x, None, None, one, amax, saturated, live)
    counted = 300 if rows is None else min(rows, 300)
    assert (float(amax), int(saturated)) == (449.0 if counted else 0.0, 7 + counted * 302)


def test_counters_never_fall(kernels):
    x = torch.tensor([[1.0, -3.0, torch.nan]])
    amax, saturated = kernels.here([torch.tensor(5.0), torch.tensor(2)])
    kernels.ops.quantize_watched(*kernels.here((x, None, None, torch.tensor(1.0))), amax, saturated, None)
    assert (float(amax), int(saturated)) == (5.0, 2)


@pytest.mark.parametrize("case", cases("transpose_fp8"), ids=lambda case: case.name)
def test_transpose_fp8(kernels, case):
    (q,) = case.make()
    assert_fp8_equal(kernels.run("transpose_fp8", q), q.t().contiguous())


@pytest.mark.parametrize("case", cases("transpose_half"), ids=lambda case: case.name)
def test_transpose_half(kernels, case):
    (x,) = case.make()
    assert_bits_equal(kernels.run("transpose_half", x), x.t().contiguous())


def test_transpose_of_an_unaligned_view(kernels):
    x = torch.randn(65, 320, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    here = kernels.here(x.flatten())[8 * 320 + 1 : 8 * 320 + 1 + 48 * 64].view(48, 64)
    assert_bits_equal(kernels.ops.transpose_half(here).cpu(), here.cpu().t().contiguous())
