"""The tensors of a file under their names in transformers' class.

Files may have other names: those of the model before transformers renamed a module, or those of the class without its
head. This module follows transformers' list of such names. Tensors that a class does not read from files are left out.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from fp8serve.errors import ModelError
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.storage.shards import Shards
from fp8serve.model.transformers_backend.experts import STACKS
from fp8serve.model.transformers_backend.network import TransformersModel
from fp8serve.model.transformers_backend.transposed import TransposedShards

Rename = Callable[[str], str]


def by_module(shards: Shards, config: ModelConfig) -> Shards:
    """ModelError: transformers computes a tensor from several of the file's."""
    model = TransformersModel(config)
    built: Any = model.whole[0]
    known, base = set(built.state_dict()), built.base_model_prefix
    buffers = known - {name for name, _ in built.named_parameters(remove_duplicate=False)}
    renames = list(_renames(built, shards))
    ignored = [re.compile(pattern) for pattern in built._keys_to_ignore_on_load_unexpected or ()]
    names = {}
    for key in shards:
        name = key
        for rename in renames:
            name = rename(name)
        owner = name.rpartition(".")[0]
        in_base = name not in known and any(other.startswith(f"{base}.{owner}.") for other in known)
        name = f"{base}.{name}" if in_base else name
        if name not in known and any(pattern.search(name) for pattern in ignored):
            continue
        if name in buffers:
            raise ModelError(
                f"{key} is a buffer in the checkpoint, which the transformers backend does not load; "
                f"{config.architecture} needs a model family."
            )
        names[key] = name
    named = shards.renamed(names)
    return TransposedShards(named, model.transposed) if model.transposed else named


def _renames(built: Any, keys: Iterable[str]) -> Iterable[Rename]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    for conversion in get_model_conversion_mapping(built):
        if isinstance(conversion, WeightRenaming):
            sources, targets = conversion.source_patterns, conversion.target_patterns
            several = targets if len(targets) == len(sources) else targets * len(sources)
            yield from map(_rename, sources, several)
        elif all(target.endswith(STACKS) for target in conversion.target_patterns):
            continue  # experts are read one by one, as they are in the file
        elif key := next((k for k in keys for p in conversion.source_patterns if re.search(p, k)), None):
            name = type(built).__name__
            raise ModelError(f"The file of {name} holds {key}, which transformers converts; a model is "
                             "computed by transformers' class if its weights are read as they are.")  # fmt: skip


def _rename(source: str, target: str) -> Rename:
    pattern = re.compile(source)
    return lambda name: pattern.sub(target, name)
