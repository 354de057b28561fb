"""How well the plan of a fine-tune predicts its memory: the plan beside the peak of a process that trains.

    python benchmarks/train_memory.py [MODEL] [--tokens 1024] [--recipe delayed] [--master-weights model]

Without MODEL, random models of several shapes: dense, mixtures of experts, latent attention. Each trains two steps in
its own process, whose resident memory before the model is loaded is subtracted from its peak (VmHWM). The peak is read
after the second step, because writing the result is not part of the plan. Needs /proc, thus Linux. Prints JSON, a line
for each model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
MIXTURE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 8, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "first_k_dense_replace": 1, "q_lora_rank": 192, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "topk_method": "greedy",
    "routed_scaling_factor": 1.0, "norm_topk_prob": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 64},
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", "head_dim": 64} | MIXTURE,
    "DeepseekV2ForCausalLM": {"model_type": "deepseek_v2"} | LATENT,
}
CHILD = """
import json, sys
from pathlib import Path
import torch
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer
from fp8serve.train.validate import validate

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

config = TrainConfig.from_json(sys.argv[1])
plan = validate(config)
x = torch.ones(64, 64, requires_grad=True)
(x.bfloat16() @ x.bfloat16()).sum().backward()  # libraries and threads are there before anything is measured
before, peaks = memory("VmRSS"), []
Trainer(config).run(lambda event: peaks.append(memory("VmHWM")) if event["type"] == "metrics" else None)
print(json.dumps({"plan": plan.memory_bytes, "tokens": plan.microbatch_tokens, "measured": peaks[1] - before}))
"""


def write_model(folder: Path, name: str) -> Path:
    """A random model with a byte-pair tokenizer."""
    from safetensors.torch import save_file

    from fp8serve.train.scratch import random_weights, write_random_model

    texts = [json.loads(line).get("text", "") for line in _passages()]
    out = write_random_model(folder / name, texts, vocab_size=8192, context=1024)
    vocabulary = json.loads((out / "config.json").read_text())["vocab_size"]
    config = SIZES | SHAPES[name] | {"architectures": [name], "vocab_size": vocabulary}
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors.index.json").unlink()
    save_file(random_weights(out, 0), out / "model.safetensors", {"format": "pt"})
    return out


def _passages() -> list[str]:
    from fp8serve.calibration.data import PASSAGES

    return PASSAGES.read_text(encoding="utf-8").splitlines()


def measure(model: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The planned and the measured bytes; the error of the plan as a fraction of the measured ones."""
    words = " ".join(json.loads(line).get("text", "") for line in _passages()).split()
    rows = (json.dumps({"text": " ".join(words[i : i + options.tokens])}) for i in range(0, 8 * options.tokens, 100))
    data = folder / "data.jsonl"
    data.write_text("\n".join(rows), encoding="utf-8")
    config = {
        "model": str(model), "data": [str(data)], "out": str(folder / f"out-{model.name}"), "max_steps": 2,
        "batch_size": 4, "seq_len": options.tokens // 4, "recipe": options.recipe, "lr": 1e-6,
        "master_weights": options.master_weights,
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(config)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{model.name} did not train: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"model": model.name} | found | {"missed": found["plan"]["total"] / found["measured"] - 1}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="directory; without, random models")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="random models of these only")
    parser.add_argument("--tokens", type=int, default=1024, help="of a microbatch")
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--master-weights", default="model")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fp8serve-memory-") as name:
        folder = Path(name)
        models = (
            [options.model] if options.model else [write_model(folder, shape) for shape in options.shapes or SHAPES]
        )
        for model in models:
            print(json.dumps(measure(model, options, folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
