"""A server under load, as its clients see it: the figures of `vllm bench serve`, for any server with OpenAI's routes.

Time to first token (TTFT) ends with the first event that has text. Time per output token (TPOT) is the rest of the
time, divided by the number of tokens less one. The time between two events is one inter-token latency (ITL), and the
last event ends the whole answer (E2EL). Tokens are counted by the server's own `usage`, or by events if it sends none.
The same code measures peers; the client's share of the machine is included, as it is for a user.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp8serve.bench.options import Load
from fp8serve.bench.prompts import body, prompts
from fp8serve.bench.traffic import Outcome, send
from fp8serve.client.api import Api
from fp8serve.errors import ServerError

Tell = Callable[[str, int, int], None]
LATENCIES = ("ttft", "tpot", "itl", "e2el")


def measure(
    url: str, load: Load, tell: Tell, *, key: str | None = None, model: str | None = None, tokenizer: Path | None = None
) -> dict[str, Any]:
    """Figures of all requests; one before them is not counted. `model`: by default the server's first.

    ServerError when the server is not there or answers nothing at all.
    """
    asked = prompts(load, tokenizer)
    with Api(url, key) as api:
        name, place = model or api.first_model(), api.url
    count = 0

    def done() -> None:
        nonlocal count
        count += 1
        tell("requests", count, len(asked))

    outcomes, seconds = send(place, key, [body(prompt, load, name) for prompt in asked], load, done)
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

    found = 1e3 * np.array(values or [np.nan])
    shares = {"median": 50, "p90": 90, "p99": 99}
    return {"mean": float(found.mean()), **{name: float(np.percentile(found, s)) for name, s in shares.items()}}
