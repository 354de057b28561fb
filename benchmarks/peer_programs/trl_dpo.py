"""TRL's DPOTrainer as the peer of benchmarks/preferences.py: the same pairs in the same order, and the same optimizer.

    PYTHON benchmarks/peer_programs/trl_dpo.py JOB.json

PYTHON: the interpreter of an environment with `trl`. JOB.json: model, data, and the options of `fp8serve finetune` by
their names, with `bf16`: whether FP32 weights are computed with under BF16 autocast, as ours. Prints a line of JSON:
the metrics of every step.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")


class InOrder(DPOTrainer):
    """The data are in the order of the other trainer already."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in Path(job["data"]).read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder, max_steps=job["max_steps"], per_device_train_batch_size=job["batch_size"],
            learning_rate=job["lr"], lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
            adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0, beta=job["beta"],
            loss_type=job["loss_type"], max_length=job["seq_len"], bf16=job["bf16"], use_cpu=True, seed=job["seed"],
            logging_steps=1, logging_first_step=True, save_strategy="no", report_to="none", disable_tqdm=True,
            gradient_checkpointing=False, precompute_ref_log_probs=True,
        )  # fmt: skip
        trainer = InOrder(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
        )
        trainer.train()
    steps = [{name: float(entry[name]) for name in NAMES} for entry in trainer.state.log_history if NAMES[1] in entry]
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
