"""Adds up the gradients of a step's microbatches, which several processes compute, in the order of the microbatches.

A single process adds g0 + g1 + g2 ... in FP32. A sum depends on its order, so an all-reduce would give other weights.
Here rank i mod N computes microbatch i. After each round of N, every rank gets its N-th part of all N gradients and
adds them to its part of the sum, in order. At the end of the step the parts are gathered. So weights have the same bits
whatever N is. A rank sends its gradients once a microbatch, and its part of the sum once a step; an all-reduce of the
step's sums would send the gradients only once a step.

A missing gradient (of an expert that no token chose, or of a microbatch that does not exist) is sent as -0.0, the only
number whose addition changes nothing, not even the sign of a zero. Gradients travel in buckets, so that beside a rank's
own gradients and its part of the sum only two buckets are in memory.
"""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8serve.ranks import Ranks

BUCKET = 1 << 24  # elements, unless one parameter has more
NOTHING = -0.0


class Exchange:
    """Sums gradients of `parameters` over the microbatches of one step and over `ranks`; with one rank it does
    nothing."""

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        self._buckets = [_Bucket(some, ranks) for some in _buckets(parameters)] if ranks.size > 1 else []

    def begin(self, working: int) -> None:
        """Before each round, of which so many ranks compute a microbatch."""

    def round(self) -> None:
        """After each rank's next microbatch, if there is one: adds the gradients in `.grad`, and clears them."""
        for bucket in self._buckets:
            bucket.add()

    def finish(self) -> None:
        """Puts the sums into `.grad` of every rank; None where no microbatch gave a gradient."""
        for bucket in self._buckets:
            bucket.gather()


class _Bucket:
    """Some parameters end to end, padded to N parts of `width` elements; this rank sums one part."""

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._seen = torch.zeros(len(parameters), dtype=torch.uint8, device=parameters[0].device)
        self._width = -(-sum(p.numel() for p in parameters) // ranks.size)
        self._sum = self._filled(self._width)

    def _filled(self, *shape: int) -> Tensor:
        return torch.full(shape, NOTHING, device=self._parameters[0].device)

    def add(self) -> None:
        sent = self._filled(self._ranks.size * self._width)
        for i, (parameter, place) in enumerate(self._places(sent)):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                self._seen[i] = 1
                parameter.grad = None
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        for part in received.view(self._ranks.size, -1):
            self._sum += part

    def gather(self) -> None:
        whole = self._filled(self._ranks.size * self._width)
        dist.all_gather(list(whole.view(self._ranks.size, -1).unbind()), self._sum)
        dist.all_reduce(self._seen, dist.ReduceOp.MAX)
        for (parameter, place), seen in zip(self._places(whole), self._seen.tolist(), strict=True):
            parameter.grad = place.clone() if seen else None

    def _places(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its part of `flat`, in its shape."""
        starts = accumulate((p.numel() for p in self._parameters), initial=0)
        return [(p, flat[at : at + p.numel()].view_as(p)) for p, at in zip(self._parameters, starts, strict=False)]


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Buckets of the parameters in their order, as many in each as fit."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if room < parameter.numel():
            found.append([])
            room = max(BUCKET, parameter.numel())
        found[-1].append(parameter)
        room -= parameter.numel()
    return found
