"""A server under load: time to first token and between tokens, as clients see them over HTTP.

Any server with OpenAI's `/v1/completions` and streaming can be measured, so peers are measured by the same code.
Prompts are lists of random token ids, the answers greedy and of fixed length (`ignore_eos`, which servers of this kind
have). Each of `concurrency` clients sends its next request when its last one is answered (a closed loop), from threads
of one process: a client's work is to read lines, and its share of the machine is part of what a user of it has.

Every event counts when its line arrives. An event that carries several tokens (or a part of a character that shows
later) would hide time between tokens, so rates are computed from the number of tokens that were asked for.
"""

import http.client
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fp8serve.bench.clock import latencies
from fp8serve.bench.options import Load
from fp8serve.errors import MachineError


@dataclass(frozen=True)
class Answer:
    """Seconds from sending the request to each event with text."""

    arrivals: list[float]
    seconds: float


def measure(url: str, load: Load, tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Figures of all requests, sent after one that is not counted. MachineError when the server refuses one."""
    model = _model(url, load)
    _ask(url, model, load)
    began, answers = time.perf_counter(), []
    with ThreadPoolExecutor(load.concurrency) as clients:
        jobs = [clients.submit(_ask, url, model, load) for _ in range(load.requests)]
        for index, job in enumerate(jobs):
            answers.append(job.result())
            tell("requests", index + 1, len(jobs))
    return {"server": url, "served_model": model, **_figures(answers, load, time.perf_counter() - began)}


def _figures(answers: list[Answer], load: Load, seconds: float) -> dict[str, Any]:
    gaps = [b - a for answer in answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
    return {
        "seconds": seconds,
        "requests_per_second": len(answers) / seconds,
        "generated_tokens_per_second": len(answers) * load.new / seconds,
        "time_to_first_token": latencies([answer.arrivals[0] for answer in answers if answer.arrivals]),
        "between_tokens": latencies(gaps),
        "whole_answer": latencies([answer.seconds for answer in answers]),
    }


def _connect(url: str) -> http.client.HTTPConnection:
    place = urlsplit(url)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    return kind(place.hostname or "127.0.0.1", place.port, timeout=600)


def _headers(load: Load) -> dict[str, str]:
    key = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    return {"Content-Type": "application/json", **key}


def _checked(answer: http.client.HTTPResponse, what: str) -> http.client.HTTPResponse:
    if answer.status != 200:
        said = answer.read().decode(errors="replace")
        raise MachineError(f"{what} answered {answer.status}: {said[:500]}")
    return answer


def _model(url: str, load: Load) -> str:
    """The name of the model that the server serves first."""
    connection = _connect(url)
    try:
        connection.request("GET", "/v1/models", headers=_headers(load))
        listed = json.load(_checked(connection.getresponse(), "/v1/models"))
    except OSError as problem:
        raise MachineError(f"There is no server at {url} ({problem}); start one with fp8serve serve.") from None
    finally:
        connection.close()
    return str(listed["data"][0]["id"])


def _ask(url: str, model: str, load: Load) -> Answer:
    """One request, streamed to its end."""
    prompt = [random.randrange(3, load.vocab) for _ in range(load.prompt)]
    body = {"model": model, "prompt": prompt, "max_tokens": load.new, "temperature": 0, "stream": True}
    connection, began = _connect(url), time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}), _headers(load))
        answer = _checked(connection.getresponse(), "/v1/completions")
        arrivals = [time.perf_counter() - began for line in answer if _has_token(line)]
    finally:
        connection.close()
    return Answer(arrivals, time.perf_counter() - began)


def _has_token(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    event = json.loads(line[6:])
    if "error" in event:
        raise MachineError(f"The server ended a stream with an error: {event['error']}")
    return bool(event.get("choices")) and event["choices"][0].get("finish_reason") is None
