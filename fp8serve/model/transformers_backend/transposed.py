"""GPT-2's `Conv1D`: a linear layer whose weight is transposed in files, [in, out].

In memory it is a linear layer like any other, so FP8, calibration and training need nothing new. A weight and its
matrix of scales are transposed when they are read (`TransposedShards`) and written (export.py).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from fp8serve.model.storage.shards import Shards, StoredTensor

_IN_GPT2 = (".c_attn", ".q_attn", ".c_proj", ".c_fc")


def as_linears(model: nn.Module) -> frozenset[str]:
    """Replace every Conv1D of `model` by a linear layer without weights; returns their names."""
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, module in modules.items():
        owner, _, leaf = name.rpartition(".")
        rows, columns, dtype = cast(int, module.nf), cast(int, module.nx), module.weight.dtype
        setattr(model.get_submodule(owner), leaf, nn.Linear(columns, rows, device="meta", dtype=dtype))
    return frozenset(modules)


def turned(tensors: Mapping[str, Tensor], linears: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a model as files have them, or back: the weights of `linears` are transposed."""
    return {
        n: t.t().contiguous() if n.rpartition(".")[0] in linears and t.dim() == 2 else t for n, t in tensors.items()
    }


def as_multiplied(shards: Shards, config: Mapping[str, Any]) -> Shards:
    """Every weight [out, in], by the names of GPT-2's layers, for code that does not build the model."""
    if config.get("model_type") != "gpt2":
        return shards
    return TransposedShards(shards, {owner for name in shards if (owner := name.rpartition(".")[0]).endswith(_IN_GPT2)})


class TransposedShards(Shards):
    """Shards in which the matrices that belong to `linears` are transposed."""

    def __init__(self, stored: Shards, linears: Collection[str]) -> None:
        self._stored = stored
        self._turned = {n for n, e in stored.entries.items() if n.rpartition(".")[0] in linears and len(e.shape) == 2}
        super().__init__({name: self._described(name) for name in stored.entries}, stored.metadata)

    def __getitem__(self, name: str) -> Tensor:
        """As Shards, but a transposed matrix is a copy."""
        tensor = self._stored[name]
        return tensor.t().contiguous() if name in self._turned else tensor

    def _described(self, name: str) -> StoredTensor:
        entry = self._stored.entries[name]
        return replace(entry, shape=entry.shape[::-1]) if name in self._turned else entry
