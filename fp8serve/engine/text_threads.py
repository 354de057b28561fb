"""Computes texts together; each thread computes its own share of them from the first layer to the last.

A pass over an encoder is hundreds of small ops, some of torch's and some of ours. If each op is divided among
threads, they wait for each other hundreds of times, and torch's threads, which spin between its ops, take the cores
from ours. Texts do not depend on each other (text_encoder.py), so a thread can take some of them through the whole
model without any other thread, and wait once. If there is too little work for every thread, they divide the ops.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Protocol

import torch
from torch import Tensor

LEAST = 64  # tokens of a thread: fewer are bound by reading the weights, which every thread would do


class Compute(Protocol):
    """Texts by their indexes -> a row for each [texts, ...]."""

    def __call__(self, indexes: Sequence[int]) -> Tensor: ...


class TextThreads:
    """As many threads as torch has when this is made; each computes alone."""

    def __init__(self) -> None:
        self._count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._count, "texts")
        if self._count > 1:
            everyone = Barrier(self._count)
            for started in [self._pool.submit(_compute_alone, everyone) for _ in range(self._count)]:
                started.result()
            torch.set_num_threads(self._count)  # for this thread, and for those that start later

    def run(self, lengths: Sequence[int], compute: Compute) -> Tensor:
        """The rows of texts of these lengths, in their order [texts, ...]."""
        if self._count == 1 or len(lengths) < self._count or sum(lengths) < LEAST * self._count:
            return compute(range(len(lengths)))
        parts = shares(lengths, self._count)
        rows = torch.cat(list(self._pool.map(_inferring(compute), parts)))
        return rows[torch.tensor([i for part in parts for i in part]).argsort()]


def shares(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divides the indexes of texts of these lengths into `count` shares of about equal numbers of tokens: the longest
    text first, each to the share with fewest. Within a share they keep their order."""
    found: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = tokens.index(min(tokens))
        found[least].append(index)
        tokens[least] += lengths[index]
    return [sorted(share) for share in found]


def _inferring(compute: Compute) -> Callable[[Sequence[int]], Tensor]:
    """Switches gradients off, which torch does for each thread separately."""
    return torch.inference_mode()(compute)


def _compute_alone(everyone: Barrier) -> None:
    """Sets one thread for torch in this thread: torch keeps the number for each thread once it has been read there."""
    torch.set_num_threads(1)
    torch.get_num_threads()
    everyone.wait()
