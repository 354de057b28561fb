"""Adapters with random numbers, written as peft writes them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from fp8serve.model.adapters import adaptable_linears, write_adapter
from fp8serve.model.config.decoder import read_config
from fp8serve.model.formats.peft import PeftConfig


def write_random_adapter(
    folder: Path, model: Path, *, rank: int = 4, dora: bool = False, only: Sequence[str] = ("proj",), seed: int = 0
) -> Path:
    """Writes an adapter of every linear layer of `model` whose name contains one of `only`, large enough to change
    answers. Returns `folder`."""
    noise = torch.Generator().manual_seed(seed)
    linears = adaptable_linears(read_config(model))
    weights = {}
    for name, (rows, cols) in linears.items():
        if any(part in name for part in only):
            weights[f"{name}.lora_A"] = torch.randn(rank, cols, generator=noise) * 0.2
            weights[f"{name}.lora_B"] = torch.randn(rows, rank, generator=noise) * 0.2
            if dora:
                weights[f"{name}.lora_magnitude_vector"] = torch.rand(rows, generator=noise) + 0.5
    folder.mkdir(parents=True)
    write_adapter(folder, str(model), PeftConfig(rank, 1.7 * rank, dora=dora), weights, list(linears))
    return folder
