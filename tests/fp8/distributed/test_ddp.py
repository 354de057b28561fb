"""DistributedDataParallel: the scaling states are no buffers that it would broadcast, and the amaxes cost two MAXes."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .ranks import counted, on_ranks
from .runs import RECIPES, STEPS, alone, close, network, on_rank, same

pytestmark = pytest.mark.distributed


def ddp(rank: int, name: str) -> Any:
    model = DistributedDataParallel(network())
    with counted() as wire:
        return {**on_rank(model, rank, RECIPES[name], dist.group.WORLD), "calls": dict(wire.calls)}


@pytest.mark.smoke
@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_are_one_process_bit_for_bit(name: str) -> None:
    found = on_ranks(2, ddp, name)
    for rank, wanted in enumerate(alone(RECIPES[name], 2)):
        same(found[rank], wanted)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_four_ranks_are_one_process_to_the_last_bits(name: str) -> None:
    found = on_ranks(4, ddp, name)
    for rank, wanted in enumerate(alone(RECIPES[name], 4)):
        close(found[rank], wanted)


def test_delayed_scaling_adds_two_collectives_to_a_step() -> None:
    calls = {name: on_ranks(2, ddp, name)[0]["calls"]["allreduce"] for name in ("delayed", "current")}
    assert calls["delayed"] - calls["current"] == 2 * STEPS
