"""The engine alone, in this process: prefill, and decoding at several batch sizes, on random prompts.

Prefill: one prompt of `prompt` tokens to its first token, the fastest of a few. Decoding: `batch` sequences with
prompts of that length; when all are computed, `new` greedy steps are timed. Prompts are random: no prefix is shared.
The rate is that of the median step; the percentiles are the waiting times of a stream's reader for the next token.

`measure_speculation`: the gain of drafts from the text so far (engine/drafting.py), in four answers of one sequence.

Two answers repeat their prompts (a summary, an edit), one repeats itself (code), one has nothing to repeat (a story).
The two engines take turns, answer by answer, and the time is that of decoding, from the first token on. A rate is that
of the fastest round; the speed-up is the median over pairs, because both of a pair ran in the same minute. Answers end
where the model ends them, or at the requested length.
"""

import random
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp8serve.bench.figures import latencies, percentile
from fp8serve.engine.engine import Engine
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.model.text.tokenizer import lacks_tokenizer

REPEATS = 3  # of the prefill
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
    """`options`: those of the Engine. RequestError when a prompt and its answer are longer than the model can take."""
    options = {"max_num_seqs": max(batches), **options}
    engine_options = EngineOptions(**options)
    # while the last prompts are computed, the first sequences decode already
    extra = max(batches) * -(-prompt // engine_options.max_prefill_tokens)
    options.setdefault("max_model_len", prompt + new + extra + 1)
    began = time.perf_counter()
    engine = Engine(model, **options)
    loaded = time.perf_counter()
    _first_tokens(engine, _requests(engine, 1, 8, 1))
    first = time.perf_counter()
    engine.pack_weights()
    packed = time.perf_counter()
    report("prefill", 0, len(batches) + 1)
    prefill = min(_prefill(engine, prompt) for _ in range(REPEATS))
    decode = []
    for index, batch in enumerate(batches):
        report(f"decode, batch {batch}", index + 1, len(batches) + 1)
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
    """`options`: those of the Engine. RequestError where the model's context does not hold a text and its answer."""
    drafts: list[dict[str, Any]] = [{}, {"speculative_tokens": speculative_tokens, "draft_model": draft_model}]
    engines = [Engine(model, max_num_seqs=1, **drafting, **options) for drafting in drafts]
    params = SamplingParams(max_new_tokens=new, temperature=temperature, seed=0)
    for engine in engines:
        engine.pack_weights()
    texts = []
    for index, (name, prompt) in enumerate(prompts(engines[0]).items()):
        report(name, index, len(TASKS) + 1)
        runs = [[_answer(engine, prompt, params) for engine in engines] for _ in range(rounds + 1)]
        texts.append({"text": name, "prompt_tokens": len(prompt), **summary(runs[1:])})  # the first finds no prefix
    return {"model": engines[1].info(), "new": new, "temperature": temperature, "rounds": rounds, "texts": texts}


def prompts(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The prompts by name; for a chat model in its template."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError(lacks_tokenizer(engine.loaded.model_dir))
    if tokenizer.has_chat_template:
        request = {name: tokenizer.encode_chat([{"role": "user", "content": text}]) for name, text in TASKS.items()}
    else:
        request = {name: tokenizer.encode(text + "\n\n") for name, text in TASKS.items()}
    results = {**request, "code": tokenizer.encode(CODE)}
    return {name: tuple(results[name]) for name in ("summary", "edit", "code", "story")}


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Figures of pairs (plain, speculative) of results of `_answer`."""
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


def _answer(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> dict[str, Any]:
    """One answer, the seconds after its first token, and its drafted tokens."""
    engine.add_request(Request("bench", prompt, params))
    while not (outputs := engine.step()):
        pass
    before, began = engine.stats(), time.perf_counter()
    while engine.has_work():
        outputs += engine.step()
    seconds, after = time.perf_counter() - began, engine.stats()
    names = {"drafted": "draft_tokens_total", "accepted": "accepted_draft_tokens_total", "steps": "steps_total"}
    counted = {name: after[key] - before[key] for name, key in names.items()}
    return {"tokens": [token for output in outputs for token in output.token_ids], "seconds": seconds, **counted}
