"""DPO here beside TRL's: the loss and the rewards of every step, from one model, with the same pairs in the same order.

    python benchmarks/preferences.py MODEL --peer PYTHON --out DIR [--steps 24] [--recipe bf16 ...]

MODEL: a Hugging Face directory. PYTHON: the interpreter of an environment with `trl`. The pairs are sums with a right
and a wrong answer, made from a seed. Both trainers hold FP32 weights and compute in BF16. Only ours has FP8 recipes;
TRL in FP32 beside TRL in BF16 shows the effect of rounding. TRL gets the pairs in the order in which ours takes them.
The comparison is of numbers, not of speed. DIR keeps every curve, so that a call that was interrupted continues from
there. Prints JSON.
"""

import argparse
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from curves import Curve, apart, cached, in_order, peer, trained, write

from fp8serve.bench.figures import provenance
from fp8serve.train.config import TrainConfig

PEER = Path(__file__).parent / "peer_programs" / "trl_dpo.py"
TRL, IN_FP32 = "trl", "trl-fp32"
COMPARED = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Sums of two numbers in chats, answered rightly and wrongly."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        one, two, off = rng.randint(10, 99), rng.randint(10, 99), rng.choice([-10, -2, -1, 1, 2, 10])
        prompt = [{"role": "user", "content": f"What is {one} plus {two}?"}]
        answers = (f"{one} plus {two} is {one + two + error}." for error in (0, off))
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def ours(folder: Path, job: dict[str, Any], recipe: str) -> Curve:
    options = {k: v for k, v in job.items() if k not in ("threads", "data")}
    config = TrainConfig.from_dict(
        {
            **options, "method": "dpo", "data": [job["data"]], "recipe": recipe, "out": str(folder / recipe),
            "lr_schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "on_divergence": "keep",
        }
    )  # fmt: skip
    return trained(config, {name: "train_loss" if name == "loss" else name for name in COMPARED})


def theirs(python: str, folder: Path, job: dict[str, Any], rows: Sequence[dict[str, Any]], *, bf16: bool) -> Curve:
    data = write(folder / "ordered.jsonl", in_order(rows, job["seed"]))
    curve: Curve = peer(python, PEER, folder, {**job, "bf16": bf16, "data": data})
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    job = {
        "model": args.model, "max_steps": args.steps, "batch_size": 4, "seq_len": 128, "lr": 5e-6, "seed": 0,
        "beta": 0.1, "loss_type": "sigmoid", "threads": torch.get_num_threads(),
    }  # fmt: skip
    rows = pairs(4 * args.steps, 0)
    args.out.mkdir(parents=True, exist_ok=True)
    job["data"] = write(args.out / "pairs.jsonl", rows)
    runs = {name: partial(theirs, args.peer, args.out, job, rows, bf16=name == TRL) for name in (TRL, IN_FP32)}
    runs |= {recipe: partial(ours, args.out, job, recipe) for recipe in args.recipe or ["bf16", "rowwise"]}
    curves = {name: cached(args.out / f"{name}.json", run) for name, run in runs.items()}
    differences = {recipe: apart(curve, curves[TRL]) for recipe, curve in curves.items() if recipe != TRL}
    recipes = " ".join(f"--recipe {name}" for name in differences if name != IN_FP32)
    command = f"python benchmarks/preferences.py MODEL --peer PYTHON --out DIR --steps {args.steps} {recipes}"
    settings = {k: v for k, v in job.items() if k not in ("model", "data")}
    print(json.dumps({"made": provenance(command), "job": settings, "apart": differences, "curves": curves}, indent=1))


if __name__ == "__main__":
    main()
