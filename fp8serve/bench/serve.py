"""A server under load, as its clients see it: the figures of `vllm bench serve`, for any server with OpenAI's routes.

Time to first token (TTFT) ends with the first event that has text. Time per output token (TPOT) is the rest of the
time, divided by the number of tokens less one. The time between two events is one inter-token latency (ITL), and the
last event ends the whole answer (E2EL). Tokens are counted by the server's own `usage`, or by events if it sends none.
The same code measures peers; the client's share of the machine is included, as it is for a user.

The prompts of `bench serve`: random token ids, conversations in ShareGPT's form, or a file of prompts.

A data set is shuffled by the seed; if it has too few rows, it is read again from its beginning. Lengths of ShareGPT's
answers are counted by a tokenizer, and rows that are very short or very long are left out, both as `vllm bench serve`
does.

Sends requests at their times, and records when each event of their answers arrives.

Requests arrive at random intervals of a gamma distribution, whose shape is the burstiness: 1 is a Poisson process, less
is burstier, more is more even. They are stretched to the duration that follows from the rate, as in `vllm bench serve`.
A request that is refused or breaks off is counted, and the others continue.
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

from fp8serve.bench.options import DEFAULT_OUTPUT, Load
from fp8serve.client.api import JSON, Api, as_json, client_options, event_object, failures, refusal
from fp8serve.errors import DataError, JobError, ServerError, os_reason

if TYPE_CHECKING:
    from httpx2 import AsyncClient

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048  # tokens, as vLLM has them
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Done = Callable[[], None]
Report = Callable[[str, int, int], None]
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Prompt:
    """A text, or token ids, and how many tokens its answer may have."""

    text: str | list[int]
    output_len: int


def prompts(load: Load, tokenizer: Path | None) -> list[Prompt]:
    """`load.num_prompts` of them. DataError for an invalid file, JobError for a missing option."""
    if load.dataset == "random":
        if load.api == "chat":
            raise JobError("Random prompts are token ids, which chat does not take; give a --dataset with texts.")
        chance = random.Random(load.seed)
        ids = [[chance.randrange(3, load.vocab) for _ in range(load.input_len)] for _ in range(load.num_prompts)]
        return [Prompt(text, load.output_len or DEFAULT_OUTPUT) for text in ids]
    if load.dataset_path is None:
        raise JobError(f"The data set {load.dataset} is a file; give its --dataset-path.")
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
    """Of JSON lines with `prompt`, and `output_tokens` where the answer has a length of its own."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            own = row.get("output_tokens")
            sound = isinstance(row["prompt"], str) and (own is None or (type(own) is int and own > 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise DataError(f'{path}, line {number}: expected an object such as {{"prompt": "Hello"}}.')
        yield Prompt(row["prompt"], load.output_len or own or DEFAULT_OUTPUT)


def _sharegpt(path: Path, load: Load, tokenizer: Path | None) -> Iterator[Prompt]:
    """The first question of each conversation, with as many tokens for the answer as it had."""
    try:
        rows = json.loads(_read(path))
        pairs = [[str(turn["value"]) for turn in row["conversations"][:2]] for row in rows]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not ShareGPT's JSON: a list of objects with conversations of value.") from None
    pairs = [pair for pair in pairs if len(pair) == 2]
    if tokenizer is None:
        if load.output_len is None:
            raise JobError("The length of ShareGPT's answers needs a tokenizer: give --tokenizer or --output-len.")
        return (Prompt(question, load.output_len) for question, _ in pairs)
    from fp8serve.model.text.tokenizer import Tokenizer

    encode = Tokenizer.from_dir(tokenizer).encode
    counted = ((question, len(encode(question)), load.output_len or len(encode(answer))) for question, answer in pairs)
    return (Prompt(question, new) for question, old, new in counted if _is_usual(old, new))


def _is_usual(prompt: int, answer: int) -> bool:
    return min(prompt, answer) >= SHORTEST and prompt <= LONGEST_PROMPT and prompt + answer <= LONGEST


def body(prompt: Prompt, load: Load, model: str) -> dict[str, Any]:
    """The request for one prompt; greedy, and streamed with its counts of tokens."""
    fixed = load.dataset == "random" if load.ignore_eos is None else load.ignore_eos
    request: dict[str, Any] = {"model": model, "max_tokens": prompt.output_len, "temperature": 0, "stream": True}
    request |= {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if fixed else {})
    if load.api == "completions":
        return request | {"prompt": prompt.text}
    return request | {"messages": [{"role": "user", "content": prompt.text}]}


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


def measure(
    url: str,
    load: Load,
    report: Report,
    *,
    key: str | None = None,
    model: str | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Figures of all requests; one before them is not counted. `model`: by default the server's first.

    ServerError when the server is not there or answers nothing at all.
    """
    requests = prompts(load, tokenizer)
    with Api(url, key) as api:
        name, place = model or api.first_model(), api.url
    count = 0

    def done() -> None:
        nonlocal count
        count += 1
        report("requests", count, len(requests))

    outcomes, seconds = send(place, key, [body(prompt, load, name) for prompt in requests], load, done)
    return {"server": place, "served_model": name, **figures(outcomes, seconds)}


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Figures of requests that took `seconds` together. ServerError when none was answered."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = list(dict.fromkeys(outcome.error for outcome in outcomes if outcome.error is not None))
    if not good:
        raise ServerError(f"No request was answered: {errors[0]}")
    read, written = sum(o.input_tokens for o in good), sum(o.output_tokens for o in good)
    with_text = [o for o in good if o.arrivals]
    latencies = {
        "ttft": [o.arrivals[0] for o in with_text],
        "tpot": [(o.seconds - o.arrivals[0]) / (o.output_tokens - 1) for o in with_text if o.output_tokens > 1],
        "itl": [b - a for o in with_text for a, b in zip(o.arrivals, o.arrivals[1:], strict=False)],
        "e2el": [o.seconds for o in good],
    }
    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": errors[:3],
        "duration_seconds": seconds,
        "input_tokens": read,
        "output_tokens": written,
        "request_throughput": len(good) / seconds,
        "output_throughput": written / seconds,
        "total_token_throughput": (read + written) / seconds,
        **{f"{name}_ms": _summary(latencies[name]) for name in LATENCIES},
    }


def _summary(values: list[float]) -> dict[str, float]:
    """Milliseconds; percentiles between two values are interpolated, as numpy and vLLM do."""
    import numpy as np

    result = 1e3 * np.array(values or [np.nan])
    shares = {"median": 50, "p90": 90, "p99": 99}
    return {"mean": float(result.mean()), **{name: float(np.percentile(result, s)) for name, s in shares.items()}}
