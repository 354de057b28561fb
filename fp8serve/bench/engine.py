"""The engine alone, in this process: prefill, and decoding at several batch sizes, on random prompts.

Prefill: one prompt of `prompt` tokens to its first token, the fastest of a few. Decoding: `batch` sequences with
prompts of that length; when all are computed, `new` greedy steps are timed. Prompts are random: no prefix is shared.
The rate is that of the median step; the percentiles are the waiting times of a stream's reader for the next token.
"""

import random
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp8serve.bench.clock import latencies, percentile
from fp8serve.engine.engine import Engine
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams

REPEATS = 3  # of the prefill


def measure(
    model: Path,
    tell: Callable[[str, int, int], None],
    *,
    batches: Sequence[int] = (1, 4, 8, 16),
    prompt: int = 256,
    new: int = 64,
    **options: Any,
) -> dict[str, Any]:
    """`options`: those of the Engine. RequestError when a prompt and its answer are longer than the model can take."""
    options = {"max_num_seqs": max(batches), **options}
    engine_options = EngineOptions(**options)
    # while the last prompts are computed, the first sequences decode already
    ahead = max(batches) * -(-prompt // engine_options.max_prefill_tokens)
    options.setdefault("max_model_len", prompt + new + ahead + 1)
    began = time.perf_counter()
    engine = Engine(model, **options)
    loaded = time.perf_counter()
    _first_tokens(engine, _requests(engine, 1, 8, 1))
    first = time.perf_counter()
    engine.pack_weights()
    packed = time.perf_counter()
    tell("prefill", 0, len(batches) + 1)
    prefill = min(_prefill(engine, prompt) for _ in range(REPEATS))
    decode = []
    for index, batch in enumerate(batches):
        tell(f"decode, batch {batch}", index + 1, len(batches) + 1)
        decode.append({"batch": batch, **_decode(engine, batch, prompt, new)})
    return {
        "model": engine.info(),
        "load_seconds": loaded - began,
        "first_token_seconds": first - began,
        "packing_seconds": packed - first,
        "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "prefill": {"tokens": prompt, "ms": 1e3 * prefill, "tokens_per_second": prompt / prefill},
        "decode": decode,
    }


def _requests(engine: Engine, count: int, prompt: int, new: int) -> list[Request]:
    """Prompts for which nothing was computed before."""
    vocab, params = engine.limits.vocab_size, SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    names = [f"bench-{random.getrandbits(64):016x}" for _ in range(count)]
    return [Request(name, tuple(random.randrange(vocab) for _ in range(prompt)), params) for name in names]


def _first_tokens(engine: Engine, requests: list[Request]) -> None:
    """Runs until every request has its first token."""
    waiting = {request.request_id for request in requests}
    for request in requests:
        engine.add_request(request)
    while waiting:
        waiting -= {output.request_id for output in engine.step()}


def _prefill(engine: Engine, prompt: int) -> float:
    """Seconds to the first token."""
    began = time.perf_counter()
    _first_tokens(engine, _requests(engine, 1, prompt, 1))
    return time.perf_counter() - began


def _decode(engine: Engine, batch: int, prompt: int, new: int) -> dict[str, float]:
    room = engine.limits.max_model_len - prompt
    _first_tokens(engine, _requests(engine, batch, prompt, room))
    steps = [_timed(engine.step) for _ in range(new)]
    engine.abort_all()
    return {"tokens_per_second": batch / percentile(steps, 0.5), "fastest_ms": 1e3 * min(steps), **latencies(steps)}


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
