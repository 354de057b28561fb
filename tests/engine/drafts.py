"""A model, a draft model that always guesses right, and one that does not."""

import re
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from .tiny import write_model

LAYERS = 8


def write_drafts(home: Path) -> Path:
    """`model`: of its layers all but the first add nothing. `same`: that one, whose guesses are always right. `other`:
    one layer of other weights, whose guesses are not."""
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
