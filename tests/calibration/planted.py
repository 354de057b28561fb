"""Models with an outlier in one channel, which the weights that read it undo: in high precision nothing changes."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

NORM = "model.layers.1.post_attention_layernorm"
CHANNEL = 5


def plant(model: Path, out: Path, power: int, norm: str = NORM, channel: int = CHANNEL) -> Path:
    """`model` with a channel of this norm before an MLP 2^power times as large, and the columns that read it as small.

    A power of two changes no digit of a BF16 number.
    """
    shutil.copytree(model, out)
    file, mlp = out / "model.safetensors", norm.rpartition(".")[0] + ".mlp"
    weights = load_file(file)
    weights[f"{norm}.weight"][channel] *= 2.0**power
    for name in ("gate_proj", "up_proj"):
        weights[f"{mlp}.{name}.weight"][:, channel] /= 2.0**power
    save_file(weights, file, {"format": "pt"})
    return out
