"""2^24 FP32 values of every sign, exponent and rounding boundary, and all of BF16 and FP16: every kernel that casts.

`fp8serve bench casts --all` is the same comparison on all 2^32; docs/numerics.md records a run.
"""

import pytest
import torch

from fp8serve.bench import casts
from fp8serve.fp8.ops import reference
from tests.csrc.helpers import FLOAT_MAX, assert_bits_equal


@pytest.fixture(scope="module")
def values():
    return casts.stratified()


def silent(what: str, done: int, total: int) -> None:
    """Nobody watches."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("probe", casts.PROBES)
def test_every_kernel_casts_2_24_values_like_the_reference(level, values, probe):
    found = casts.compare(iter(values.split(casts.CHUNK_VALUES)), values.numel(), silent, probes=[probe], at=[level])
    assert [f.values for f in found] == [2**23 if probe in casts.SCALES else 2**24] * len(found)
    assert [f for f in found if f.differing] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kernel_casts_every_short_value_like_the_reference(level, dtype):
    found = casts.compare(casts.all_values(dtype), 2**16, silent, at=[level])
    assert {f.probe for f in found} == set(casts.PROBES)
    assert {f.values for f in found} == {2**16, 2**15}
    assert [f for f in found if f.differing] == []


@pytest.mark.parametrize(("limit", "margin"), [(448.0, 0), (57344.0, 3)])
def test_delayed_scales_of_every_bf16_amax(limit, margin):
    """One state of one slot for each of the 32768 magnitudes, updated by the kernel and by the reference."""
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
