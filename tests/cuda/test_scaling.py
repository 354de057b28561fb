"""delayed_update on the device has the bits of the reference, with any number of states in one call."""

from itertools import chain

import pytest
import torch

from fp8serve.fp8.ops import cases, reference
from fp8serve.fp8.ops.delayed import example_states


def check(kernels, args, expected):
    actual = kernels.here(args)
    kernels.ops.delayed_update(*actual)
    reference.delayed_update(*expected)
    for column, expected_column in zip(actual[:4], expected[:4], strict=True):
        for one, other in zip(column, expected_column, strict=True):
            assert torch.equal(one.cpu(), other)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", cases("delayed_update"), ids=lambda case: case.name)
def test_registered_cases_have_the_bits_of_the_reference(kernels, case):
    check(kernels, case.make(), case.make())


def test_more_states_than_a_launch_takes(kernels):
    """900 states of three lengths, of which the first launch takes 800."""

    def make():
        parts = [example_states(length, 300) for length in (1, 7, 16)]
        return *[list(chain(*column)) for column in zip(*parts, strict=True)], 0, 1, "max"

    check(kernels, make(), make())
