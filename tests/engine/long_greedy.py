"""256 greedy tokens of a model. Run as a program, this file prints those of the reference ops.

The model has memorized a text, so that the logit of the best token exceeds the second by more than FP8 rounding and the
summation order can change.
"""

import json
import sys
from pathlib import Path
from typing import Any

from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.fp8.recipe import DelayedScaling

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
NEW, CONTEXT = 256, 384
_SUBSTRINGS = (
    (0, 14),
    (30, 40),
    (60, 25),
    (5, 64),
    (0, 24),
    (33, 30),
    (50, 60),
    (13, 50),
)  # (offset, length); each substring occurs once in the text
PROMPTS = [tuple(TEXT[at : at + size]) for at, size in _SUBSTRINGS]
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "delayed": {"recipe": DelayedScaling()},
    "delayed, fp8 cache": {"recipe": DelayedScaling(), "kv_cache_dtype": "fp8"},
    "current": {"recipe": "current"},
    "rowwise": {"recipe": "rowwise"},
    "block": {"recipe": "block"},
}


def engine(model: Path, mode: str, **options: Any) -> Engine:
    """Returns an engine that prefills 8 tokens a step. The file `model / "made-up"` holds scales of every linear layer
    and of the KV cache."""
    chosen = dict(MODES[mode])
    if isinstance(chosen["recipe"], DelayedScaling):
        chosen["scales"] = model / "made-up"
    return Engine(model, **chosen, max_prefill_tokens=8, max_batch_tokens=40, **options)


def tokens(runner: Engine, prompts: list[tuple[int, ...]], tenant: str = "") -> list[list[int]]:
    """Returns the generated tokens for each prompt, all in one batch. Tenants do not share cached prefixes."""
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
    generated: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(generated, prompts, strict=True):
        runner.add_request(Request(name, prompt, params, tenant=tenant))
    while runner.has_work():
        for output in runner.step():
            generated[output.request_id] += output.token_ids
    return list(generated.values())


def main(model: Path) -> None:
    """Prints the tokens of the reference ops for every mode as JSON."""
    from fp8serve.fp8 import ops

    if "cpu kernel" in " ".join(ops.backends().values()):
        raise SystemExit("The kernels are loaded: this would not be the reference.")
    json.dump({mode: tokens(engine(model, mode), PROMPTS) for mode in MODES}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
