"""How many requests are in the house, and who is let in.

One request is one sequence of the engine: `n` choices of `p` prompts are n x p requests, admitted together or not at
all. A request that cannot be taken is refused at once with 429 and Retry-After, before any header of a 200 was sent;
nothing waits outside the engine's own queue. The books always balance: accepted = ok + failed + cancelled + in
flight.
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics

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


class Admission:
    """Counts requests and their tokens (prompt plus the most they may generate) against the two bounds."""

    def __init__(self, capacity: int, token_budget: int, streams: int, metrics: Metrics) -> None:
        self.capacity = capacity
        self.token_budget = token_budget
        self.max_streams = streams
        self.in_flight = 0
        self.tokens = 0
        self.streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._metrics = metrics

    @property
    def nearly_full(self) -> bool:
        """High-water mark for readiness: nine tenths of the places are taken."""
        return self.in_flight * 10 >= self.capacity * 9

    def admit(self, token_counts: list[int]) -> list[Ticket]:
        """One ticket for each request, or none: a Fault, 429 when they may fit later and 400 when they never can."""
        self._check(len(token_counts), sum(token_counts))
        self.in_flight += len(token_counts)
        self.tokens += sum(token_counts)
        self.idle.clear()
        self._metrics.accepted.inc(len(token_counts))
        return [Ticket(self, tokens) for tokens in token_counts]

    def _check(self, count: int, tokens: int) -> None:
        if count > self.capacity:
            message = (
                f"The request asks for {count} sequences, but this server holds at most {self.capacity} at a time."
            )
            raise Fault(Code.INVALID_PARAMETER, message, param="n", hint="Send fewer prompts or choices at once.")
        if self.in_flight + count > self.capacity:
            self._refuse(
                "requests",
                f"The queue is full: {self.in_flight} requests are waiting or running and {self.capacity} fit.",
            )
        # an empty house takes even a request above the budget, or it could never run
        if self.in_flight and self.tokens + tokens > self.token_budget:
            self._refuse(
                "tokens", f"The queue is full: {self.tokens} tokens are waiting or running and {self.token_budget} fit."
            )

    def _refuse(self, reason: str, message: str) -> None:
        self._metrics.rejected.labels(reason).inc()
        raise Fault(Code.QUEUE_FULL, message, hint="Try again in a moment.", retry_after=1)

    def leave(self, ticket: Ticket, outcome: Outcome) -> None:
        self.in_flight -= 1
        self.tokens -= ticket.tokens
        self._metrics.finished.labels(outcome).inc()
        if self.in_flight == 0:
            self.idle.set()

    def open_stream(self) -> None:
        """Call once for every event stream; 429 when too many are open. `close_stream` gives the place back."""
        if self.streams >= self.max_streams:
            self._refuse("streams", f"{self.streams} event streams are open and no more are allowed.")
        self.streams += 1

    def close_stream(self) -> None:
        self.streams -= 1
