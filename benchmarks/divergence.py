"""Does delayed scaling diverge where a larger margin or current scaling does not? Fine-tunes that were meant to do so.

    python benchmarks/divergence.py MODEL --out DIR [--steps 24] [--setting NAME ...]

MODEL: a Hugging Face directory, or smollm2. Every setting is run with what `--on-divergence return` tries: delayed
scaling with margin 0, with margin 2, and current scaling; and in BF16. A run has diverged by the rule of the trainer
(`train/validation.py`), which looks at the loss of its first rows. No checkpoints are written. `overflow` counts the
tensors that were more than four times as large as their scale has room for. The settings: learning rates that are far
too high, from the first step on; steps of random tokens among texts; and steps with two targets among steps with
hundreds, where gradients are a hundred times larger, with a history of one step. DIR keeps every run, so that a call
that was interrupted continues from there. Prints JSON.
"""

import argparse
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from curves import Row, kept, write

from fp8serve.bench.figures import provenance
from fp8serve.calibration.data import PASSAGES
from fp8serve.errors import JobError
from fp8serve.hub import find_model
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.ranks import ALONE
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import iterate_steps, permutation
from fp8serve.train.health import Health
from fp8serve.train.run import Progress, TrainingRun
from fp8serve.train.setup import prepare
from fp8serve.train.train_step import take_step
from fp8serve.train.trainer import initialize
from fp8serve.train.validation import outcome_of

BATCH, LENGTH, SEED = 4, 64, 0
ARMS: dict[str, dict[str, Any]] = {
    "delayed, margin 0": {"recipe": "delayed"},
    "delayed, margin 2": {"recipe": "delayed", "recipe_options": {"margin": 2}},
    "current": {"recipe": "current"},
    "bf16": {"recipe": "bf16"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "rate 3e-4": {"lr": 3e-4},
    "rate 1e-3": {"lr": 1e-3},
    "rate 3e-3": {"lr": 3e-3},
    "random tokens": {"lr": 1e-4, "rows": "random", "amax_history_len": 16},
    "two targets": {"lr": 1e-4, "rows": "few", "amax_history_len": 1},
}


def texts(tokenizer: Tokenizer, count: int) -> list[str]:
    """Pieces of about LENGTH tokens."""
    text = "\n".join(json.loads(line).get("text", "") for line in PASSAGES.read_text(encoding="utf-8").splitlines())
    ids = tokenizer.encode(text)
    starts = range(0, len(ids) - LENGTH, max(1, (len(ids) - LENGTH) // count))
    return [tokenizer.decode(ids[start : start + LENGTH]) for start in starts][:count]


def rows_of(kind: str | None, tokenizer: Tokenizer, steps: int) -> list[Row]:
    """The rows of all steps, in order. kind: what every fourth step from the ninth on is made of."""
    chance = random.Random(SEED)
    rows = [{"prompt": "", "completion": text} for text in texts(tokenizer, BATCH * steps)]
    for at in range(BATCH * 8, len(rows)) if kind is not None else ():
        if at // BATCH % 4 == 0:
            ids = [chance.randrange(100, len(tokenizer.vocabulary)) for _ in range(LENGTH)]
            text = rows[at]["completion"]
            cut = text[: len(text) // 2]
            rows[at] = {
                "random": {"prompt": "", "completion": tokenizer.decode(ids)},
                "few": {"prompt": cut, "completion": " the"},
            }[str(kind)]
    return rows


def laid_out(rows: Sequence[Row]) -> list[Row]:
    """The rows in an order in which the trainer takes them as they are here."""
    found = dict(zip(permutation(len(rows), SEED, 0), rows, strict=True))
    return [found[i] for i in range(len(rows))]


def run(model: Path, data: str, options: dict[str, Any]) -> Row:
    """{"before", "after": the loss of the first rows, "diverged", "highest": of the steps' losses, "overflow"}."""
    config = TrainConfig.from_dict({**options, "model": str(model), "data": [data], "out": data + ".out"})
    events: list[Row] = []
    setup = prepare(config, model, events.append)
    training = TrainingRun(config, config, ALONE, events.append, setup, {}, Progress())
    initialize(training)
    health = Health(setup.forward, events.append, training.progress.first_loss)
    losses, stopped = list[float](), None
    try:
        for step, cursor in iterate_steps(training.lengths, config, training.progress.cursor, setup.total_steps):
            losses.append(take_step(training, step))
            health.step(training.progress.step, losses[-1])
            training.progress.cursor = cursor
    except JobError as error:
        stopped = str(error)
    outcome = outcome_of(training)
    overflow = sum(event["tensors"] for event in events if event.get("code") == "overflow")
    return {
        "before": outcome.initial_loss, "after": outcome.final_loss,
        "diverged": stopped or outcome.divergence, "highest": max(losses), "overflow": overflow, "losses": losses,
    }  # fmt: skip


def options_of(setting: dict[str, Any], arm: str, steps: int) -> dict[str, Any]:
    options = {name: value for name, value in setting.items() if name != "rows"}
    if ARMS[arm]["recipe"] != "delayed":
        options.pop("amax_history_len", None)
    common = {"batch_size": BATCH, "seq_len": LENGTH, "max_steps": steps, "seed": SEED, "warmup_steps": 0}
    return {**common, "lr_schedule": "constant", **options, **ARMS[arm]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    model = find_model(asked.model)
    tokenizer = Tokenizer.from_dir(model)
    asked.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Row]] = {}
    for name in asked.setting or SETTINGS:
        place = asked.out / name.replace(" ", "-")
        data = write(place.with_suffix(".jsonl"), laid_out(rows_of(SETTINGS[name].get("rows"), tokenizer, asked.steps)))
        for arm in ARMS:
            path = asked.out / f"{place.name}-{arm.replace(', ', '-').replace(' ', '-')}.json"
            options = options_of(SETTINGS[name], arm, asked.steps)
            found.setdefault(name, {})[arm] = kept(path, partial(run, model, data, options))
    command = f"python benchmarks/divergence.py MODEL --out DIR --steps {asked.steps}"
    shape = {"tokens_a_step": BATCH * LENGTH, "steps": asked.steps}
    print(json.dumps({"made": provenance(command), **shape, "settings": SETTINGS, "found": found}, indent=1))


if __name__ == "__main__":
    main()
