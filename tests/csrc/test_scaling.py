"""delayed_update in C++ has the bits of the reference for random histories and the edge cases of docs/numerics.md."""

import copy

import pytest
import torch
from torch import Tensor

from fp8serve.fp8.ops import reference

FLOAT_MAX = torch.finfo(torch.float32).max


def states(lengths: list[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[float]]:
    make = torch.Generator().manual_seed(0)
    staged = [0.0, 1.5, torch.inf, 1e-45, FLOAT_MAX, 3e-39, 77.0]
    histories = [torch.rand(n, generator=make) * 10 for n in lengths]
    for i, history in enumerate(histories):
        history[0] = staged[i % len(staged)]
    scales = [torch.tensor(1.0 + i) for i in range(len(lengths))]
    counts = [torch.tensor(i) for i in range(len(lengths))]
    return scales, histories, copy.deepcopy(counts), counts, [448.0 if i % 2 else 57344.0 for i in range(len(lengths))]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("interval", [1, 2])
def test_update_equals_the_reference(algo, margin, interval):
    actual = states([1, 2, 3, 16, 16, 5, 1, 7, 1024, 2, 2, 2, 9, 9])
    expected = copy.deepcopy(actual)
    for _ in range(4):
        torch.ops.fp8serve.delayed_update(*actual, margin, interval, algo)
        reference.delayed_update(*expected, margin, interval, algo)
        for ours, theirs in zip(actual[:4], expected[:4], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a, b)
        for columns in (actual, expected):
            for i, history in enumerate(columns[1]):
                history[0] = (i * 37 % 11) * 0.25


def test_an_update_of_no_states():
    torch.ops.fp8serve.delayed_update([], [], [], [], [], 0, 1, "max")


def test_mismatched_lists_are_refused():
    scales, histories, nonfinite, steps, maxes = states([4, 4])
    with pytest.raises(RuntimeError, match="holds 1 states, and every other list must hold as many"):
        torch.ops.fp8serve.delayed_update(scales[:1], histories, nonfinite, steps, maxes, 0, 1, "max")
    with pytest.raises(RuntimeError, match="algo: is 'median', must be max or most_recent"):
        torch.ops.fp8serve.delayed_update(scales, histories, nonfinite, steps, maxes, 0, 1, "median")
