"""Flights: steps that the device still computes while the host prepares the next step.

A step takes the host about as long as the device. If they take turns, each waits for the other. So the engine launches
a step, which queues its kernels and returns at once, and lands it later, which waits for its sampled tokens and
processes them. At most one step is ahead:

    host     launch 1 | launch 2 | land 1 | launch 3 | land 2 | launch 4 ...
    device              step 1 ----| step 2 ----| step 3 ----|

What the host needs for the next step is known before the values of the tokens are: the number of tokens of each
sequence (scheduler.py), and the random numbers, which depend on the seed and the position (sampler.py). The tokens stay
on the device (step.py). So sampled tokens are the same as without flights.

A sequence that ends when a step lands may be part of the step in flight. Its token there is dropped. Its blocks are
free at once: a step that gets them writes to them later, because all steps run in one stream.

Some sequences need the values of all previous tokens to sample the next one: those with penalties, bad words or a
grammar. If a step has such a sequence, the engine launches the model, then lands the previous step, and then launches
the sampling. The engine lands a step before it preempts a sequence or replaces weights. Adapters are loaded and
unloaded at any time, because the step in flight keeps the tensors that it reads. A window of the scale monitor ends
with the step that was just launched: the copies of the counters are queued behind that step. Drafts need tokens, so an
engine with drafts launches no step ahead. Neither does an engine on a CPU, which computes a step while it launches
it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp8serve.engine.sampler import Samples
    from fp8serve.engine.scheduler import StepWork


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step. `samples` has a row for each sequence of `work` that is sampled, and for each token of a
    draft."""

    work: "StepWork"
    samples: "Samples"


class HostCopy:
    """A copy of a tensor to the host. On a GPU it is queued like a kernel, into pinned memory."""

    def __init__(self, source: Tensor) -> None:
        self._host, self._event = source, None
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = _record_event(source.device)

    def read(self) -> Tensor:
        """Waits for the copy and returns it. Raises RuntimeError if a kernel before it has failed."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class PinnedBuffer:
    """Host memory whose contents are copied to the device again and again, uint8 [nbytes]. It is pinned for a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._event: torch.cuda.Event | None = None  # after the last copy

    def begin(self) -> Tensor:
        """Returns the memory to write to. Waits until the device has read its previous contents."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def copy_to(self, target: Tensor) -> None:
        """Queues a copy of the first bytes to `target`, uint8 [n] on the device."""
        target.copy_(self._host[: len(target)], non_blocking=True)
        if target.is_cuda:
            self._event = _record_event(target.device)


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
