"""Benchmarks of an engine in this process, without a server.

`measure_engine` measures prefill and decoding on random prompts, which share no prefix. Prefill is the time to the
first token of one prompt, the fastest of several. Decoding runs `batch` sequences: after their prompts are computed,
`new` greedy steps are timed. The rate is computed from the median step. The percentiles are those of the time between
two tokens of a stream.

`measure_speculation` measures the speed-up by drafts, with prompt lookup (engine/drafting.py) or a draft model. It
generates four completions of one sequence each. Two of them repeat their prompts (a summary, an edit), one repeats
itself (code), and one repeats nothing (a story). An engine with drafts and an engine without take turns. The time is
that of decoding, from the first token on. Rates are those of the fastest round. The speed-up is the median over pairs
of runs, because the two runs of a pair see the same load of the machine. Completions end at end-of-text or after `new`
tokens.
"""

import random
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fp8serve.bench.figures import latencies, percentile
from fp8serve.engine.engine import Engine
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.model.text.tokenizer import missing_tokenizer_message

PREFILL_RUNS = 3
PASSAGE = """\
The lighthouse on the rock of Arran was built in 1872 by two brothers, Thomas and William Reid. It stands forty metres \
above the sea, and its light can be seen from a distance of thirty kilometres. During the war the light was put out, \
and the family of the keeper moved to the village. Since 1987 the light works without a keeper. The house is now a \
museum, in which visitors can see the old lamp, the diaries of the keepers and a model of the first boat."""
CODE = """\
class Vector:
    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z

    def add(self, other):
        return Vector(self.x + other.x, self.y + other.y, self.z + other.z)

    def subtract(self, other):
        return"""
TASKS = {
    "summary": f"Summarize this text in a few sentences:\n\n{PASSAGE}",
    "edit": f'Repeat this text, and replace "the keeper" by "the guardian":\n\n{PASSAGE}',
    "story": "Write a story about a dragon who learns to bake bread.",
}


def measure_engine(
    model: Path,
    report: Callable[[str, int, int], None],
    *,
    batches: Sequence[int] = (1, 4, 8, 16),
    prompt: int = 256,
    new: int = 64,
    **options: Any,
) -> dict[str, Any]:
    """Measures prefill and decoding. `options` are the options of the Engine. Raises RequestError if prompt and output
    exceed the model's context."""
    options = {"max_num_seqs": max(batches), **options}
    engine_options = EngineOptions(**options)
    # the first sequences generate tokens while the last prompts are computed
    extra = max(batches) * -(-prompt // engine_options.prefill_tokens)
    options.setdefault("max_model_len", prompt + new + extra + 1)
    start = time.perf_counter()
    engine = Engine(model, **options)
    load_end = time.perf_counter()
    _run_to_first_tokens(engine, _requests(engine, 1, 8, 1))
    first_token = time.perf_counter()
    engine.pack_weights()
    pack_end = time.perf_counter()
    report("prefill", 0, len(batches) + 1)
    prefills = (_requests(engine, 1, prompt, 1) for _ in range(PREFILL_RUNS))
    prefill = min(_seconds(partial(_run_to_first_tokens, engine, requests)) for requests in prefills)
    decode = []
    for index, batch in enumerate(batches):
        report(f"decode, batch {batch}", index + 1, len(batches) + 1)
        _run_to_first_tokens(engine, _requests(engine, batch, prompt, engine.limits.max_model_len - prompt))
        steps = [_seconds(engine.step) for _ in range(new)]
        engine.abort_all()
        rate, fastest = batch / percentile(steps, 0.5), 1e3 * min(steps)
        decode.append({"batch": batch, "tokens_per_second": rate, "fastest_ms": fastest, **latencies(steps)})
    return {
        "model": engine.info(),
        "load_seconds": load_end - start,
        "first_token_seconds": first_token - start,
        "packing_seconds": pack_end - first_token,
        "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "prefill": {"tokens": prompt, "ms": 1e3 * prefill, "tokens_per_second": prompt / prefill},
        "decode": decode,
    }


def _requests(engine: Engine, count: int, prompt: int, new: int) -> list[Request]:
    """Returns requests with random prompts of `prompt` tokens, for which the prefix cache has nothing."""
    vocab, params = engine.limits.vocab_size, SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    ids = [f"bench-{random.getrandbits(64):016x}" for _ in range(count)]
    return [Request(i, tuple(random.randrange(vocab) for _ in range(prompt)), params) for i in ids]


def _run_to_first_tokens(engine: Engine, requests: list[Request]) -> None:
    """Adds the requests and runs the engine until each of them has its first token."""
    waiting = {request.request_id for request in requests}
    for request in requests:
        engine.add_request(request)
    while waiting:
        waiting -= {output.request_id for output in engine.step()}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_speculation(
    model: Path,
    report: Callable[[str, int, int], None],
    *,
    speculative_tokens: int = 8,
    draft_model: str | None = None,
    new: int = 128,
    rounds: int = 5,
    temperature: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Measures the speed-up by drafts. `options` are the options of the Engine. Raises RequestError if a prompt and its
    output exceed the model's context."""
    draft_options: list[dict[str, Any]] = [{}, {"speculative_tokens": speculative_tokens, "draft_model": draft_model}]
    engines = [Engine(model, max_num_seqs=1, **drafts, **options) for drafts in draft_options]
    params = SamplingParams(max_new_tokens=new, temperature=temperature, seed=0)
    for engine in engines:
        engine.pack_weights()
    texts = []
    for index, (name, prompt) in enumerate(prompts(engines[0]).items()):
        report(name, index, len(TASKS) + 1)
        runs = [[_generate(engine, prompt, params) for engine in engines] for _ in range(rounds + 1)]
        # the first round is dropped, because its prompt is not in the prefix cache
        texts.append({"text": name, "prompt_tokens": len(prompt), **summary(runs[1:])})
    return {"model": engines[1].info(), "new": new, "temperature": temperature, "rounds": rounds, "texts": texts}


def prompts(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Returns the tokenized prompts by name. If the model has a chat template, it is used."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError(missing_tokenizer_message(engine.loaded.model_dir))
    if tokenizer.has_chat_template:
        ids = {name: tokenizer.encode_chat([{"role": "user", "content": text}]) for name, text in TASKS.items()}
    else:
        ids = {name: tokenizer.encode(text + "\n\n") for name, text in TASKS.items()}
    ids["code"] = tokenizer.encode(CODE)
    return {name: tuple(ids[name]) for name in ("summary", "edit", "code", "story")}


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Summarizes runs, each of which is a pair (plain, speculative) of results of `_generate`."""
    plain, speculative = ([pair[i] for pair in runs] for i in (0, 1))
    last, rates = speculative[-1], [len(run["tokens"]) - 1 for run in (plain[0], speculative[0])]
    return {
        "plain_tokens_per_second": rates[0] / min(run["seconds"] for run in plain),
        "speculative_tokens_per_second": rates[1] / min(run["seconds"] for run in speculative),
        "times_plain": percentile([a["seconds"] / b["seconds"] for a, b in zip(plain, speculative, strict=True)], 0.5),
        "drafted": last["drafted"],
        "accepted": last["accepted"],
        "steps": last["steps"],  # after the first token
        "tokens": len(last["tokens"]),
        "same_answer": all(a["tokens"] == b["tokens"] for a, b in zip(plain, speculative, strict=True)),
    }


def _generate(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> dict[str, Any]:
    """Generates a completion. Returns its tokens, and the seconds, steps and drafted tokens after its first token."""
    engine.add_request(Request("bench", prompt, params))
    while not (outputs := engine.step()):
        pass
    start_stats, start = engine.stats(), time.perf_counter()
    while engine.has_work():
        outputs += engine.step()
    seconds, end_stats = time.perf_counter() - start, engine.stats()
    counters = {"drafted": "draft_tokens_total", "accepted": "accepted_draft_tokens_total", "steps": "steps_total"}
    counts = {name: end_stats[key] - start_stats[key] for name, key in counters.items()}
    return {"tokens": [token for output in outputs for token in output.token_ids], "seconds": seconds, **counts}
