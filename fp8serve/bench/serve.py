"""Benchmarks a server under load, with the metrics of `vllm bench serve`. Works with any server that has OpenAI's
routes.

Metrics. The time to first token (TTFT) ends with the first event that has text. The time per output token (TPOT) is the
time after that event, divided by the number of tokens minus one. The inter-token latency (ITL) is the time between two
events. The end-to-end latency (E2EL) ends with the last event. Tokens are counted by the `usage` of the response, or by
events if the server sends no usage. The CPU time of the client is included, as it is for a user.

Prompts. They are random token ids, conversations of a ShareGPT file, or a file of prompts. A data set is shuffled with
the seed and repeated if it has too few rows. As in `vllm bench serve`, a tokenizer counts the tokens of ShareGPT's
answers, and very short and very long rows are skipped.

Load. The intervals between requests follow a gamma distribution. Its shape parameter is the burstiness: 1 is a Poisson
process, less is burstier, more is more even. As in `vllm bench serve`, the intervals are scaled so that their sum
matches the request rate. A failed request is counted, and the benchmark continues.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8serve.bench.options import DEFAULT_OUTPUT_TOKENS, Load
from fp8serve.client.api import JSON, Api, client_options, encode_json, parse_event, response_error, translated_errors
from fp8serve.errors import DataError, JobError, ServerError, os_reason

if TYPE_CHECKING:
    from httpx2 import AsyncClient

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048  # of rows of ShareGPT, as in vLLM
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
OnOutcome = Callable[[], None]  # called after every request
Report = Callable[[str, int, int], None]
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Prompt:
    """A prompt, as text or token ids, with the maximum number of tokens to generate."""

    text: str | list[int]
    output_len: int


def prompts(load: Load, tokenizer: Path | None) -> list[Prompt]:
    """Returns `load.num_prompts` prompts. Raises DataError for an invalid file, and JobError for a missing option."""
    if load.dataset == "random":
        if load.api == "chat":
            raise JobError("Random prompts are token ids, which chat does not accept; use a --dataset with texts.")
        rng = random.Random(load.seed)
        ids = [[rng.randrange(3, load.vocab) for _ in range(load.input_len)] for _ in range(load.num_prompts)]
        return [Prompt(text, load.output_len or DEFAULT_OUTPUT_TOKENS) for text in ids]
    if load.dataset_path is None:
        raise JobError(f"The data set {load.dataset} is a file; provide it with --dataset-path.")
    path = Path(load.dataset_path)
    results = list(_sharegpt(path, load, tokenizer) if load.dataset == "sharegpt" else _lines(path, load))
    if not results:
        raise DataError(f"{path} holds no prompt that can be used.")
    random.Random(load.seed).shuffle(results)
    return list(islice(cycle(results), load.num_prompts))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path} cannot be read: {os_reason(problem)}.") from None


def _lines(path: Path, load: Load) -> Iterator[Prompt]:
    """Yields the prompts of a JSON Lines file. A row has a `prompt`, and optionally its `output_tokens`."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            tokens = row.get("output_tokens")
            is_valid = isinstance(row["prompt"], str) and (tokens is None or (type(tokens) is int and tokens > 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            is_valid = False
        if not is_valid:
            raise DataError(f'{path}, line {number}: expected an object such as {{"prompt": "Hello"}}.')
        yield Prompt(row["prompt"], load.output_len or tokens or DEFAULT_OUTPUT_TOKENS)


def _sharegpt(path: Path, load: Load, tokenizer: Path | None) -> Iterator[Prompt]:
    """Yields the first message of each conversation. The number of tokens to generate is that of its answer."""
    try:
        rows = json.loads(_read(path))
        pairs = [[str(turn["value"]) for turn in row["conversations"][:2]] for row in rows]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not ShareGPT's JSON: a list of objects with conversations of value.") from None
    pairs = [pair for pair in pairs if len(pair) == 2]
    if tokenizer is None:
        if load.output_len is None:
            raise JobError("Counting the tokens of ShareGPT's answers needs --tokenizer; or use --output-len.")
        return (Prompt(question, load.output_len) for question, _ in pairs)
    from fp8serve.model.text.tokenizer import Tokenizer

    encode = Tokenizer.from_dir(tokenizer).encode
    lengths = ((question, len(encode(question)), load.output_len or len(encode(answer))) for question, answer in pairs)
    return (Prompt(question, answer) for question, length, answer in lengths if _has_usual_length(length, answer))


def _has_usual_length(prompt: int, answer: int) -> bool:
    fits = prompt <= MAX_PROMPT_TOKENS and prompt + answer <= MAX_TOTAL_TOKENS
    return fits and min(prompt, answer) >= MIN_TOKENS


def body(prompt: Prompt, load: Load, model: str) -> dict[str, Any]:
    """Returns the body of a greedy, streamed request that asks for usage."""
    ignores_eos = load.dataset == "random" if load.ignore_eos is None else load.ignore_eos
    request: dict[str, Any] = {"model": model, "max_tokens": prompt.output_len, "temperature": 0, "stream": True}
    request |= {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if ignores_eos else {})
    if load.api == "completions":
        return request | {"prompt": prompt.text}
    return request | {"messages": [{"role": "user", "content": prompt.text}]}


@dataclass
class Outcome:
    """The times of one request, in seconds after it was sent, and its token counts."""

    arrivals: list[float] = field(default_factory=list)  # of each event with text
    seconds: float = math.nan  # to the end of the response
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def send(
    url: str, key: str | None, bodies: Sequence[dict[str, Any]], load: Load, on_outcome: OnOutcome
) -> tuple[list[Outcome], float]:
    """Sends a warm-up request, then all requests. Returns the outcomes of the latter and their total time. Raises
    ServerError if the warm-up request fails."""
    return asyncio.run(_send(url, key, bodies, load, on_outcome))


def send_times(count: int, load: Load) -> list[float]:
    """Returns when each request is sent, in seconds after the start."""
    if load.request_rate is None:
        return [0.0] * count
    rng = random.Random(load.seed)
    intervals = [rng.gammavariate(load.burstiness, 1 / load.burstiness) for _ in range(count)]
    factor = count / load.request_rate / sum(intervals)
    return [factor * time for time in accumulate(intervals)]


async def _send(
    url: str, key: str | None, bodies: Sequence[dict[str, Any]], load: Load, on_outcome: OnOutcome
) -> tuple[list[Outcome], float]:
    import httpx2

    path, semaphore = PATHS[load.api], asyncio.Semaphore(load.max_concurrency or len(bodies))

    async def send_limited(body: dict[str, Any]) -> Outcome:
        async with semaphore:
            outcome = await _send_request(client, url, path, body)
        on_outcome()
        return outcome

    async with httpx2.AsyncClient(**client_options(url, key)) as client:
        if (warm_up := await _send_request(client, url, path, bodies[0])).error is not None:
            raise ServerError(warm_up.error)
        start, tasks = time.perf_counter(), []
        async with asyncio.TaskGroup() as group:
            for send_time, body in zip(send_times(len(bodies), load), bodies, strict=True):
                await asyncio.sleep(start + send_time - time.perf_counter())
                tasks.append(group.create_task(send_limited(body)))
        return [task.result() for task in tasks], time.perf_counter() - start


async def _send_request(client: "AsyncClient", url: str, path: str, body: dict[str, Any]) -> Outcome:
    outcome, start = Outcome(), time.perf_counter()
    try:
        with translated_errors(url):
            async with client.sse(url + path, method="POST", content=encode_json(body), headers=JSON) as source:
                if source.response.status_code != 200:
                    await source.response.aread()
                    raise response_error(source.response)
                is_finished = False
                async for event in source:
                    if event.data != "[DONE]":
                        seconds = time.perf_counter() - start
                        is_finished = _add_event(outcome, parse_event(event), seconds) or is_finished
        if not is_finished:
            raise ServerError("The server closed the stream before the end of its response.")
    except ServerError as problem:
        outcome.error = str(problem)
    outcome.seconds = outcome.arrivals[-1] if outcome.arrivals else time.perf_counter() - start
    outcome.output_tokens = outcome.output_tokens or len(outcome.arrivals)
    return outcome


def _add_event(outcome: Outcome, event: dict[str, Any], seconds: float) -> bool:
    """Adds an event that arrived after `seconds`. Returns whether it ends the completion."""
    try:
        usage = event.get("usage") or {}
        outcome.input_tokens = usage.get("prompt_tokens") or outcome.input_tokens
        outcome.output_tokens = usage.get("completion_tokens") or outcome.output_tokens
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("text", "content", "reasoning_content", "reasoning", "tool_calls")):
            outcome.arrivals.append(seconds)
        return choice.get("finish_reason") is not None
    except (AttributeError, TypeError, KeyError):
        raise ServerError("The server sent an event unknown to OpenAI's API.") from None


def measure(
    url: str,
    load: Load,
    report: Report,
    *,
    key: str | None = None,
    model: str | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Sends all requests and returns the figures. `model` is by default the server's first model. Raises ServerError if
    the server cannot be reached or every request fails."""
    requests = prompts(load, tokenizer)
    with Api(url, key) as api:
        name, server = model or api.first_model(), api.url
    count = 0

    def count_outcome() -> None:
        nonlocal count
        count += 1
        report("requests", count, len(requests))

    outcomes, seconds = send(server, key, [body(prompt, load, name) for prompt in requests], load, count_outcome)
    return {"server": server, "served_model": name, **figures(outcomes, seconds)}


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Returns the figures of requests that took `seconds` in all. Raises ServerError if every request failed."""
    completed = [outcome for outcome in outcomes if outcome.error is None]
    errors = list(dict.fromkeys(outcome.error for outcome in outcomes if outcome.error is not None))
    if not completed:
        raise ServerError(f"No request was answered: {errors[0]}")
    input_tokens, output_tokens = sum(o.input_tokens for o in completed), sum(o.output_tokens for o in completed)
    with_text = [o for o in completed if o.arrivals]
    latencies = {
        "ttft": [o.arrivals[0] for o in with_text],
        "tpot": [(o.seconds - o.arrivals[0]) / (o.output_tokens - 1) for o in with_text if o.output_tokens > 1],
        "itl": [b - a for o in with_text for a, b in zip(o.arrivals, o.arrivals[1:], strict=False)],
        "e2el": [o.seconds for o in completed],
    }
    return {
        "completed": len(completed),
        "failed": len(outcomes) - len(completed),
        "errors": errors[:3],
        "duration_seconds": seconds,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "request_throughput": len(completed) / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (input_tokens + output_tokens) / seconds,
        **{f"{name}_ms": _summary(latencies[name]) for name in LATENCIES},
    }


def _summary(values: list[float]) -> dict[str, float]:
    """Returns mean and percentiles in milliseconds. As in vLLM, percentiles are interpolated linearly."""
    import numpy as np

    ms = 1e3 * np.array(values or [np.nan])
    percentiles = {"median": 50, "p90": 90, "p99": 99}
    return {"mean": float(ms.mean()), **{name: float(np.percentile(ms, p)) for name, p in percentiles.items()}}
