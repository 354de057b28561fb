"""Models with an outlier in one channel: the norm multiplies the channel, and the weights after it divide by the same
factor, so that results in high precision stay equal."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

NORM = "model.layers.1.post_attention_layernorm"
CHANNEL = 5


def plant(model: Path, out: Path, power: int, norm: str = NORM, channel: int = CHANNEL) -> Path:
    """Writes a copy of `model` to `out` in which one channel of the norm before an MLP is multiplied by 2^power, and
    the columns of gate_proj and up_proj that read it are divided by it. Returns `out`.

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
