"""How many requests a model holds, and which are admitted; how many event streams the server has open.

One request is one sequence of the engine: `n` choices of `p` prompts are n x p requests, admitted together or not at
all. Their slots are reserved before a prompt is read, so a refusal costs no work; a request that cannot be taken is
refused at once with 429 and Retry-After, before any header of a 200 was sent, and nothing waits outside the engine's
own queue. The counts always balance: accepted = ok + failed + cancelled + in flight.
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics, ModelMetrics

Outcome = Literal["ok", "failed", "cancelled"]


@dataclass
class Slot:
    """One admitted request; the first `close` says how it ended."""

    admission: "Admission"
    tokens: int
    open: bool = True

    def close(self, outcome: Outcome) -> None:
        if self.open:
            self.open = False
            self.admission.leave(self, outcome)


@dataclass
class Reservation:
    """Slots for requests whose prompts are still to be read; as a context manager, it releases what was not used."""

    admission: "Admission"
    count: int

    def admit(self, token_counts: list[int]) -> list[Slot]:
        """One slot for each request, or a 429 for all of them."""
        self.release()
        return self.admission.admit(token_counts)

    def release(self) -> None:
        self.admission.capacity.reserved -= self.count
        self.count = 0
        self.admission.capacity.settle()

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Capacity:
    """The requests of one engine and their tokens (prompt plus the most they may generate), with their two bounds."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.in_flight = 0
        self.reserved = 0
        self.tokens = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def nearly_full(self) -> bool:
        """Whether nine tenths of the slots are in use: the limit for readiness."""
        return self.in_flight * 10 >= self.max_requests * 9

    def settle(self) -> None:
        """Wakes the tasks that wait until no request runs."""
        if self.in_flight == self.reserved == 0:
            self.idle.set()


class Admission:
    """Counts the requests for one name within its model's capacity. A full model does not hold up the others; a model
    and its adapters share one capacity.
    """

    def __init__(self, capacity: Capacity, metrics: ModelMetrics) -> None:
        self.capacity = capacity
        self.in_flight = 0
        self.metrics = metrics
        metrics.in_flight.set_function(lambda: self.in_flight)

    def reserve(self, count: int) -> Reservation:
        """Slots for `count` requests before any work is done for them, or a 429."""
        self._check(count, 0)
        self.capacity.reserved += count
        self.capacity.idle.clear()
        return Reservation(self, count)

    def admit(self, token_counts: list[int]) -> list[Slot]:
        """One slot for each request, or none: a Fault, 429 when they may fit later and 400 when they never can."""
        self._check(len(token_counts), sum(token_counts))
        self.in_flight += len(token_counts)
        self.capacity.in_flight += len(token_counts)
        self.capacity.tokens += sum(token_counts)
        self.capacity.idle.clear()
        self.metrics.accepted.inc(len(token_counts))
        return [Slot(self, tokens) for tokens in token_counts]

    def _check(self, count: int, tokens: int) -> None:
        limit, held = self.capacity.max_requests, self.capacity.in_flight + self.capacity.reserved
        if count > limit:
            message = f"The request asks for {count} sequences, but this model holds at most {limit} at a time."
            raise Fault(Code.INVALID_PARAMETER, message, param="n", hint="Send fewer prompts or choices at once.")
        if held + count > limit:
            self._refuse("requests", held, limit)
        # an empty server takes even a request above the budget, or it could never run
        if self.capacity.in_flight and self.capacity.tokens + tokens > self.capacity.max_tokens:
            self._refuse("tokens", self.capacity.tokens, self.capacity.max_tokens)

    def _refuse(self, unit: str, held: int, limit: int) -> None:
        self.metrics.rejected(unit).inc()
        raise _full(f"The queue is full: {held} {unit} are waiting or running and {limit} fit.")

    def leave(self, slot: Slot, outcome: Outcome) -> None:
        self.in_flight -= 1
        self.capacity.in_flight -= 1
        self.capacity.tokens -= slot.tokens
        self.metrics.finished(outcome).inc()
        self.capacity.settle()


class Streams:
    """Counts the event streams of the server, of answers and of jobs, against their bound."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most = most
        self.open = 0
        self._rejected = metrics.streams_rejected

    def enter(self) -> None:
        """Call once for every event stream; 429 when too many are open. `leave` frees it."""
        if self.open >= self.most:
            self._rejected.inc()
            raise _full(f"{self.open} event streams are open and no more are allowed.")
        self.open += 1

    def leave(self) -> None:
        self.open -= 1


def _full(message: str) -> Fault:
    return Fault(Code.QUEUE_FULL, message, hint="Try again in a moment.", retry_after=1)
