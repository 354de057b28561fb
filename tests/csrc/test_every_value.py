"""Every kernel that casts equals the reference on 2^24 FP32 values of every sign, exponent and rounding boundary, and
on all BF16 and FP16 values.

`fp8serve bench casts --all` compares all 2^32 FP32 values; docs/numerics.md has its results.
"""

import pytest
import torch

from fp8serve.bench import casts
from fp8serve.fp8.ops import reference
from tests.csrc.helpers import FLOAT_MAX, assert_bits_equal


@pytest.fixture(scope="module")
def values():
    return casts.stratified()


def no_progress(what: str, completed: int, total: int) -> None:
    """A progress callback that does nothing."""


@pytest.mark.exhaustive
@pytest.mark.pairwise(strength=1)  # the next test has all pairs
@pytest.mark.parametrize("probe", casts.PROBES)
def test_every_kernel_casts_2_24_values_like_the_reference(level, values, probe):
    findings = casts.compare(
        iter(values.split(casts.CHUNK_VALUES)), values.numel(), no_progress, probes=[probe], at=[level]
    )
    assert [f.values for f in findings] == [2**23 if probe in casts.SCALES else 2**24] * len(findings)
    assert [f for f in findings if f.differing] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kernel_casts_every_short_value_like_the_reference(level, dtype):
    findings = casts.compare(casts.all_values(dtype), 2**16, no_progress, at=[level])
    assert {f.probe for f in findings} == set(casts.PROBES)
    assert {f.values for f in findings} == {2**16, 2**15}
    assert [f for f in findings if f.differing] == []


@pytest.mark.parametrize(("limit", "margin"), [(448.0, 0), (57344.0, 3)])
def test_delayed_scales_of_every_bf16_amax_equal_the_reference(limit, margin):
    """Updates 32768 states with a history of one slot, one for each magnitude, by the kernel and by the reference."""
    amaxes = next(casts.all_values(torch.bfloat16)).float()
    results = []
    for ops in (torch.ops.fp8serve, reference):
        scales, histories = torch.full_like(amaxes, 0.5), amaxes.clone().view(-1, 1)
        counts = torch.zeros(2, len(amaxes), dtype=torch.int64)
        states = [list(t.unbind()) for t in (scales, histories, counts[0], counts[1])]
        ops.delayed_update(*states, [limit] * len(amaxes), margin, 1, "max")
        results.append((scales, histories, counts))
    (scales, histories, counts), (expected, expected_histories, expected_counts) = results
    assert_bits_equal(scales, expected)
    assert_bits_equal(histories, expected_histories)
    assert torch.equal(counts, expected_counts)
    assert scales.max() == FLOAT_MAX
