"""TRL's SFTTrainer, alone and with a peft adapter, as the peer of benchmarks/supervised.py.

    PYTHON benchmarks/peer_programs/trl_sft.py JOB.json

PYTHON: the interpreter of an environment with `trl` and `peft`. JOB.json: model, out, the options of `fp8serve
finetune` by their names, rows and held_out, which are tokenized (input_ids, completion_mask), and bf16: whether it
computes under BF16 autocast. start is null, or the adapter to begin with, in FP32 under peft's names; then the base is
BF16 where bf16 is true, and else FP32. Saves the result in `out`. Prints a line of JSON: the metrics of every step, and
the loss of all held-out rows as one batch before and after.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

NAMES = {"loss": "loss", "grad_norm": "grad_norm", "accuracy": "mean_token_accuracy"}


class InOrder(SFTTrainer):
    """The data are in the order of the other trainer already."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def model_of(job: dict) -> torch.nn.Module:
    narrow = job["bf16"] and job["start"] is not None
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16 if narrow else torch.float32)
    if job["start"] is None:
        return base
    rank = job["lora_rank"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
    model = get_peft_model(base, config)
    unknown = set_peft_model_state_dict(model, load_file(job["start"])).unexpected_keys
    assert not unknown, unknown
    return model


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_steps=job["max_steps"], per_device_train_batch_size=job["batch_size"],
            per_device_eval_batch_size=len(job["held_out"]), learning_rate=job["lr"],
            lr_scheduler_type=job["lr_schedule"], warmup_steps=job["warmup_steps"], weight_decay=job["weight_decay"],
            adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0, max_length=job["seq_len"],
            completion_only_loss=True, bf16=job["bf16"], use_cpu=True, seed=job["seed"], logging_steps=1,
            logging_first_step=True, save_strategy="no", report_to="none", disable_tqdm=True,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = InOrder(
            model=model_of(job),
            args=config,
            train_dataset=Dataset.from_list(job["rows"]),
            eval_dataset=Dataset.from_list(job["held_out"]),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        trainer.save_model(job["out"])
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    curve = [{name: float(entry[metric]) for name, metric in NAMES.items()} for entry in steps]
    print(json.dumps({"curve": curve, "held_out": [before, after]}))


if __name__ == "__main__":
    main()
