"""DeepSeek's layers for multi-token prediction come after the model's own in the file; they are left out."""

import re

from fp8serve.model.config.decoder import ModelConfig
from fp8serve.model.storage.shards import Shards

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def without_predictors(shards: Shards, config: ModelConfig) -> tuple[Shards, tuple[str, ...]]:
    """(the tensors without those of the `num_predictors` layers after the last, the names of the layers left out)."""
    behind = [f"model.layers.{config.num_layers + i}" for i in range(config.num_predictors)]
    kept = {key: key for key in shards if _layer(key) not in behind}
    found = {_layer(key) for key in shards if key not in kept}
    return (shards.renamed(kept) if found else shards), tuple(layer for layer in behind if layer in found)


def _layer(key: str) -> str:
    match = _LAYER.match(key)
    return "" if match is None else match.group(0)[:-1]
