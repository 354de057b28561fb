"""A model, a draft model whose tokens are always accepted, and one whose tokens are mostly rejected."""

import re
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from .tiny import write_model

LAYERS = 8


def write_drafts(home: Path) -> Path:
    """Writes three models into `home`, and returns it. `model` has `LAYERS` layers, of which only the first changes the
    hidden state. `same` is that layer alone, so that its drafts are always right. `other` is one layer of other
    weights."""
    write_model(home / "model", num_hidden_layers=LAYERS)
    write_model(home / "same", num_hidden_layers=1)
    write_model(home / "other", num_hidden_layers=1, seed=5)
    tensors = load_file(home / "model" / "model.safetensors")
    for name, tensor in tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) > 0 and ("o_proj" in name or "down_proj" in name):
            tensor.zero_()
    rewrite(home / "model", tensors)
    rewrite(home / "same", {name: tensors[name] for name in load_file(home / "same" / "model.safetensors")})
    return home


def rewrite(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
