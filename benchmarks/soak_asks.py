"""The requests of a soak's clients: a function for each kind, which draws from the client's own random numbers.

Each request says which status is expected, and after how many lines of a stream the client hangs up.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHARED = "This is the beginning that many prompts have in common, and it is longer than a block of the cache. " * 2
WORDS = ("scale", "amax", "history", "recipe", "block", "cache", "token", "prompt", "batch", "stream", "weight")


@dataclass(frozen=True)
class Ask:
    """One request: path, body, expected status, and the lines of a stream after which the client hangs up."""

    kind: str
    path: str
    body: Any = None  # a str is sent as it is, None is a GET
    status: int = 200
    hang_up: int | None = None


Maker = Callable[[random.Random, int], Ask]  # its own random numbers, the context in tokens


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def _complete(kind: str, prompt: Any, hang_up: int | None = None, **options: Any) -> Ask:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **options}
    return Ask(kind, "/v1/completions", body, hang_up=hang_up)


def _short(rng: random.Random, context: int) -> Ask:
    return _complete("short", _words(rng, 4), max_tokens=rng.randint(1, 32))


def _long(rng: random.Random, context: int) -> Ask:
    ids = [rng.randrange(3, 250) for _ in range(rng.randint(context // 2, context - 40))]
    return _complete("long prompt", ids, ignore_eos=True)


def _streamed(rng: random.Random, context: int) -> Ask:
    return _complete("streamed", _words(rng, 8), stream=True, stream_options={"include_usage": True}, ignore_eos=True)


def _prefix(rng: random.Random, context: int) -> Ask:
    return _complete("shared prefix", SHARED + _words(rng, 3))


def _choices(rng: random.Random, context: int) -> Ask:
    return _complete("several choices", _words(rng, 5), n=rng.randint(2, 4), temperature=1.0, seed=rng.randrange(1000))


def _sampled(rng: random.Random, context: int) -> Ask:
    filters = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": rng.randrange(1000)}
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    return _complete("sampled", _words(rng, 6), logprobs=3, stop=["amax", "\n\n"], **filters, **penalties)


def _chat(rng: random.Random, context: int) -> Ask:
    body = {"messages": [{"role": "user", "content": _words(rng, 10)}], "max_tokens": 20, "stream": rng.random() < 0.5}
    return Ask("chat", "/v1/chat/completions", body)


def _native(rng: random.Random, context: int) -> Ask:
    return Ask("native", "/generate", {"inputs": _words(rng, 5), "parameters": {"max_new_tokens": 12, "details": True}})


def _cut(rng: random.Random, context: int) -> Ask:
    """Hangs up in the middle of a stream, or before its first line."""
    return _complete("cut", _words(rng, 5), hang_up=rng.choice((0, 1, 6)), stream=True, max_tokens=200, ignore_eos=True)


def _refused(rng: random.Random, context: int) -> Ask:
    too_long = {"prompt": [5] * (2 * context)}
    unknown = {"prompt": "x", "model": "there-is-no-such-model"}
    wrong: list[tuple[Any, int]] = [("{no json", 400), ({"prompt": "x", "temperature": -1}, 400)]
    body, status = rng.choice([*wrong, ({"prompt": "x", "surprise": 1}, 400), (too_long, 400), (unknown, 404)])
    return Ask("refused", "/v1/completions", body, status)


def _looked(rng: random.Random, context: int) -> Ask:
    return Ask("looked at", rng.choice(("/metrics", "/health", "/info", "/v1/models", "/scales")))


MAKERS: tuple[Maker, ...] = (
    _short, _long, _streamed, _prefix, _choices, _sampled, _chat, _native, _cut, _refused, _looked,
)  # fmt: skip
