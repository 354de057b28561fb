"""How much each tenant may ask for: requests and tokens a minute, and requests at once.

A bound of N a minute is a bucket that holds N and is refilled at N a minute: a tenant that was quiet may use all of it
at once. The tokens of the prompt and the most that may be generated are reserved before the answer begins, and unused
ones are returned at its end; so a client that sets `max_tokens` gets more answers within the same bound. A request for
more tokens than the bucket can hold needs a full bucket, and owes the rest afterwards. Nothing waits in the server: a
request above a bound gets a 429, which says when to try again, and costs nothing.

The counts live as long as the server, whatever happens to the file of keys; its new limits apply from the next request.
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
    """The rest of a bound a minute. `level` is below 0 if more was used than there was."""

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity, self.level, self._at = capacity, float(capacity), now

    def fill(self, capacity: int, now: float) -> None:
        """Brings the level up to date, with the bound that holds now."""
        self.capacity = capacity
        self.level = min(capacity, self.level + (now - self._at) * capacity / 60)
        self._at = now

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * 60 / self.capacity


class TenantCounters:
    """The counts of one tenant. A bucket is made when a bound is first set."""

    def __init__(self) -> None:
        self.running = 0
        self._buckets: dict[str, Bucket] = {}

    def bucket(self, kind: str, limits: TenantLimits, now: float) -> Bucket | None:
        """The bucket of "requests" or "tokens", up to date; None: no bound."""
        capacity = limits.requests_per_minute if kind == "requests" else limits.tokens_per_minute
        if capacity is None:
            return None
        bucket = self._buckets.setdefault(kind, Bucket(capacity, now))
        bucket.fill(capacity, now)
        return bucket


class TenantRequest:
    """One request of a tenant, from its arrival to its last byte."""

    def __init__(self, caller: Caller, counters: TenantCounters, usage: Usage, metrics: Metrics, clock: Clock) -> None:
        self.usage = usage
        usage.tenant = caller.tenant
        self._limits, self._tenant = caller.limits, caller.tenant
        self._counters, self._metrics, self._clock = counters, metrics, clock
        self._reserve_tokens = 0

    def enter(self) -> None:
        """Counts the request. Fault 429: the tenant has reached a limit."""
        most, requests, tokens = self._limits.concurrent_requests, self._bucket("requests"), self._bucket("tokens")
        if most is not None and self._counters.running >= most:
            self._refuse("concurrent", f"may have {most} requests at once, and has them", 1)
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
        """Reserves the most tokens that the answer may use. Fault 429: the tenant does not have so many left."""
        bucket = self._bucket("tokens")
        if bucket is None:
            return
        needed = min(tokens, bucket.capacity)
        if bucket.level < needed:
            self._give_back_request()
            message = f"may use {bucket.capacity} tokens a minute, and this request may need {tokens}"
            self._refuse("tokens", message, bucket.seconds_until(needed))
        bucket.level -= needed
        self._reserve_tokens += needed

    def _give_back_request(self) -> None:
        """A request that is refused costs nothing."""
        if (requests := self._bucket("requests")) is not None:
            requests.level = min(requests.capacity, requests.level + 1)

    def leave(self) -> None:
        """Returns the tokens that were reserved and not used."""
        if (bucket := self._bucket("tokens")) is not None:
            bucket.level = min(bucket.capacity, bucket.level + self._reserve_tokens - self.usage.total)
        self._counters.running -= 1
        self._metrics.tenant_in_flight.labels(self._tenant).dec()
        for kind, count in (("prompt", self.usage.prompt), ("generated", self.usage.generated)):
            self._metrics.tenant_tokens.labels(self._tenant, kind).inc(count)

    def headers(self) -> dict[str, str]:
        """The bounds that are set, as headers that OpenAI's clients read."""
        headers: dict[str, str] = {}
        for kind in ("requests", "tokens"):
            if (bucket := self._bucket(kind)) is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.capacity):.3f}s"
        return headers

    def _bucket(self, kind: str) -> Bucket | None:
        return self._counters.bucket(kind, self._limits, self._clock())

    def _refuse(self, reason: str, what: str, seconds: float) -> None:
        self._metrics.tenant_rejected.labels(self._tenant, reason).inc()
        after = max(1, math.ceil(seconds))
        hint = f"Try again in {after} seconds." if after > 1 else "Try again in a second."
        raise Fault(Code.RATE_LIMITED, f"The tenant of this key {what}.", hint=hint, retry_after=after)


class TenantLimiter:
    """The counts of all tenants, by name."""

    def __init__(self, metrics: Metrics, clock: Clock = time.monotonic) -> None:
        self.counters: dict[str, TenantCounters] = {}
        self._metrics, self._clock = metrics, clock

    def request(self, caller: Caller, usage: Usage) -> TenantRequest:
        """A request that has arrived and is not counted yet."""
        return TenantRequest(
            caller, self.counters.setdefault(caller.tenant, TenantCounters()), usage, self._metrics, self._clock
        )
