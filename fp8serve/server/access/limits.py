"""Enforces the limits of each tenant: requests per minute, tokens per minute, and concurrent requests.

A limit of N per minute is a token bucket that holds N and is refilled at N per minute, so an idle tenant may use all of
it at once. Before the response starts, the tokens of the prompt and the largest number of tokens that may be generated
are reserved. At the end of the response, unused ones are returned. So clients that set `max_tokens` can send more
requests within the same limit. A request for more tokens than the bucket can hold needs a full bucket and leaves it
below zero. Requests above a limit do not wait in the server: they get a 429 with the time to try again, and do not
count.

The counts last as long as the server, even if the file of keys changes. New limits apply from the next request on.
"""

import math
import time
from collections.abc import Callable

from fp8serve.server.access.keys import Caller, TenantLimits
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics
from fp8serve.server.usage import Usage

Clock = Callable[[], float]


class Bucket:
    """A token bucket for a limit per minute. `level` is below 0 if more was used than the bucket contained."""

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity, self.level, self._updated_at = capacity, float(capacity), now

    def fill(self, capacity: int, now: float) -> None:
        """Refills the bucket up to the time `now`, with the current limit `capacity`."""
        self.capacity = capacity
        self.level = min(capacity, self.level + (now - self._updated_at) * capacity / 60)
        self._updated_at = now

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * 60 / self.capacity


class TenantCounters:
    """The counts of one tenant. A bucket is created when its limit is first set."""

    def __init__(self) -> None:
        self.running = 0
        self._buckets: dict[str, Bucket] = {}

    def bucket(self, kind: str, limits: TenantLimits, now: float) -> Bucket | None:
        """Returns the refilled bucket for "requests" or "tokens", or None if there is no limit."""
        capacity = limits.requests_per_minute if kind == "requests" else limits.tokens_per_minute
        if capacity is None:
            return None
        bucket = self._buckets.setdefault(kind, Bucket(capacity, now))
        bucket.fill(capacity, now)
        return bucket


class TenantRequest:
    """One request of a tenant, from its arrival to the last byte of its response."""

    def __init__(self, caller: Caller, counters: TenantCounters, usage: Usage, metrics: Metrics, clock: Clock) -> None:
        self.usage = usage
        usage.tenant = caller.tenant
        self._limits, self._tenant = caller.limits, caller.tenant
        self._counters, self._metrics, self._clock = counters, metrics, clock
        self._reserved_tokens = 0

    def begin(self) -> None:
        """Counts the request. Raises Fault 429 if the tenant has reached a limit."""
        max_running = self._limits.concurrent_requests
        requests, tokens = self._bucket("requests"), self._bucket("tokens")
        if max_running is not None and self._counters.running >= max_running:
            self._refuse("concurrent", f"already has {max_running} concurrent requests, which is its limit", 1)
        if requests is not None and requests.level < 1:
            self._refuse("requests", f"may make {requests.capacity} requests a minute", requests.seconds_until(1))
        if tokens is not None and tokens.level <= 0:
            self._refuse("tokens", f"may use {tokens.capacity} tokens a minute", tokens.seconds_until(1))
        if requests is not None:
            requests.level -= 1
        self._counters.running += 1
        self._metrics.tenant_requests.labels(self._tenant).inc()
        self._metrics.tenant_in_flight.labels(self._tenant).inc()

    def reserve_tokens(self, tokens: int) -> None:
        """Reserves the tokens that the request may use at most. Raises Fault 429 if the bucket has too few."""
        bucket = self._bucket("tokens")
        if bucket is None:
            return
        needed = min(tokens, bucket.capacity)
        if bucket.level < needed:
            if (requests := self._bucket("requests")) is not None:  # refused requests do not count
                requests.level = min(requests.capacity, requests.level + 1)
            message = f"may use {bucket.capacity} tokens a minute, and this request may need {tokens}"
            self._refuse("tokens", message, bucket.seconds_until(needed))
        bucket.level -= needed
        self._reserved_tokens += needed

    def end(self) -> None:
        """Returns the tokens that were reserved but not used."""
        if (bucket := self._bucket("tokens")) is not None:
            bucket.level = min(bucket.capacity, bucket.level + self._reserved_tokens - self.usage.total_tokens)
        self._counters.running -= 1
        self._metrics.tenant_in_flight.labels(self._tenant).dec()
        for kind, count in (("prompt", self.usage.prompt_tokens), ("generated", self.usage.generated_tokens)):
            self._metrics.tenant_tokens.labels(self._tenant, kind).inc(count)

    def headers(self) -> dict[str, str]:
        """Returns the tenant's limits as the headers that OpenAI's clients read."""
        headers: dict[str, str] = {}
        for kind in ("requests", "tokens"):
            if (bucket := self._bucket(kind)) is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.capacity):.3f}s"
        return headers

    def _bucket(self, kind: str) -> Bucket | None:
        return self._counters.bucket(kind, self._limits, self._clock())

    def _refuse(self, reason: str, clause: str, seconds: float) -> None:
        self._metrics.tenant_rejected.labels(self._tenant, reason).inc()
        retry_after = max(1, math.ceil(seconds))
        hint = f"Try again in {retry_after} seconds." if retry_after > 1 else "Try again in a second."
        raise Fault(Code.RATE_LIMITED, f"The tenant of this key {clause}.", hint=hint, retry_after=retry_after)


class TenantLimiter:
    """The counts of all tenants by name."""

    def __init__(self, metrics: Metrics, clock: Clock = time.monotonic) -> None:
        self.counters: dict[str, TenantCounters] = {}
        self._metrics, self._clock = metrics, clock

    def create_request(self, caller: Caller, usage: Usage) -> TenantRequest:
        """Returns a request that has arrived and is not counted yet."""
        return TenantRequest(
            caller, self.counters.setdefault(caller.tenant, TenantCounters()), usage, self._metrics, self._clock
        )
