"""transformers' Trainer, alone and with a peft adapter, as a peer of benchmarks/finetuning.py.

    PYTHON benchmarks/peer_programs/hf_finetune.py JOB.json

PYTHON: the interpreter of an environment with `transformers`, `accelerate` and, for an adapter, `peft`. JOB.json:
model, rows (lists of token ids of one length), batch_size, steps, lr, threads, recompute, and lora_rank, which is null
for all weights. All weights are trained in FP32 under BF16 autocast; an adapter in FP32 beside a BF16 model. Prints a
line of JSON: the seconds of every step, and "peak", the largest resident memory of the process in bytes.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Clock(TrainerCallback):
    """The seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def model_of(job: dict) -> torch.nn.Module:
    if job["lora_rank"] is None:
        return AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    rank = job["lora_rank"]
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear"))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=job["steps"], per_device_train_batch_size=job["batch_size"],
            learning_rate=job["lr"], bf16=True, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
            gradient_checkpointing=job["recompute"], gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_strategy="no",
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in job["rows"]]
        Trainer(model=model_of(job), args=arguments, train_dataset=rows, callbacks=[clock]).train()
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": clock.seconds, "peak": peak}))


if __name__ == "__main__":
    main()
