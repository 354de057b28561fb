"""The gradients of one step: every microbatch forward and backward, and the means that the step reports.

A step is the same for any number of processes: its microbatches compute with the same scales (`Forward.one_update`),
each draws its own random numbers, and gradients are added in the order of the microbatches (`train.exchange`).
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8serve.ranks import ALONE, Ranks
from fp8serve.train.data import Item
from fp8serve.train.exchange import Exchange
from fp8serve.train.forward import Forward
from fp8serve.train.methods.interface import Method
from fp8serve.train.optimizer import Optimizer

if TYPE_CHECKING:  # importing FSDP2 takes 0.4 s
    from fp8serve.train.sharded.building import Sharded


def accumulate(
    method: Method[Any],
    forward: Forward,
    optimizer: Optimizer,
    microbatches: Sequence[Sequence[Item]],
    *,
    ranks: Ranks = ALONE,
    seed: str = "",
    sharded: "Sharded | None" = None,
) -> list[float]:
    """Accumulate the gradients of all microbatches; returns the means of the loss and of `method.measures`.

    The loss is the mean over the whole step, so neither packing nor accumulation changes what is minimised. Microbatch
    i runs on rank i mod N; the gradients and the means are on all ranks. `seed`: of the step's random numbers.
    `sharded`: where the weights are divided among the ranks; then each rank has the gradients of its own rows.
    """
    weight = method.weight([item for items in microbatches for item in items])
    # FP64 on the model's device: reading each microbatch's figures would wait for a GPU; one read at the end is enough
    found = torch.zeros(len(microbatches), 1 + len(method.measures), dtype=torch.float64, device=forward.device)
    exchange = Exchange(list(optimizer.masters.values()), ranks) if sharded is None else sharded.exchange()
    several = len(microbatches) > ranks.size  # with one microbatch, there is nothing to keep
    with forward.one_update():
        for start in range(0, len(microbatches), ranks.size):
            mine, working = start + ranks.rank, min(ranks.size, len(microbatches) - start)
            has_one = ranks.rank < working
            exchange.begin(working)
            if has_one or ranks.in_step:
                index, first = mine if has_one else start, start == 0 if several else None
                with _random_numbers(f"{seed}:{index}"):
                    sums = _backward(method, forward, microbatches[index], weight, first)
                if has_one:
                    found[mine] = sums
                optimizer.collect()
            exchange.round()
    exchange.finish()
    if ranks.size > 1:
        dist.all_reduce(found)  # each row is zero on all ranks but one
    return [value / weight for value in _in_order(found)]


def _in_order(found: Tensor) -> list[float]:
    """The sum of the rows of `found`, added one after the other: [1 + measures]."""
    sums = torch.zeros_like(found[0])
    for row in found:
        sums += row
    return list(sums.tolist())


@contextmanager
def _random_numbers(seed: str) -> Iterator[None]:
    """Seeds the random numbers of a microbatch, whichever process computes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(seed).getrandbits(63))
        yield


def _backward(method: Method[Any], forward: Forward, items: Sequence[Item], weight: int, first: bool | None) -> Tensor:
    found = method.sums(partial(forward.logits, is_first_microbatch=first), items)
    (found[0] / weight).backward()  # type: ignore[no-untyped-call]
    return torch.stack([value.detach().double() for value in found])
