"""Reads checkpoints of torchao 0.14 and later: `quant_method: torchao`, tensor subclasses flattened into safetensors.

    P._weight_qdata  E4M3 [N, K]                the FP8 values of P.weight
    P._weight_scale  FP32 [N, 1], [1, 1] or [N / 128, K / 128], dequantizes

Stacks of experts have the same suffixes: `mlp.experts._gate_up_proj_qdata` [E, N, K]. This module renames these tensors
as in other projects: `P.weight` and `P.weight_scale`. `quant_type` in config.json determines how inputs are quantized:
it holds a configuration class of torchao and its fields. torchao has only dynamic inputs. A scale per tensor is read as
one per token, so that an output does not depend on other sequences of the batch. Bounds that clamp the
inputs (activation_value_lb, activation_value_ub) and different configurations for different layers raise ModelError.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.fp8.spec import UNQUANTIZED, QuantSpec
from fp8serve.model.storage.shards import Shards

METHOD = "torchao"
_FLATTENED = re.compile(r"(.*)\._(\w+)_(qdata|scale)")
_WEIGHT_ONLY, _DYNAMIC = "Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"
_INPUTS = {"PerRow": QuantSpec(granularity="row"), "PerTensor": QuantSpec(granularity="row"),
           "PerBlock": QuantSpec(granularity="block1x128")}  # fmt: skip
_BLOCKS = ([1, 128], [128, 128])


def canonical_name(key: str, keys: Iterable[str]) -> str:
    """Returns other projects' name for `key`, or `key` if `keys` do not contain both values and scale."""
    match = _FLATTENED.fullmatch(key)
    if match is None or not {f"{match[1]}._{match[2]}_{part}" for part in ("qdata", "scale")} <= set(keys):
        return key
    return f"{match[1]}.{match[2]}{'_scale' if match[3] == 'scale' else ''}"


def with_canonical_names(shards: Shards) -> Shards:
    """Returns the tensors under other projects' names. Raises ModelError if two get the same name."""
    keys = frozenset(key for key in shards if _FLATTENED.fullmatch(key))
    return shards.renamed({key: canonical_name(key, keys) for key in shards}) if keys else shards


def input_spec(quant_type: Any, unsupported: Callable[[str, Any], ModelError]) -> QuantSpec:
    """Returns how inputs are quantized, according to config.json's `quant_type`.

    Raises the error that unsupported(key, value) returns for an unsupported value.
    """
    default = quant_type.get("default") if isinstance(quant_type, Mapping) and set(quant_type) == {"default"} else None
    kind = default.get("_type") if isinstance(default, Mapping) else None
    if not isinstance(default, Mapping) or kind not in (_WEIGHT_ONLY, _DYNAMIC):
        raise unsupported("quant_type", kind or quant_type)
    data = default.get("_data")
    if not isinstance(data, Mapping):
        raise unsupported("quant_type", default)
    for key in ("activation_value_lb", "activation_value_ub"):
        if data.get(key) is not None:
            raise unsupported(key, data[key])
    return UNQUANTIZED if kind == _WEIGHT_ONLY else _dynamic(data.get("granularity"), unsupported)


def _dynamic(granularity: Any, unsupported: Callable[[str, Any], ModelError]) -> QuantSpec:
    """Returns the spec of dynamic inputs. `granularity` is one object, or a list for the input and the weight."""
    pair = granularity if isinstance(granularity, list) and len(granularity) == 2 else [granularity] * 2
    kinds = [item.get("_type") if isinstance(item, Mapping) else item for item in pair]
    if kinds == [None, None]:  # torchao's default
        return _INPUTS["PerTensor"]
    if kinds[0] != kinds[1] or kinds[0] not in _INPUTS:
        raise unsupported("granularity", kinds)
    if kinds[0] == "PerBlock":
        for item, block in zip(pair, _BLOCKS, strict=True):
            if list((item.get("_data") or {}).get("block_size") or ()) != block:
                raise unsupported("block_size", shown(item))
    return _INPUTS[kinds[0]]
