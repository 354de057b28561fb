"""How many requests a model holds, and which are admitted; how many event streams the server has open.

One request is one sequence of the engine: `n` choices of `p` prompts are n x p requests, admitted together or not at
all. Their places are reserved before a prompt is read, so a refusal costs no work; a request that cannot be taken is
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
class Ticket:
    """The right to run one request; `close` exactly once says how it ended."""

    admission: "Admission"
    tokens: int
    open: bool = True

    def close(self, outcome: Outcome) -> None:
        if self.open:
            self.open = False
            self.admission.leave(self, outcome)


@dataclass
class Places:
    """Room for requests whose prompts are still to be read; as a context manager, it gives back what was not taken."""

    admission: "Admission"
    count: int

    def take(self, token_counts: list[int]) -> list[Ticket]:
        """One ticket for each request, or a 429 for all of them."""
        self.give_back()
        return self.admission.admit(token_counts)

    def give_back(self) -> None:
        self.admission.room.reserved -= self.count
        self.count = 0
        self.admission.room.settle()

    def __enter__(self) -> "Places":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


class Room:
    """The requests of one engine and their tokens (prompt plus the most they may generate), with their two bounds."""

    def __init__(self, capacity: int, token_budget: int) -> None:
        self.capacity = capacity
        self.token_budget = token_budget
        self.in_flight = 0
        self.reserved = 0
        self.tokens = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def nearly_full(self) -> bool:
        """Whether nine tenths of the places are taken: the limit for readiness."""
        return self.in_flight * 10 >= self.capacity * 9

    def settle(self) -> None:
        """Wakes the tasks that wait until no request runs."""
        if self.in_flight == self.reserved == 0:
            self.idle.set()


class Admission:
    """Counts the requests for one name in its model's room. Each model has a room of its own, so that a full one
    leaves the others their places; a model and its adapters share one.
    """

    def __init__(self, room: Room, metrics: ModelMetrics) -> None:
        self.room = room
        self.in_flight = 0
        self.metrics = metrics
        metrics.in_flight.set_function(lambda: self.in_flight)

    def reserve(self, count: int) -> Places:
        """Room for `count` requests before any work is done for them, or a 429."""
        self._check(count, 0)
        self.room.reserved += count
        self.room.idle.clear()
        return Places(self, count)

    def admit(self, token_counts: list[int]) -> list[Ticket]:
        """One ticket for each request, or none: a Fault, 429 when they may fit later and 400 when they never can."""
        self._check(len(token_counts), sum(token_counts))
        self.in_flight += len(token_counts)
        self.room.in_flight += len(token_counts)
        self.room.tokens += sum(token_counts)
        self.room.idle.clear()
        self.metrics.accepted.inc(len(token_counts))
        return [Ticket(self, tokens) for tokens in token_counts]

    def _check(self, count: int, tokens: int) -> None:
        room = self.room
        if count > room.capacity:
            message = f"The request asks for {count} sequences, but this model holds at most {room.capacity} at a time."
            raise Fault(Code.INVALID_PARAMETER, message, param="n", hint="Send fewer prompts or choices at once.")
        taken = room.in_flight + room.reserved
        if taken + count > room.capacity:
            self._refuse(
                "requests", f"The queue is full: {taken} requests are waiting or running and {room.capacity} fit."
            )
        # an empty server takes even a request above the budget, or it could never run
        if room.in_flight and room.tokens + tokens > room.token_budget:
            self._refuse(
                "tokens", f"The queue is full: {room.tokens} tokens are waiting or running and {room.token_budget} fit."
            )

    def _refuse(self, reason: str, message: str) -> None:
        self.metrics.rejected(reason).inc()
        raise _full(message)

    def leave(self, ticket: Ticket, outcome: Outcome) -> None:
        self.in_flight -= 1
        self.room.in_flight -= 1
        self.room.tokens -= ticket.tokens
        self.metrics.finished(outcome).inc()
        self.room.settle()


class Streams:
    """Counts the event streams of the server, of answers and of jobs, against their bound."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most = most
        self.open = 0
        self._rejected = metrics.streams_rejected

    def enter(self) -> None:
        """Call once for every event stream; 429 when too many are open. `leave` gives the place back."""
        if self.open >= self.most:
            self._rejected.inc()
            raise _full(f"{self.open} event streams are open and no more are allowed.")
        self.open += 1

    def leave(self) -> None:
        self.open -= 1


def _full(message: str) -> Fault:
    return Fault(Code.QUEUE_FULL, message, hint="Try again in a moment.", retry_after=1)
