"""Sends requests at their times, and records when each event of their answers arrives.

Requests arrive at random intervals of a gamma distribution, whose shape is the burstiness: 1 is a Poisson process, less
is burstier, more is more even. They are stretched to the duration that follows from the rate, as in `vllm bench serve`.
A request that is refused or breaks off is counted, and the others continue.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fp8serve.bench.options import Load
from fp8serve.client.api import JSON, as_json, client_options, event_object, failures, refusal
from fp8serve.errors import ServerError

if TYPE_CHECKING:
    from httpx2 import AsyncClient

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Done = Callable[[], None]


@dataclass
class Outcome:
    """For one request: seconds from its sending to each event with text, and to its end."""

    arrivals: list[float] = field(default_factory=list)
    seconds: float = math.nan
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def send(
    url: str, key: str | None, bodies: Sequence[dict[str, Any]], load: Load, done: Done
) -> tuple[list[Outcome], float]:
    """The outcomes of all requests, and their total time; one request before them is not counted.

    ServerError when that one fails.
    """
    return asyncio.run(_send(url, key, bodies, load, done))


def times(count: int, load: Load) -> list[float]:
    """Seconds from the beginning at which the requests are sent."""
    if load.request_rate is None:
        return [0.0] * count
    chance = random.Random(load.seed)
    gaps = [chance.gammavariate(load.burstiness, 1 / load.burstiness) for _ in range(count)]
    stretch = count / load.request_rate / sum(gaps)
    return [stretch * at for at in accumulate(gaps)]


async def _send(
    url: str, key: str | None, bodies: Sequence[dict[str, Any]], load: Load, done: Done
) -> tuple[list[Outcome], float]:
    import httpx2

    place, gate = url + PATHS[load.api], asyncio.Semaphore(load.max_concurrency or len(bodies))

    async def one(body: dict[str, Any]) -> Outcome:
        async with gate:
            outcome = await _ask(client, url, place, body)
        done()
        return outcome

    async with httpx2.AsyncClient(**client_options(url, key)) as client:
        if (first := await _ask(client, url, place, bodies[0])).error is not None:
            raise ServerError(first.error)
        began, tasks = time.perf_counter(), []
        async with asyncio.TaskGroup() as group:
            for at, body in zip(times(len(bodies), load), bodies, strict=True):
                await asyncio.sleep(began + at - time.perf_counter())
                tasks.append(group.create_task(one(body)))
        return [task.result() for task in tasks], time.perf_counter() - began


async def _ask(client: "AsyncClient", url: str, place: str, body: dict[str, Any]) -> Outcome:
    """One request, streamed to its end."""
    outcome, began = Outcome(), time.perf_counter()
    try:
        with failures(url):
            async with client.sse(place, method="POST", content=as_json(body), headers=JSON) as source:
                if source.response.status_code != 200:
                    await source.response.aread()
                    raise refusal(source.response)
                ended = False
                async for event in source:
                    if event.data != "[DONE]":
                        ended = _take(outcome, event_object(event), time.perf_counter() - began) or ended
        if not ended:
            raise ServerError("The server broke off before the end of its answer.")
    except ServerError as problem:
        outcome.error = str(problem)
    outcome.seconds = outcome.arrivals[-1] if outcome.arrivals else time.perf_counter() - began
    outcome.output_tokens = outcome.output_tokens or len(outcome.arrivals)
    return outcome


def _take(outcome: Outcome, event: dict[str, Any], at: float) -> bool:
    """Adds an event that arrived `at`; returns whether it ends an answer."""
    try:
        usage = event.get("usage") or {}
        outcome.input_tokens = usage.get("prompt_tokens") or outcome.input_tokens
        outcome.output_tokens = usage.get("completion_tokens") or outcome.output_tokens
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls")):
            outcome.arrivals.append(at)
        return choice.get("finish_reason") is not None
    except (AttributeError, TypeError, KeyError):
        raise ServerError("The server sent an event that is not OpenAI's.") from None
