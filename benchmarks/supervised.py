"""Supervised fine-tuning and LoRA here beside TRL's SFTTrainer and peft, from one model, with the same rows in order.

    python benchmarks/supervised.py MODEL --peer PYTHON --out DIR [--steps 32] [--train WHAT ...] [--arm NAME ...]
        [--svg FILE]

MODEL: a Hugging Face directory in high precision that holds conversations. PYTHON: the interpreter of an environment
with `trl` and `peft`. The rows are sums of two numbers in chats, made from a seed, and only the answers carry loss. The
optimizer, the clipping and the learning rate are the same everywhere. First all weights are trained, in FP32 masters;
then an adapter of rank 8 at every projection, which begins with the same numbers everywhere (--train 'all weights' or
'adapter': only that). The adapter's base is BF16 or FP32 for peft; here it is BF16, FP8 that is cast by rows when it is
loaded, or FP8 with the static scales of a calibration. TRL gets our tokens, because it would also learn the line feed
that the template writes after an answer's end, which a server never generates. Then engines answer held-out sums: with
the original model in BF16 and with every trained model; a model trained in FP8 is served with the scales from training,
without calibration. The comparison is of numbers, not of speed. DIR keeps every curve and every answer, so that a call
that was interrupted continues from there. Prints JSON.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from curves import Curve, apart, cached, in_order, peer, trained, write
from safetensors.torch import save_file

from fp8serve.bench.figures import provenance
from fp8serve.calibration.data import PASSAGES
from fp8serve.charts import Panel, svg_file
from fp8serve.engine.engine import Engine
from fp8serve.model.formats.peft import tensor_name
from fp8serve.model.text.examples import parse_example, tokenize
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train import lora
from fp8serve.train.config import TrainConfig

PEER = Path(__file__).parent / "peer_programs" / "trl_sft.py"
HELD_OUT = 32
RANK = 8
LONGEST = 96  # tokens of an answer: the original model calculates before it answers
FIGURES = {"loss": "train_loss", "grad_norm": "grad_norm", "accuracy": "train_mean_token_accuracy"}
JOB = {
    "batch_size": 4, "seq_len": 128, "lr_schedule": "cosine", "warmup_steps": 0, "weight_decay": 0.01, "seed": 0,
}  # fmt: skip
RATES = {"all weights": 2e-5, "adapter": 5e-4}
ARMS = {
    "all weights": ("TRL, FP32", "TRL, BF16", "bf16", "rowwise", "delayed"),
    "adapter": ("TRL, FP32", "TRL, BF16", "bf16", "rowwise", "delayed"),
}

Row = dict[str, Any]


def sums(count: int, seed: int) -> list[Row]:
    """Returns different sums of two numbers, in chats."""
    rng = random.Random(seed)
    selected = rng.sample([(one, two) for one in range(10, 100) for two in range(10, 100)], count)
    return [{"messages": _conversation(one, two)} for one, two in selected]


def _conversation(one: int, two: int) -> list[Row]:
    question = {"role": "user", "content": f"What is {one} plus {two}?"}
    return [question, {"role": "assistant", "content": f"{one} plus {two} is {one + two}."}]


class Comparison:
    """All runs of one call, in its directory."""

    def __init__(self, model: str, python: str, folder: Path, steps: int) -> None:
        self.model, self.python, self.folder = model, python, folder
        rows = sums(JOB["batch_size"] * steps + HELD_OUT, 0)
        self.training_rows, self.held_out = rows[HELD_OUT:], rows[:HELD_OUT]
        self.job = {**JOB, "max_steps": steps, "threads": torch.get_num_threads()}
        folder.mkdir(parents=True, exist_ok=True)
        self.data = write(folder / "sums.jsonl", self.training_rows)
        self.held_out_data = write(folder / "held-out.jsonl", self.held_out)
        self.tokenizer = Tokenizer.from_dir(model)

    def run(self, what: str, arm: str) -> Row:
        """Trains one arm and leaves its model in `_result`. Returns {"curve", "held_out": the loss before and
        after}."""
        result: Row = cached(self._place(what, arm).with_suffix(".json"), partial(self._run, what, arm))
        return result

    def _run(self, what: str, arm: str) -> Row:
        if arm.startswith("TRL"):
            return self._train_trl(what, bf16=arm == "TRL, BF16")
        return self._train_fp8serve(what, arm)

    def _place(self, what: str, arm: str) -> Path:
        return self.folder / f"{what}-{arm}".replace(", ", "-").replace(" ", "-")

    def _result(self, what: str, arm: str) -> Path:
        place = self._place(what, arm)
        return place if arm.startswith("TRL") else place / "model"

    def _base(self, what: str, arm: str) -> str:
        """Returns the path of the model that is trained; a calibrated one for an adapter beside static scales."""
        calibrated = self.folder / "calibrated"
        if what != "adapter" or arm != "delayed":
            return self.model
        if not calibrated.exists():
            options = ["calibrate", self.model, "--out", str(calibrated), "--data", str(PASSAGES)]
            subprocess.run([sys.executable, "-m", "fp8serve", *options], check=True, stdout=subprocess.DEVNULL)
        return str(calibrated)

    def _config(self, what: str, arm: str) -> TrainConfig:
        rank = {"lora_rank": RANK} if what == "adapter" else {}
        return TrainConfig.from_dict(
            {
                **{k: v for k, v in self.job.items() if k != "threads"}, **rank, "lr": RATES[what],
                "model": self._base(what, arm), "data": [self.data], "eval_data": [self.held_out_data], "recipe": arm,
                "out": str(self._place(what, arm)), "on_divergence": "keep",
            }
        )  # fmt: skip

    def _train_fp8serve(self, what: str, arm: str) -> Row:
        held_out: list[float] = []

        def follow(event: Row) -> None:
            held_out.extend([event["valid_loss"]] if "valid_loss" in event and event["type"] == "metrics" else [])
            held_out.extend([event["loss"]] if event.get("code") == "validated" else [])

        return {"curve": trained(self._config(what, arm), FIGURES, follow), "held_out": held_out}

    def _train_trl(self, what: str, *, bf16: bool) -> Row:
        out = self._result(what, "TRL, BF16" if bf16 else "TRL, FP32")
        job = {**self.job, "model": self.model, "out": str(out), "lr": RATES[what], "bf16": bf16, "lora_rank": RANK}
        rows = {
            "rows": self._tokenized(in_order(self.training_rows, JOB["seed"])),
            "held_out": self._tokenized(self.held_out),
        }
        start = {"start": self._start() if what == "adapter" else None}
        result: Row = peer(self.python, PEER, self.folder, {**job, **rows, **start})
        return result

    def _tokenized(self, rows: Sequence[Row]) -> list[Row]:
        examples = [tokenize(parse_example(row, "a sum"), self.tokenizer) for row in rows]
        return [{"input_ids": list(one.ids), "completion_mask": [int(m) for m in one.loss_mask]} for one in examples]

    def _start(self) -> str:
        """Writes the initial adapter of our runs, in FP32 under peft's names; returns the path of the file."""
        masters = lora.adapter_parameters(lora.adapted_model(self._config("adapter", "bf16")))
        parts = {name: name.rpartition(".") for name in masters}
        file = self.folder / "start.safetensors"
        save_file({tensor_name(parts[n][0], parts[n][2]): master.detach() for n, master in masters.items()}, file)
        return str(file)

    def ask_result(self, what: str, arm: str) -> Row:
        return cached(self._place(what, arm).with_suffix(".answers.json"), partial(self._ask_result, what, arm))

    def _ask_result(self, what: str, arm: str) -> Row:
        result, in_fp8 = self._result(what, arm), arm in ("rowwise", "delayed")
        if what == "all weights":
            return self.ask(Engine(result, recipe="stored" if in_fp8 else "bf16"))
        recipe = {"delayed": "stored", "rowwise": "rowwise"}.get(arm, "bf16")
        engine = Engine(self._base(what, arm), recipe=recipe)
        engine.load_adapter("sums", result)
        return self.ask(engine, adapter="sums")

    def ask(self, engine: Engine, adapter: str | None = None) -> Row:
        """An engine's greedy answers to the held-out questions. right: the number of answers that contain the sum.
        as_taught: the number of answers that equal the held-out one."""
        questions = [row["messages"][0] for row in self.held_out]
        prompts = [self.tokenizer.encode_chat([question]) for question in questions]
        completions = engine.generate(prompts, adapter=adapter, max_new_tokens=LONGEST, temperature=0.0)
        texts, expected = [one.text for one in completions], [row["messages"][1]["content"] for row in self.held_out]
        numbers = [answer.rstrip(".").split()[-1] for answer in expected]
        return {
            "of": len(texts),
            "right": sum(number in _numbers(text) for number, text in zip(numbers, texts, strict=True)),
            "as_taught": sum(text == answer for text, answer in zip(texts, expected, strict=True)),
            "answers": {q["content"]: text for q, text in zip(questions, texts, strict=True)},
        }


def _numbers(text: str) -> list[str]:
    return "".join(c if c.isdigit() else " " for c in text).split()


def draw_svg(curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """Returns an SVG with the losses over the steps, and the difference of each from that of TRL in FP32."""
    panels = []
    for what, arms in curves.items():
        points = {arm: [(i + 1, step["loss"]) for i, step in enumerate(curve)] for arm, curve in arms.items()}
        panels.append(Panel(f"loss, {what}", points))
        peer_arm = "TRL, FP32" if "TRL, FP32" in arms else next(iter(arms))
        exact = arms[peer_arm]
        away = {
            arm: [(i + 1, a["loss"] - b["loss"]) for i, (a, b) in enumerate(zip(curve, exact, strict=True))]
            for arm, curve in arms.items()
        }
        panels.append(Panel(f"minus that of {peer_arm}", away))
    return svg_file("SFT and LoRA of SmolLM2-135M-Instruct, here and by TRL", panels, "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--train", action="append", choices=list(ARMS))
    parser.add_argument("--arm", action="append", choices=ARMS["all weights"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    comparison = Comparison(args.model, args.peer, args.out, args.steps)
    selected = {what: args.arm or ARMS[what] for what in args.train or ARMS}
    runs = {what: {arm: comparison.run(what, arm) for arm in arms} for what, arms in selected.items()}
    curves = {what: {arm: run["curve"] for arm, run in by_arm.items()} for what, by_arm in runs.items()}
    answers = {what: {arm: comparison.ask_result(what, arm) for arm in arms} for what, arms in selected.items()}
    before = cached(args.out / "before.answers.json", lambda: comparison.ask(Engine(args.model, recipe="bf16")))
    if args.svg is not None:
        args.svg.write_text(draw_svg(curves), encoding="utf-8")
    differences = {
        what: {
            peer_arm: {arm: apart(curve, by_arm[peer_arm]) for arm, curve in by_arm.items() if arm != peer_arm}
            for peer_arm in ("TRL, FP32", "TRL, BF16")
            if peer_arm in by_arm
        }
        for what, by_arm in curves.items()
    }
    command = f"python benchmarks/supervised.py MODEL --peer PYTHON --out DIR --steps {args.steps}"
    command += "".join(f" --train '{what}'" for what in args.train or ())
    command += "".join(f" --arm '{arm}'" for arm in args.arm or ())
    print(
        json.dumps(
            {
                "made": provenance(command),
                "job": {**comparison.job, "lr": RATES, "lora_rank": RANK},
                "apart": differences,
                "held_out_loss": {what: {arm: run["held_out"] for arm, run in f.items()} for what, f in runs.items()},
                "before": before,
                "after": answers,
                "curves": curves,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
