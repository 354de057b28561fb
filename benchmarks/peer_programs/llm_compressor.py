"""Directories of FP8 weights by llm-compressor's one-shot, as peers of `python -m benchmarks.studies quality`.

    PYTHON benchmarks/peer_programs/llm_compressor.py MODEL DATA.jsonl OUT --scheme FP8 [--samples 64] [--seq-len 512]
    python -m benchmarks.studies quality MODEL --out DIR --peer llm-compressor=OUT

PYTHON: the interpreter of an environment with `llmcompressor`. DATA.jsonl: lines of {"text": ...}, the file that
fp8serve calibrates on. --scheme: FP8 (static), FP8_DYNAMIC or FP8_BLOCK. fp8serve reads OUT and serves its scales.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def rows(data: Path, model: Path, samples: int, length: int) -> Dataset:
    """Windows of the texts: first windows first, as fp8serve reads them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(json.loads(line)["text"])["input_ids"] for line in data.read_text(encoding="utf-8").splitlines()]
    windows = [row[start : start + length] for start in range(0, max(map(len, ids)), length) for row in ids]
    usable = [window for window in windows if len(window) > 1][:samples]
    return Dataset.from_dict({"input_ids": usable, "attention_mask": [[1] * len(row) for row in usable]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--scheme", default="FP8", choices=("FP8", "FP8_DYNAMIC", "FP8_BLOCK"))
    parser.add_argument("--gptq", action="store_true", help="its error-compensated rounding")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    args = parser.parse_args()
    decoder = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    data = rows(args.data, args.model, args.samples, args.seq_len)
    kind = GPTQModifier if args.gptq else QuantizationModifier
    recipe = kind(targets="Linear", scheme=args.scheme, ignore=["lm_head"])
    oneshot(model=decoder, dataset=data, recipe=recipe, max_seq_length=args.seq_len, num_calibration_samples=len(data))
    decoder.save_pretrained(args.out, save_compressed=True)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)


if __name__ == "__main__":
    main()
