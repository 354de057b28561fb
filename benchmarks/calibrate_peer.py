"""Our calibration beside llm-compressor's one-shot: the same model, the same token ids, static FP8, in turn.

    python benchmarks/calibrate_peer.py MODEL --peer PYTHON [--samples 32] [--seq-len 256] [--batch-size 4] [--rounds 3]

MODEL: a Hugging Face directory. PYTHON: the interpreter of an environment with `llmcompressor`. Both programs have the
same number of threads and get the same samples, which are random token ids. Two times are measured: from the loaded
model to its scales, and from the start of the program to the written directory; quality is not measured. The best of
the rounds counts, and the worst is shown beside it. Prints JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PEER = """
import json, sys, time
started = time.perf_counter()
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM
model, out, rows, threads, _ = sys.argv[1:]
torch.set_num_threads(int(threads))
ids = json.load(open(rows))
data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
began = time.perf_counter()
recipe = QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])
longest = max(map(len, ids))
oneshot(model=decoder, dataset=data, recipe=recipe, max_seq_length=longest, num_calibration_samples=len(ids))
to_scales = time.perf_counter() - began
decoder.save_pretrained(out, save_compressed=True)
total = time.perf_counter() - started
print(json.dumps({"scales": to_scales, "total": total, "tokens": sum(map(len, ids))}))
"""
OURS = """
import json, sys, time
started = time.perf_counter()
import torch
from fp8serve.calibration.data import Sample, make_batches
from fp8serve.calibration.observe import final_states, make_observer, observe
from fp8serve.calibration.pipeline import load_for_calibration
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.model.checkpoint import ScalingCheckpoint, TensorScale, fingerprint
from fp8serve.model.export import write_calibrated
from pathlib import Path
model, out, rows, threads, batch_size = sys.argv[1:]
torch.set_num_threads(int(threads))
ids = json.load(open(rows))
decoder, linears = load_for_calibration(Path(model), "cpu")
began = time.perf_counter()
batches = make_batches([Sample(tuple(row), (True,) * len(row)) for row in ids], int(batch_size))
recipe = DelayedScaling()
states = final_states(observe(decoder, make_observer(decoder, linears, recipe), batches))
to_scales = time.perf_counter() - began
scales = {name: TensorScale(state.scale, state.amax_history) for name, state in states.items()}
write_calibrated(out, model, ScalingCheckpoint(recipe, scales, model=fingerprint(model), created_by="benchmark"))
total = time.perf_counter() - started
print(json.dumps({"scales": to_scales, "total": total, "tokens": sum(map(len, ids))}))
"""


def measured(python: str, program: str, *arguments: str) -> dict[str, float]:
    """Runs a program and returns the last JSON object that it prints."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True, env=environment)
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise SystemExit(f"{python} failed:\n{process.stderr[-2000:]}")
    results: dict[str, float] = json.loads(lines[-1])
    return results


def random_rows(model: Path, samples: int, length: int) -> list[list[int]]:
    import torch

    vocab = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = torch.randint(5, vocab, (samples, length), generator=generator).tolist()
    return rows


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Best and worst seconds of every figure, and tokens a second in the best round."""
    spans = {key: [round(f(r[key] for r in rounds), 2) for f in (min, max)] for key in ("scales", "total")}
    return spans | {"tokens_per_second": round(rounds[0]["tokens"] / min(r["scales"] for r in rounds))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4, help="of ours; llm-compressor takes one sample at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    programs = {"fp8serve": (sys.executable, OURS), "llm-compressor": (args.peer, PEER)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for number in range(args.rounds):
        for name, (python, program) in programs.items():
            with tempfile.TemporaryDirectory() as folder:
                rows = Path(folder) / "rows.json"
                rows.write_text(json.dumps(random_rows(args.model, args.samples, args.seq_len)), encoding="utf-8")
                numbers = (str(args.threads), str(args.batch_size))
                arguments = (str(args.model), str(Path(folder) / "out"), str(rows), *numbers)
                rounds[name].append(measured(python, program, *arguments))
            print(f"round {number + 1} {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
    results = {name: summary(each) for name, each in rounds.items()}
    faster = results["llm-compressor"]["scales"][0] / results["fp8serve"]["scales"][0]
    print(json.dumps(results | {"times_as_fast": round(faster, 2)}, indent=2))


if __name__ == "__main__":
    main()
