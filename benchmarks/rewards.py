r"""GRPO with a reward that can be checked: SmolLM2 learns sums of one-digit numbers, is served, and is asked.

    python benchmarks/rewards.py MODEL --out DIR [--steps 32] [--recipe delayed ...] [--svg FILE]

MODEL: a Hugging Face directory. The prompts are "2 + 3 = 5\n7 + 8 ="; of the 81 sums, 17 are held out. An engine
answers these greedily: with MODEL in BF16, and with the trained model, which is served without calibration. DIR keeps
every step, so that a call that was interrupted continues from there. Prints JSON.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_sums import reward

from fp8serve.bench.figures import provenance
from fp8serve.charts import Panel, svg_file
from fp8serve.engine.engine import Engine
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer

REWARD = Path(__file__).parent / "reward_sums.py"
ANSWER = 4  # tokens
JOB = {
    "method": "grpo", "reward": str(REWARD), "batch_size": 8, "num_generations": 6, "seq_len": 32,
    "max_completion_length": ANSWER, "lr": 5e-6, "lr_schedule": "constant", "warmup_steps": 4, "save_minutes": 4.0,
}  # fmt: skip
DRAWN = {"reward": "reward", "apart": "sampling/sampling_logp_difference/mean", "tokens": "completions/mean_length"}

Row = dict[str, Any]


def sums() -> tuple[list[Row], list[Row]]:
    """Returns (rows to train on, held-out rows)."""
    rows = [{"prompt": f"2 + 3 = 5\n{a} + {b} =", "sum": a + b} for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(rows)
    return rows[17:], rows[:17]


def train(model: str, folder: Path, data: Path, recipe: str, steps: int) -> list[Row]:
    """Trains, and returns the figures of every step that are drawn. The model is in `folder/model`."""
    log = folder.with_suffix(".jsonl")

    def follow(event: Mapping[str, Any]) -> None:
        if event["type"] == "metrics":
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": event["step"], **{k: event[name] for k, name in DRAWN.items()}}) + "\n")

    options = {**JOB, "model": model, "data": [str(data)], "out": str(folder), "recipe": recipe, "max_steps": steps}
    Trainer(TrainConfig.from_dict(options)).run(follow)
    rows = {row["step"]: row for row in map(json.loads, log.read_text(encoding="utf-8").splitlines())}
    return [rows[step] for step in sorted(rows) if step <= steps]


def ask(model: Path | str, recipe: str, rows: Sequence[Row]) -> Row:
    """Returns the number of sums that an engine answers correctly, and its answers."""
    engine = Engine(model, recipe=recipe)
    completions = engine.generate([row["prompt"] for row in rows], max_new_tokens=ANSWER, temperature=0.0)
    right = sum(reward(row["prompt"], one.text, row) for row, one in zip(rows, completions, strict=True))
    return {
        "right": int(right),
        "of": len(rows),
        "answers": {r["prompt"]: d.text for r, d in zip(rows, completions, strict=True)},
    }


def drawn(curves: Mapping[str, Sequence[Row]]) -> str:
    """SVG, over steps: the reward as a running mean of five steps, and the difference of log-probabilities."""

    def smooth(points: Sequence[Row], name: str) -> list[tuple[float, float]]:
        values = [row[name] for row in points]
        parts = [values[max(0, i - 4) : i + 1] for i in range(len(values))]
        return [(row["step"], sum(part) / len(part)) for row, part in zip(points, parts, strict=True)]

    rewards = {recipe: smooth(points, "reward") for recipe, points in curves.items()}
    apart = {recipe: [(row["step"], row["apart"]) for row in points] for recipe, points in curves.items()}
    panels = [Panel("reward, mean of five steps", rewards), Panel("|log p trainer - log p engine|, nats", apart)]
    return svg_file("GRPO on SmolLM2-135M-Instruct: sums of one-digit numbers", panels, "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train_rows, held_out = sums()
    data = args.out / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in train_rows), encoding="utf-8")
    recipes = args.recipe or ["delayed", "bf16"]
    curves = {recipe: train(args.model, args.out / recipe, data, recipe, args.steps) for recipe in recipes}
    served = {r: ask(args.out / r / "model", "bf16" if r == "bf16" else "stored", held_out) for r in recipes}
    if args.svg is not None:
        args.svg.write_text(drawn(curves), encoding="utf-8")
    command = f"python benchmarks/rewards.py MODEL --out DIR --steps {args.steps} " + " ".join(
        f"--recipe {recipe}" for recipe in recipes
    )
    job = {name: value for name, value in JOB.items() if name != "reward"}
    before = ask(args.model, "bf16", held_out)
    print(
        json.dumps(
            {"made": provenance(command), "job": job, "before": before, "after": served, "curves": curves}, indent=1
        )
    )


if __name__ == "__main__":
    main()
