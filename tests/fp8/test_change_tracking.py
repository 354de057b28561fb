"""Listeners are notified if a tracked tensor or dictionary entry is replaced, and of nothing else."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fp8serve.fp8.change_tracking import TrackedTensor, track_dictionary, track_view


def tracked_view() -> tuple[TrackedTensor, set[int]]:
    changed: set[int] = set()
    return track_view(torch.arange(6.0).view(2, 3), (changed, 7)), changed


def new_data(x: Tensor) -> None:
    x.data = torch.ones(2, 3)


def new_storage(x: Tensor) -> None:
    x.set_(torch.ones(2, 3).untyped_storage(), 0, (2, 3))


def swapped(x: Tensor) -> None:
    torch.utils.swap_tensors(x, torch.ones(2, 3))


@pytest.mark.parametrize("replace", [new_data, new_storage, swapped], ids=lambda replace: replace.__name__)
def test_a_view_that_gets_other_memory_notifies_its_listener(replace: Callable[[Tensor], None]) -> None:
    x, changed = tracked_view()
    replace(x)
    assert changed == {7}
    assert torch.equal(x, torch.ones(2, 3))


def test_reading_and_writing_a_view_notifies_nobody() -> None:
    x, changed = tracked_view()
    whole = x.view(-1)
    x.mul_(2)
    x.data.add_(1)
    x[0] = x[1]
    assert {type(y) for y in (x + 1, x.detach(), x.view(-1), x.clone(), x.data, torch.cat([x, x]))} == {Tensor}
    assert whole.tolist() == [7.0, 9.0, 11.0] * 2
    assert not changed


def test_a_deep_copy_notifies_the_copy_of_its_listener() -> None:
    x, changed = tracked_view()
    whole, copied, listener = deepcopy([x.view(-1), x, changed])
    copied.zero_()
    assert not whole.any()
    copied.data = torch.ones(2, 3)
    assert (listener, changed) == ({7}, set())


def test_a_replaced_entry_of_a_dictionary_notifies_every_listener() -> None:
    module, one, two = nn.BatchNorm1d(3), set[int](), set[int]()
    track_dictionary(module, "_buffers", (one, 1))
    track_dictionary(module, "_buffers", (two, 2))
    assert module.running_mean is not None
    module.running_mean.add_(1)
    assert not one
    module.running_mean = torch.zeros(3)
    assert (one, two) == ({1}, {2})
