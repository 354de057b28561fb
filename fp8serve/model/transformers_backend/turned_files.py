"""Reads files in which the weights of linear layers are transposed as if they were not (transposed.py)."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fp8serve.model.storage.shards import Shards, StoredTensor

_IN_GPT2 = (".c_attn", ".q_attn", ".c_proj", ".c_fc")


def as_multiplied(shards: Shards, config: Mapping[str, Any]) -> Shards:
    """Every weight [out, in], by the names of GPT-2's layers, for code that does not build the model."""
    if config.get("model_type") != "gpt2":
        return shards
    return Turned(shards, {owner for name in shards if (owner := name.rpartition(".")[0]).endswith(_IN_GPT2)})


class Turned(Shards):
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
