"""A fine-tune here beside transformers' Trainer and peft: seconds a step, and the peak memory of the process.

    python benchmarks/finetuning.py MODEL --peer PYTHON [--rounds 3] [--steps 6] [--batch-size 4] [--seq-len 256]

MODEL: a Hugging Face directory, or smollm2. PYTHON: the interpreter of an environment with `transformers`, `accelerate`
and `peft`. All train the same rows of equal length with AdamW, each in its own process, in turn, round after round.
First all weights are trained: FP32 masters computed in BF16, and ours in FP8, too. Then an adapter of rank 8 is trained
at every projection: theirs beside a BF16 model, ours beside an FP8 one. Both of ours also run with `recompute`. Ours
run in the environment that `fp8serve finetune` prepares (`prepare_environment`), theirs with their defaults. A round's
figure is the median of its steps without the first. Other work can only make a step slower, so the fastest round
counts, and the slowest is shown beside it. The peak is the largest resident memory of the process, with Python and the
libraries. Prints JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fp8serve.bench.figures import provenance
from fp8serve.calibration.data import PASSAGES
from fp8serve.hub import find_model
from fp8serve.model.text.tokenizer import Tokenizer

PEER = Path(__file__).parent / "peer_programs" / "hf_finetune.py"
RANK = 8
OURS = """
import json, sys, time
from pathlib import Path
from fp8serve.cli import prepare_environment
prepare_environment(["finetune"])
import torch
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer

job = json.loads(sys.argv[1])
torch.set_num_threads(job.pop("threads"))
times, peak = [], 0

def follow(event):
    global peak
    if event["type"] == "metrics":
        times.append(time.perf_counter())
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))

Trainer(TrainConfig.from_dict(job)).run(follow)
print(json.dumps({"seconds": [b - a for a, b in zip(times, times[1:])], "peak": peak}))
"""
ARMS: dict[str, dict[str, Any]] = {
    "transformers, BF16": {"peer": True},
    "fp8serve, BF16": {"recipe": "bf16"},
    "fp8serve, delayed": {"recipe": "delayed"},
    "fp8serve, delayed, recompute": {"recipe": "delayed", "recompute": True},
    "peft, BF16": {"peer": True, "lora_rank": RANK},
    "fp8serve LoRA, FP8": {"recipe": "rowwise", "lora_rank": RANK},
    "fp8serve LoRA, FP8, recompute": {"recipe": "rowwise", "lora_rank": RANK, "recompute": True},
}


def rows_of(model: Path, count: int, length: int) -> tuple[list[str], list[list[int]]]:
    """`count` texts of `length` tokens each, and their tokens."""
    tokenizer = Tokenizer.from_dir(model)
    text = "\n".join(json.loads(line).get("text", "") for line in PASSAGES.read_text(encoding="utf-8").splitlines())
    ids, texts, rows = tokenizer.encode(text), list[str](), list[list[int]]()
    for at in range(0, len(ids) - length, length // 2):
        piece = tokenizer.decode(ids[at : at + length])
        if len(rows) < count and tokenizer.encode(piece) == ids[at : at + length]:
            texts.append(piece)
            rows.append(ids[at : at + length])
    if len(rows) < count:
        raise SystemExit(f"The shipped text has {len(rows)} rows of {length} tokens; ask for fewer or shorter ones.")
    return texts, rows


def run(arm: dict[str, Any], job: dict[str, Any], rows: list[list[int]], python: str, folder: Path) -> dict[str, Any]:
    """Runs one arm once: {"seconds": those of each step without the first, "peak": bytes}."""
    if arm.get("peer"):
        settings = {"lora_rank": None, "recompute": False, **arm, "rows": rows, "steps": job["max_steps"]}
        job_file = folder / "job.json"
        job_file.write_text(json.dumps({**{k: job[k] for k in ("model", "batch_size", "lr", "threads")}, **settings}))
        command = [python, str(PEER), str(job_file)]
    else:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            return _train([sys.executable, "-c", OURS, json.dumps({**job, **arm, "out": out})])
    results = _train(command)
    return {**results, "seconds": results["seconds"][1:]}


def _train(command: list[str]) -> dict[str, Any]:
    """Runs a command that trains; returns the JSON that it prints on its last line."""
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{command[0]} did not train: {process.stderr[-800:]}")
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return results


def compared(rounds: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, dict[str, float]]:
    """For each arm, tokens a second in the fastest and in the slowest round, and the peak in MiB."""
    results = {}
    for name, mine in rounds.items():
        medians = [statistics.median(one["seconds"]) for one in mine]
        results[name] = {
            "step_seconds": round(min(medians), 3),
            "tokens_per_second": round(tokens / min(medians), 1),
            "slowest_round": round(tokens / max(medians), 1),
            "peak_mib": round(max(one["peak"] for one in mine) / (1 << 20)),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", required=True)
    for name, usual in (("--rounds", 3), ("--steps", 6), ("--batch-size", 4), ("--seq-len", 256)):
        parser.add_argument(name, type=int, default=usual)
    args = parser.parse_args()
    model = find_model(args.model)
    texts, rows = rows_of(model, args.batch_size * args.steps, args.seq_len)
    with tempfile.TemporaryDirectory(prefix="fp8serve-finetuning-") as name:
        folder = Path(name)
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        job = {
            "model": str(model), "data": [str(data)], "max_steps": args.steps, "batch_size": args.batch_size,
            "seq_len": args.seq_len, "lr": 1e-5, "threads": torch.get_num_threads(), "on_divergence": "keep",
        }  # fmt: skip
        rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for number in range(args.rounds):
            for arm, options in ARMS.items():
                rounds[arm].append(run(options, job, rows, args.peer, folder))
                seconds = statistics.median(rounds[arm][-1]["seconds"])
                print(f"round {number + 1}, {arm}: {seconds:.3f} s a step", file=sys.stderr)
    command = f"python benchmarks/finetuning.py MODEL --peer PYTHON --rounds {args.rounds} --steps {args.steps}"
    command += f" --batch-size {args.batch_size}"
    shape = {"batch_size": args.batch_size, "seq_len": args.seq_len, "lora_rank": RANK}
    figures = compared(rounds, args.batch_size * args.seq_len)
    print(json.dumps({"made": provenance(command), **shape, "figures": figures, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
