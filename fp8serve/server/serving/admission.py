"""Admits requests to a model within its capacity, and bounds the number of open event streams.

Here a request is one sequence of the engine: `n` choices for each of `p` prompts are n x p requests, which are admitted
together or not at all. Their slots are reserved before a prompt is tokenized, so that a refusal costs no work. A
request that exceeds the capacity gets a 429 with Retry-After at once; requests wait only in the engine's own queue. The
counts always balance: accepted = ok + failed + cancelled + in flight.
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics, ModelMetrics

Outcome = Literal["ok", "failed", "cancelled"]


@dataclass
class Slot:
    """One admitted request. Only the first call of `close` counts."""

    admission: "Admission"
    tokens: int
    open: bool = True

    def close(self, outcome: Outcome) -> None:
        if self.open:
            self.open = False
            self.admission.release(self, outcome)


@dataclass
class Reservation:
    """Slots for requests whose prompts are not tokenized yet. As a context manager, it releases unused slots."""

    admission: "Admission"
    count: int

    def admit(self, token_counts: list[int]) -> list[Slot]:
        """Exchanges the reservation for one slot per request. Raises Fault if the requests do not fit."""
        self.release()
        return self.admission.admit(token_counts)

    def release(self) -> None:
        self.admission.capacity.reserved -= self.count
        self.count = 0
        self.admission.capacity.update_idle()

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Capacity:
    """The requests of one engine and their tokens, with a limit for each. A request's tokens are those of its prompt
    plus the most that it may generate.

    `num_seqs` requests run at the same time, and `queue` requests may wait. `num_seqs` changes when a new engine has
    derived another number from its GPU's memory.
    """

    def __init__(self, num_seqs: int, queue: int, max_tokens: int) -> None:
        self.num_seqs = num_seqs
        self.queue = queue
        self.max_tokens = max_tokens
        self.in_flight = 0
        self.reserved = 0
        self.tokens = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def max_requests(self) -> int:
        return self.num_seqs + self.queue

    @property
    def nearly_full(self) -> bool:
        """Whether nine tenths of the slots are in use. The server then reports that it is not ready."""
        return self.in_flight * 10 >= self.max_requests * 9

    def update_idle(self) -> None:
        """Sets the event `idle` if no request runs or has a reservation."""
        if self.in_flight == self.reserved == 0:
            self.idle.set()


class Admission:
    """Admits and counts the requests for one model or adapter name. A model and its adapters share one capacity."""

    def __init__(self, capacity: Capacity, metrics: ModelMetrics) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self.metrics = metrics
        metrics.in_flight.set_function(lambda: self.in_flight)

    def reserve(self, count: int) -> Reservation:
        """Reserves slots for `count` requests before any work is done for them. Raises Fault 429 if they do not fit."""
        self._check(count, 0)
        self.capacity.reserved += count
        self.capacity.idle.clear()
        return Reservation(self, count)

    def admit(self, token_counts: list[int]) -> list[Slot]:
        """Returns one slot per request. Raises Fault 429 if they may fit later, and 400 if they never can."""
        self._check(len(token_counts), sum(token_counts))
        self.in_flight += len(token_counts)
        self.capacity.in_flight += len(token_counts)
        self.capacity.tokens += sum(token_counts)
        self.capacity.idle.clear()
        self.metrics.accepted.inc(len(token_counts))
        return [Slot(self, tokens) for tokens in token_counts]

    def _check(self, count: int, tokens: int) -> None:
        limit, admitted = self.capacity.max_requests, self.capacity.in_flight + self.capacity.reserved
        if count > limit:
            message = f"The request asks for {count} sequences, but this model admits at most {limit} at a time."
            raise Fault(Code.INVALID_PARAMETER, message, param="n", hint="Send fewer prompts or choices at once.")
        if admitted + count > limit:
            self._refuse("requests", admitted, limit)
        # an idle model admits even requests with more tokens than the limit, which could never run otherwise
        if self.capacity.in_flight and self.capacity.tokens + tokens > self.capacity.max_tokens:
            self._refuse("tokens", self.capacity.tokens, self.capacity.max_tokens)

    def _refuse(self, unit: str, admitted: int, limit: int) -> None:
        self.metrics.rejected(unit).inc()
        raise _queue_full(f"The queue is full: {admitted} {unit} are waiting or running, and the limit is {limit}.")

    def release(self, slot: Slot, outcome: Outcome) -> None:
        """Ends an admitted request and counts its outcome."""
        self.in_flight -= 1
        self.capacity.in_flight -= 1
        self.capacity.tokens -= slot.tokens
        self.metrics.finished(outcome).inc()
        self.capacity.update_idle()


class StreamLimiter:
    """Limits the number of open event streams, of responses and of job events together."""

    def __init__(self, max_streams: int, metrics: Metrics) -> None:
        self.max_streams = max_streams
        self.count = 0
        self._rejected = metrics.streams_rejected

    def acquire(self) -> None:
        """Counts one more event stream until `release` is called. Raises Fault 429 if too many are open."""
        if self.count >= self.max_streams:
            self._rejected.inc()
            raise _queue_full(f"{self.count} event streams are open, which is this server's limit.")
        self.count += 1

    def release(self) -> None:
        self.count -= 1


def _queue_full(message: str) -> Fault:
    return Fault(Code.QUEUE_FULL, message, hint="Try again in a moment.", retry_after=1)
