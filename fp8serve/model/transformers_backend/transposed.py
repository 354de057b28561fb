"""GPT-2's `Conv1D`: a linear layer whose weight is transposed in files, [in, out].

In memory it is a linear layer like any other, so FP8, calibration and training need nothing new. A weight and its
matrix of scales are transposed when they are read (turned_files.py) and written (export.py).
"""

from collections.abc import Collection, Mapping
from typing import cast

from torch import Tensor, nn


def as_linears(model: nn.Module) -> frozenset[str]:
    """Replace every Conv1D of `model` by a linear layer without weights; returns their names."""
    from transformers.pytorch_utils import Conv1D

    found = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in found.items():
        owner, _, leaf = name.rpartition(".")
        rows, columns, dtype = cast(int, module.nf), cast(int, module.nx), module.weight.dtype
        setattr(model.get_submodule(owner), leaf, nn.Linear(columns, rows, device="meta", dtype=dtype))
    return frozenset(found)


def turned(tensors: Mapping[str, Tensor], linears: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a model as files have them, or back: the weights of `linears` are transposed."""
    return {
        n: t.t().contiguous() if n.rpartition(".")[0] in linears and t.dim() == 2 else t for n, t in tensors.items()
    }
