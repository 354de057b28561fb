"""The cost of watching a run's health: steps of a fine-tune with and without `Health`, taking turns in one process.

    python benchmarks/health.py MODEL [--pairs 25]

MODEL: a Hugging Face directory, or smollm2. A step is what the trainer does for four rows of 128 tokens under delayed
scaling: forward and backward pass, clipping, AdamW. `Health` reads all scales after each step, and counts values in the
passes of every sixteenth. A pair is a step with a new `Health`, which counts at its first step, and a step without
`Health`. Other work on the machine changes single steps by more than watching costs. So the cost of a step that counts
and reads is the median of the pairs' differences; the cost of reading alone is timed by itself. The cost of a step is
the mean over sixteen steps. Prints JSON.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from finetuning import rows_of

from fp8serve.bench.figures import provenance
from fp8serve.hub import find_model
from fp8serve.train.config import TrainConfig
from fp8serve.train.health import Health
from fp8serve.train.setup import Setup, prepare
from fp8serve.train.train_step import accumulate_gradients

ROWS, LENGTH = 4, 128
EVERY = 16  # steps from one count to the next, as in `Health`


def _ignore(event: dict[str, Any]) -> None:
    """Ignores the reports about the data and the scales."""


def prepared(model: Path, folder: Path) -> Setup:
    """Returns a fine-tune before its first step."""
    data = folder / "data.jsonl"
    texts, _ = rows_of(model, ROWS, LENGTH)
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    options = {"batch_size": ROWS, "seq_len": LENGTH, "max_steps": 1, "lr": 1e-6}
    config = {**options, "model": str(model), "data": [str(data)], "out": str(folder / "out")}
    return prepare(TrainConfig.from_dict(config), model, _ignore)


def stepping(setup: Setup) -> Callable[[], float]:
    """Returns a function that runs a step and returns its loss."""
    items = setup.items[:ROWS]

    def step() -> float:
        loss, *_ = accumulate_gradients(setup.method, setup.forward, setup.optimizer, [items])
        setup.optimizer.step(1e-6)
        return loss

    return step


def measure(setup: Setup, pairs: int) -> dict[str, float]:
    """Returns the times in milliseconds, and the cost in percent of a step."""
    step, plain, added, reading = stepping(setup), list[float](), list[float](), list[float]()
    for _ in range(3):  # scales settle, memory is taken
        step()
    for _ in range(pairs):
        health = Health(setup.forward, _ignore, None)
        began = time.perf_counter()
        health.step(1, step())
        counted = time.perf_counter()
        health.step(2, 0.0)
        read = time.perf_counter()
        health.close()
        without = time.perf_counter()
        step()
        plain.append(time.perf_counter() - without)
        added.append(counted - began - plain[-1])
        reading.append(read - counted)
    cost = (median(added) + (EVERY - 1) * median(reading)) / EVERY
    return {
        "step_ms": 1e3 * median(plain),
        "counting_adds_ms": 1e3 * median(added),
        "reading_ms": 1e3 * median(reading),
        "cost_ms": 1e3 * cost,
        "cost_percent": 100 * cost / median(plain),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=25)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8serve-health-") as name:
        results = measure(prepared(find_model(args.model), Path(name)), args.pairs)
    command = f"python benchmarks/health.py MODEL --pairs {args.pairs}"
    shape = {"tokens": ROWS * LENGTH, "every": EVERY, "pairs": args.pairs}
    print(json.dumps({"made": provenance(command), **shape, **results}, indent=1))


if __name__ == "__main__":
    main()
