"""DistributedDataParallel has the results of one process, and a step needs two collectives for its amaxes."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .ranks import counted, on_ranks
from .runs import RECIPES, STEPS, assert_close, assert_same, network, train_on_one_process, train_on_rank

pytestmark = pytest.mark.distributed


def ddp(rank: int, name: str) -> Any:
    model = DistributedDataParallel(network())
    with counted() as wire:
        return {**train_on_rank(model, rank, RECIPES[name], dist.group.WORLD), "calls": dict(wire.calls)}


@pytest.mark.smoke
@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_have_the_bits_of_one_process(name: str) -> None:
    results = on_ranks(2, ddp, name)
    for rank, expected in enumerate(train_on_one_process(RECIPES[name], 2)):
        assert_same(results[rank], expected)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_four_ranks_have_the_results_of_one_process(name: str) -> None:
    results = on_ranks(4, ddp, name)
    for rank, expected in enumerate(train_on_one_process(RECIPES[name], 4)):
        assert_close(results[rank], expected)


def test_delayed_scaling_adds_two_collectives_to_a_step() -> None:
    calls = {name: on_ranks(2, ddp, name)[0]["calls"]["allreduce"] for name in ("delayed", "current")}
    assert calls["delayed"] - calls["current"] == 2 * STEPS
