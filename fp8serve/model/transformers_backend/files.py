"""Maps the tensors of files to the parameter names and the weight layout of transformers' class.

Files may have older names, from before transformers renamed a module, or the names of the class without its head. This
module applies transformers' own list of renames. Tensors that a class ignores are omitted.

GPT-2's `Conv1D` is a linear layer whose weight is transposed in files, [in, out]. In memory it is an ordinary linear
layer, so FP8, calibration and training need no special case. A weight and its matrix of scales are transposed when they
are read (`transpose_matrices`) and written (export.py).
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fp8serve.errors import ModelError
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.storage.shards import ComputedShards, Shards
from fp8serve.model.transformers_backend.experts import STACKS
from fp8serve.model.transformers_backend.network import TransformersModel

_GPT2_CONV1D = (".c_attn", ".q_attn", ".c_proj", ".c_fc")
_WEIGHT_SCALE = re.compile(r"\.weight(_\w*scale\w*)$")
Rename = Callable[[str], str]


def with_class_names(shards: Shards, config: ModelConfig) -> Shards:
    """Renames the tensors to the parameter names of transformers' class, and transposes weights of `Conv1D`.

    Raises ModelError if the class reads a buffer from files, or computes a parameter from several tensors.
    """
    model = TransformersModel(config)
    built: Any = model.class_model[0]
    state_names, base = set(built.state_dict()), built.base_model_prefix
    buffers = state_names - {name for name, _ in built.named_parameters(remove_duplicate=False)}
    renames = list(_renames(built, shards))
    ignored = [re.compile(pattern) for pattern in built._keys_to_ignore_on_load_unexpected or ()]
    names = {}
    for key in shards:
        # A scale is renamed as its weight is: the pattern ".weight_g" does not mean ".weight_global_scale".
        scale = _WEIGHT_SCALE.search(key)
        name = key if scale is None else key[: scale.start(1)]
        for rename in renames:
            name = rename(name)
        name = name if scale is None else name + scale[1]
        owner = name.rpartition(".")[0]
        lacks_prefix = name not in state_names and any(other.startswith(f"{base}.{owner}.") for other in state_names)
        name = f"{base}.{name}" if lacks_prefix else name
        if name not in state_names and any(pattern.search(name) for pattern in ignored):
            continue
        if name in buffers:
            raise ModelError(
                f"{key} is a buffer in the checkpoint, which the transformers backend does not load; "
                f"{config.architecture} needs a model family."
            )
        names[key] = name
    named = shards.renamed(names)
    return transpose_matrices(named, model.transposed) if model.transposed else named


def _renames(built: Any, keys: Iterable[str]) -> Iterator[Rename]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    for conversion in get_model_conversion_mapping(built):
        if isinstance(conversion, WeightRenaming):
            sources, targets = conversion.source_patterns, conversion.target_patterns
            yield from map(_rename, sources, targets if len(targets) == len(sources) else targets * len(sources))
        elif all(target.endswith(STACKS) for target in conversion.target_patterns):
            continue  # experts are read one by one, as they are in the file
        elif key := next((k for k in keys for p in conversion.source_patterns if re.search(p, k)), None):
            name = type(built).__name__
            raise ModelError(f"The file of {name} holds {key}, which transformers converts when it loads the model; "
                             "the transformers backend only loads weights that need no conversion.")  # fmt: skip


def _rename(source: str, target: str) -> Rename:
    pattern = re.compile(source)
    return lambda name: pattern.sub(target, name)


def transpose_weights(tensors: Mapping[str, Tensor], linears: Collection[str]) -> dict[str, Tensor]:
    """Transposes the weights of `linears`, from the layout in memory to that in files or back."""
    return {
        n: t.t().contiguous() if n.rpartition(".")[0] in linears and t.dim() == 2 else t for n, t in tensors.items()
    }


def transpose_gpt2(shards: Shards, config: Mapping[str, Any]) -> Shards:
    """Transposes the weights of GPT-2 to [out, in], for callers that do not build the model."""
    if config.get("model_type") != "gpt2":
        return shards
    owners = {name.rpartition(".")[0] for name in shards}
    return transpose_matrices(shards, {owner for owner in owners if owner.endswith(_GPT2_CONV1D)})


def transpose_matrices(shards: Shards, linears: Collection[str]) -> Shards:
    """Transposes the matrices that belong to `linears` when they are read."""
    entries, computed = dict(shards.entries), dict[str, Callable[[], Tensor]]()
    for name, entry in shards.entries.items():
        if name.rpartition(".")[0] in linears and len(entry.shape) == 2:
            entries[name] = replace(entry, shape=entry.shape[::-1])
            computed[name] = partial(_transpose, shards, name)
    return ComputedShards(shards, entries, computed)


def _transpose(shards: Shards, name: str) -> Tensor:
    return shards[name].t().contiguous()
