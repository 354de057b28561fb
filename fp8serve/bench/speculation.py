"""The gain of drafts from the text so far (engine/drafting.py): four answers of one sequence, with drafts and without.

Two answers repeat their prompts (a summary, an edit), one repeats itself (code), one has nothing to repeat (a story).
The two engines take turns, answer by answer, and the time is that of decoding, from the first token on. A rate is that
of the fastest round; the speed-up is the median over pairs, because both of a pair ran in the same minute. Answers end
where the model ends them, or at the requested length.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8serve.bench.clock import percentile
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError
from fp8serve.model.text.tokenizer import lacks_tokenizer

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
ASKED = {
    "summary": f"Summarize this text in a few sentences:\n\n{PASSAGE}",
    "edit": f'Repeat this text, and replace "the keeper" by "the guardian":\n\n{PASSAGE}',
    "story": "Write a story about a dragon who learns to bake bread.",
}


def measure(
    model: Path,
    tell: Callable[[str, int, int], None],
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
        tell(name, index, len(ASKED) + 1)
        runs = [[_answer(engine, prompt, params) for engine in engines] for _ in range(rounds + 1)]
        texts.append({"text": name, "prompt_tokens": len(prompt), **summary(runs[1:])})  # the first finds no prefix
    return {"model": engines[1].info(), "new": new, "temperature": temperature, "rounds": rounds, "texts": texts}


def prompts(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The prompts by name; for a chat model in its template."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError(lacks_tokenizer(engine.loaded.model_dir))
    if tokenizer.has_chat_template:
        asked = {name: tokenizer.encode_chat([{"role": "user", "content": text}]) for name, text in ASKED.items()}
    else:
        asked = {name: tokenizer.encode(text + "\n\n") for name, text in ASKED.items()}
    found = {**asked, "code": tokenizer.encode(CODE)}
    return {name: tuple(found[name]) for name in ("summary", "edit", "code", "story")}


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
