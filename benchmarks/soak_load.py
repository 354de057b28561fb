"""Thousands of requests at once, from four tenants with unequal loads: fairness, memory, and counts.

All requests are sent at the same moment. Prompts are of every length up to the context's, as texts, token ids and
chats; half of the answers are streamed. The run checks three things:

* Fairness: each tenant's 95th percentile of latency is at most twice that on an ideal server. The ideal server has the
  same speed and divides its time equally among the tenants that still wait. When it has done `a` tokens of work for one
  tenant, it has done min(a, all tokens of the tenant) for each tenant; `fair_work` adds these up. The ideal latency is
  the time at which this run had done that much work in all, so other work on the machine slows both sides alike.
* Memory is flat while the queue is worked off.
* `/metrics` counts every request and its tokens for its tenant, and no request is in flight at the end.
"""

import asyncio
import json
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak_asks import WORDS
from benchmarks.soak_memory import too_much, watch

SHARES = {"bulk": 0.55, "evening": 0.25, "team": 0.15, "single": 0.05}
"""Each tenant's share of all requests."""
LENGTHS = ((0.5, 0.08), (0.35, 0.3), (0.13, 0.8), (0.02, 1.0))
"""(share of the prompts, their largest length as a part of the context). Prompts of the last kind fill the context but
for the answer."""
MAX_TIMES_FAIR = 2.0  # the allowed ratio of a tenant's 95th percentile of latency to that on the ideal server
TIMEOUT = 7200.0  # seconds for an answer


@dataclass(frozen=True)
class LoadRequest:
    """One request: tenant, path, body."""

    tenant: str
    path: str
    body: dict[str, Any]


@dataclass
class Served:
    """The outcome of a request. status: of HTTP, 0 if the connection or the answer broke. seconds: from the start of
    the run to the end of the answer. prompt, answer: their tokens. error: the beginning of an unexpected answer."""

    tenant: str
    status: int
    seconds: float
    prompt: int = 0
    answer: int = 0
    error: str = ""

    @property
    def work(self) -> int:
        return self.prompt + self.answer


# --- the requests


def make_requests(count: int, context: int, seed: int = 0) -> list[LoadRequest]:
    """`count` requests in a random order, divided among the tenants by `SHARES`."""
    rng = random.Random(seed)
    tenants = [tenant for tenant, share in SHARES.items() for _ in range(round(share * count))]
    tenants = (tenants + ["bulk"] * count)[:count]
    rng.shuffle(tenants)
    return [_request(rng, tenant, context) for tenant in tenants]


def _request(rng: random.Random, tenant: str, context: int) -> LoadRequest:
    answer = rng.randint(4, 24)
    ((_, part),) = rng.choices(LENGTHS, [share for share, _ in LENGTHS])
    longest = context - answer
    length = longest if part == 1.0 else rng.randint(1, min(longest, int(part * context)))
    parameters = {"max_tokens": answer, "ignore_eos": True, "temperature": 0}
    if rng.random() < 0.5:
        parameters |= {"stream": True, "stream_options": {"include_usage": True}}
    kind = rng.random()
    if kind < 0.2 and part < 0.5:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, max(1, context // 32))))
        messages = [{"role": "user", "content": text}]
        return LoadRequest(tenant, "/v1/chat/completions", parameters | {"messages": messages})
    if kind < 0.4 and part < 0.5:
        return LoadRequest(
            tenant, "/v1/completions", parameters | {"prompt": " ".join(rng.choices(WORDS, k=max(1, length // 8)))}
        )
    ids = [rng.randrange(3, 250) for _ in range(length)]
    return LoadRequest(tenant, "/v1/completions", parameters | {"prompt": ids})


# --- sending


async def _send_all(url: str, keys: Mapping[str, str], requests: Sequence[LoadRequest]) -> list[Served]:
    address, began = urlsplit(url), time.monotonic()

    async def one(item: LoadRequest) -> Served:
        try:
            async with asyncio.timeout(TIMEOUT):
                raw = await _exchange(str(address.hostname), int(address.port or 80), item, keys[item.tenant])
            return read_answer(item, raw, time.monotonic() - began)
        except (OSError, ValueError, LookupError) as problem:
            return Served(item.tenant, 0, time.monotonic() - began, error=f"{type(problem).__name__}: {problem}")

    return await asyncio.gather(*map(one, requests))


async def _exchange(host: str, port: int, item: LoadRequest, key: str) -> bytes:
    """Sends a request; returns the whole response with its head."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        body = json.dumps(item.body).encode()
        head = (
            f"POST {item.path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        )
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return await reader.read()
    finally:
        writer.close()


def read_answer(item: LoadRequest, raw: bytes, seconds: float) -> Served:
    """Returns the outcome of a response. Raises ValueError or LookupError if the response is not complete."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, text = int(head.split()[1]), body.decode(errors="replace")
    if status != 200:
        return Served(item.tenant, status, seconds, error=text[:200])
    if item.body.get("stream"):
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            return Served(item.tenant, 0, seconds, error=f"the stream broke off: {events[-1][:200]}")
        usage = json.loads(events[-2])["usage"]
    else:
        usage = json.loads(text)["usage"]
    return Served(item.tenant, 200, seconds, usage["prompt_tokens"], usage["completion_tokens"])


# --- the ideal server


def fair_work(work: Mapping[str, float], share: float) -> dict[str, float]:
    """For each tenant, the total work that the ideal server has done when `share` of that tenant's work is done. work:
    the tokens of each tenant."""
    return {name: sum(min(other, share * mine) for other in work.values()) for name, mine in work.items()}


def reached(served: Iterable[Served], work: float) -> float:
    """Returns the seconds after which the run had done `work` tokens."""
    work_sum, at = 0.0, 0.0
    for one in sorted(served, key=lambda one: one.seconds):
        work_sum, at = work_sum + one.work, one.seconds
        if work_sum >= work:
            break
    return at


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of all do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)]


def by_tenant(served: Sequence[Served]) -> dict[str, dict[str, float]]:
    """For each tenant: the number of requests and of tokens, percentiles of latency in seconds, and the 95th percentile
    divided by that on the ideal server."""
    names = sorted({one.tenant for one in served})
    mine = {name: [one for one in served if one.tenant == name] for name in names}
    work = fair_work({name: float(sum(one.work for one in mine[name])) for name in names}, 0.95)
    results = {}
    for name in names:
        p95, fair = percentile([one.seconds for one in mine[name]], 0.95), reached(served, work[name])
        results[name] = {
            "requests": len(mine[name]),
            "tokens": sum(one.work for one in mine[name]),
            "p50_seconds": round(percentile([one.seconds for one in mine[name]], 0.5), 2),
            "p95_seconds": round(p95, 2),
            "fair_p95_seconds": round(fair, 2),
            "times_fair": round(p95 / max(fair, 1e-9), 3),
        }
    return results


# --- counts


def metrics(url: str, key: str) -> Counter[str]:
    """Returns every sample of the server's metrics by its name and labels, such as `fp8serve_ready` and `name{a=b}`."""
    request = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    results = Counter[str]()
    for sample in (sample for family in families for sample in family.samples):
        labels = {name: value for name, value in sample.labels.items() if name not in ("model", "method")}
        label_text = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        results[f"{sample.name}{{{label_text}}}" if label_text else sample.name] += sample.value
    return results


def expected_counts(served: Sequence[Served]) -> dict[str, float]:
    """By how much each figure of `/metrics` must have risen for these answers."""
    count = len(served)
    results: dict[str, float] = {
        "fp8serve_requests_accepted_total": count,
        "fp8serve_requests_finished_total{outcome=ok}": count,
        "fp8serve_requests_finished_total{outcome=failed}": 0,
        "fp8serve_requests_finished_total{outcome=cancelled}": 0,
        "fp8serve_sequences_ended_total{finished_reason=length}": count,
        "fp8serve_request_seconds_count": count,
        "fp8serve_time_to_first_token_seconds_count": count,
        "fp8serve_prompt_tokens_total": sum(one.prompt for one in served),
        "fp8serve_generated_tokens_total": sum(one.answer for one in served),
        "fp8serve_requests_in_flight": 0,
    }
    for tenant in SHARES:
        mine = [one for one in served if one.tenant == tenant]
        results[f"fp8serve_tenant_requests_total{{tenant={tenant}}}"] = len(mine)
        results[f"fp8serve_tenant_requests_in_flight{{tenant={tenant}}}"] = 0
        for kind, tokens in (("prompt", [o.prompt for o in mine]), ("generated", [o.answer for o in mine])):
            results[f"fp8serve_tenant_tokens_total{{kind={kind},tenant={tenant}}}"] = sum(tokens)
    return results


def settled(url: str, key: str, before: Mapping[str, float], served: Sequence[Served]) -> list[str]:
    """Returns `uncounted` once it is empty, or after ten seconds: the server counts a request after its last byte."""
    for _ in range(100):
        if not (results := uncounted(before, metrics(url, key), served)):
            break
        time.sleep(0.1)
    return results


def uncounted(before: Mapping[str, float], after: Mapping[str, float], served: Sequence[Served]) -> list[str]:
    """Returns a sentence for every figure of `/metrics` that differs from the answers."""
    expected = expected_counts(served)
    rises = {name: after.get(name, 0) - before.get(name, 0) for name in expected}
    return [
        f"/metrics: {name} rose by {rise:g}, expected {expected[name]:g}."
        for name, rise in rises.items()
        if rise != expected[name]
    ]


# --- the run


def load(
    url: str, keys: Mapping[str, str], pids: dict[str, int], requests: Sequence[LoadRequest], allow: float
) -> dict[str, Any]:
    """Sends the requests and returns the figures of the run; "failed" is a list of sentences, empty if all is well.
    `keys`: an API key for each tenant, that of "single" with the right to read the metrics. `allow`: MB by which a
    process may grow."""
    reader = keys["single"]
    before, ended, peak = metrics(url, reader), threading.Event(), list[tuple[float, float]]()
    with ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        memory = pool.submit(watch, pids, 1.0, ended)
        crowd = pool.submit(_count, url, reader, ended, peak, began)
        try:
            served = asyncio.run(_send_all(url, keys, requests))
        finally:
            ended.set()
        samples, _ = memory.result(), crowd.result()
    most, at = max(((number, second) for second, number in peak), default=(0.0, 0.0))
    tenants = by_tenant(served)
    grown, failed = too_much(samples, at, allow)
    failed += [f"{one.tenant}: {one.status}: {one.error}" for one in served if one.status != 200][:20]
    failed += settled(url, reader, before, served)
    failed += [
        f"The tenant {name} has {results['times_fair']} times its fair p95; {MAX_TIMES_FAIR:g} are allowed."
        for name, results in tenants.items()
        if results["times_fair"] > MAX_TIMES_FAIR
    ]
    figures = {"requests": len(served), "seconds": round(max(one.seconds for one in served), 1), "most_in_flight": most}
    ends = {name: [round(s.seconds, 2) for s in served if s.tenant == name] for name in tenants}
    return {**figures, "tenants": tenants, "grown_mb": grown, "failed": failed, "samples": samples, "ends": ends}


def _count(url: str, key: str, ended: threading.Event, results: list[tuple[float, float]], began: float) -> None:
    """Appends (seconds, requests in flight) to `results` every second until `ended`."""
    while not ended.wait(1.0):
        number = metrics(url, key)["fp8serve_requests_in_flight"]
        results.append((time.monotonic() - began, number))


def finished(ends: Mapping[str, Sequence[float]]) -> dict[str, list[tuple[float, float]]]:
    """For each tenant, a curve of the percentage of its requests that are answered, over minutes."""
    return {
        name: [(0.0, 0.0), *((at / 60, 100 * rank / len(mine)) for rank, at in enumerate(sorted(mine), 1))]
        for name, mine in ends.items()
    }
